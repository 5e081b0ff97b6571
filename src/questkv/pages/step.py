"""A step: what new tokens of every sequence need to know, worked out once for all layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from questkv.kernels import Places, Rows
from questkv.pages.geometry import PageGeometry
from questkv.pages.sequence import Sequence


@dataclass
class Step:
    """New tokens for every sequence, reserved once and then written layer by layer.

    Attributes:
        counts: New tokens of every sequence.
        lengths: Tokens of every sequence, the new ones included.
        places: Slots [T] of the new tokens, sequence after sequence, T = sum(counts); the pages that they seal, the
            closed pages that those move into (as codes with ``kv_dtype="int8"``), and the spans that they complete.
        page_table: [B, P] int64 physical pages, -1 past a sequence's own.
        written_table: Like `page_table`, with the pages of `sealed` where that has the closed ones.
        page_size: S.
        written: Layers that hold the new tokens already.
    """

    counts: list[int]
    lengths: list[int]
    places: Places
    page_table: torch.Tensor
    written_table: torch.Tensor
    page_size: int
    written: set[int] = field(default_factory=set)

    @cached_property
    def row_lengths(self) -> list[int]:
        """Tokens visible to every new token when each is a row of its own, sequence after sequence."""
        return [
            length - count + token + 1
            for length, count in zip(self.lengths, self.counts, strict=True)
            for token in range(count)
        ]

    @cached_property
    def rows(self) -> Rows:
        """Page table [T, P] and lengths [T] with a row for every new token, as the operators take them.

        A page that the step moves is closed for the tokens after it and plain for those inside it, as it is when each
        token comes alone.
        """
        device = self.page_table.device
        counts, lengths = torch.tensor(self.counts, device=device), torch.tensor(self.row_lengths, device=device)
        table = self.page_table.repeat_interleave(counts, dim=0)
        if self.places.into is not None and max(self.counts, default=0) > 1:
            open_pages = torch.div(lengths - 1, self.page_size, rounding_mode="floor")[:, None]
            written = self.written_table.repeat_interleave(counts, dim=0)
            table.scatter_(1, open_pages, written.gather(1, open_pages))
        return Rows(table, lengths)

    def run(self, sequence: int) -> torch.Tensor:
        """[P] page table for a sequence's new tokens as one dense block: they read each other as they were written.

        Pages before the first new token's are read as later tokens will find them, coded ones decoded.
        """
        length = self.lengths[sequence]
        first, end = (length - self.counts[sequence]) // self.page_size, -(-length // self.page_size)
        if self.places.into is None:
            return self.page_table[sequence, :end]
        return torch.cat([self.page_table[sequence, :first], self.written_table[sequence, first:end]])


def describe(geometry: PageGeometry, sequences: list[Sequence], counts: list[int], into: dict[int, int]) -> Step:
    """The step that has added `counts` tokens to every sequence.

    Args:
        geometry: The pool's.
        sequences: The sequences, grown.
        counts: New tokens of every sequence.
        into: The closed page for each plain one that the step seals and moves.
    """
    page_size, device = geometry.page_size, geometry.device
    table = _padded([sequence.table for sequence in sequences])
    written = _padded([sequence.written_table for sequence in sequences]) if into else table
    slots, sealed = [torch.empty(0, dtype=torch.int64)], [torch.tensor(list(into), dtype=torch.int64)]
    for row, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
        if not count:
            continue
        tokens = torch.arange(sequence.length - count, sequence.length)
        slots.append(written[row, tokens // page_size] * page_size + tokens % page_size)
        if not geometry.closes:
            sealed_before = max(sequence.length - count - 1, 0) // page_size
            sealed.append(table[row, sealed_before : sequence.sealed_pages])
    return Step(
        counts,
        [sequence.length for sequence in sequences],
        Places(
            torch.cat(slots).to(device),
            torch.cat(sealed).to(device),
            torch.tensor(list(into.values()), dtype=torch.int64).to(device) if geometry.closes else None,
            _spans(geometry, sequences, counts, table).to(device) if geometry.span_pages else None,
        ),
        table.to(device),
        written.to(device),
        page_size,
    )


def _spans(geometry: PageGeometry, sequences: list[Sequence], counts: list[int], table: torch.Tensor) -> torch.Tensor:
    """[k, C] pages of the spans that `counts` new tokens have completed."""
    page_size, size = geometry.page_size, geometry.span_pages
    spans = [torch.empty((0, size), dtype=torch.int64)]
    for row, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
        before = max(sequence.length - count - 1, 0) // page_size // size
        after = sequence.sealed_pages // size
        spans.append(table[row, before * size : after * size].view(-1, size))
    return torch.cat(spans)


def _padded(tables: list[list[int]]) -> torch.Tensor:
    """[B, P] int64, -1 past a sequence's own pages."""
    width = max(map(len, tables), default=0)
    padded = torch.tensor([table + [-1] * (width - len(table)) for table in tables], dtype=torch.int64)
    return padded.view(len(tables), width)
