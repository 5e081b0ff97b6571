"""Sequences that are decoded together, and the step that adds tokens to all of them in every layer."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from questkv import kernels
from questkv.errors import PoolFullError
from questkv.kernels.blockwise import tokens_of
from questkv.pages.pool import PagePool
from questkv.pages.sequence import Sequence


@dataclass
class Step:
    """New tokens for every sequence, reserved once and then written layer by layer.

    Attributes:
        counts: New tokens of every sequence.
        lengths: Tokens of every sequence, the new ones included.
        slots: [T] int64, ``physical page * S + slot`` of the new tokens, sequence after sequence; T = sum(counts).
        sealed: [m] int64 physical pages that the new tokens seal.
        into: [m] int64 closed pages that they move into, as codes with ``kv_dtype="int8"``; None if they stay.
        page_table: [B, P] int64 physical pages, -1 past a sequence's own.
        written_table: Like `page_table`, with the pages of `sealed` where that has those of `into`.
        spans: [k, C] int64 physical pages of the spans that the new tokens complete; None without spans.
        page_size: S.
        written: Layers that hold the new tokens already.
    """

    counts: list[int]
    lengths: list[int]
    slots: torch.Tensor
    sealed: torch.Tensor
    into: torch.Tensor | None
    page_table: torch.Tensor
    written_table: torch.Tensor
    spans: torch.Tensor | None
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
    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Page table [T, P] and lengths [T] with a row for every new token, as the operators take them.

        A page that the step moves is closed for the tokens after it and plain for those inside it, as it is when each
        token comes alone.
        """
        device = self.page_table.device
        counts, lengths = torch.tensor(self.counts, device=device), torch.tensor(self.row_lengths, device=device)
        table = self.page_table.repeat_interleave(counts, dim=0)
        if self.into is not None and max(self.counts, default=0) > 1:
            open_pages = torch.div(lengths - 1, self.page_size, rounding_mode="floor")[:, None]
            written = self.written_table.repeat_interleave(counts, dim=0)
            table.scatter_(1, open_pages, written.gather(1, open_pages))
        return table, lengths

    def run(self, sequence: int) -> torch.Tensor:
        """[P] page table for a sequence's new tokens as one dense block: they read each other as they were written.

        Pages before the first new token's are read as later tokens will find them, coded ones decoded.
        """
        length = self.lengths[sequence]
        first, end = (length - self.counts[sequence]) // self.page_size, -(-length // self.page_size)
        if self.into is None:
            return self.page_table[sequence, :end]
        return torch.cat([self.page_table[sequence, :first], self.written_table[sequence, first:end]])


class SequenceBatch:
    """B sequences of one pool.

    Tokens come in steps: `reserve` makes room in all sequences or in none, `write` puts one layer's keys and values
    there. A step that not every layer has written when the next one is reserved (an interrupted forward) is undone.
    Pages are given back when the batch is garbage collected.

    Args:
        pool: Where the pages come from.
        size: B.
    """

    def __init__(self, pool: PagePool, size: int) -> None:
        self.pool = pool
        self.sequences = [Sequence(pool) for _ in range(size)]
        self.step: Step | None = None
        weakref.finalize(self, _free, self.sequences)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def lengths(self) -> list[int]:
        """Tokens of every sequence."""
        return [sequence.length for sequence in self.sequences]

    def reserve(self, counts: Iterable[int]) -> Step:
        """Make room for `counts` new tokens of every sequence, copying a shared page before it is written.

        Raises:
            PoolFullError: They don't fit; every sequence is as it was.
            ValueError: Not one count >= 0 per sequence.
        """
        counts = list(counts)
        if len(counts) != len(self.sequences) or any(count < 0 for count in counts):
            raise ValueError(f"[reserve] counts: expected {len(self.sequences)} numbers >= 0, got {counts}")
        self.settle()
        self.step = self._describe(counts, self._make_room(counts))
        return self.step

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, *, backend: str = "auto") -> None:
        """Write the reserved tokens of one layer and seal the pages that they seal.

        Args:
            layer: The pool's layer.
            keys: [T, Hkv, D] the new tokens, sequence after sequence.
            values: [T, Hkv, Dv] likewise.
            backend: ``auto`` or a backend's name.
        """
        step = self._reserved()
        # A step may add no token at all (a chunk of padding), and the pool may then have no page yet.
        if len(step.slots):
            kernels.append(self.pool.layer(layer), step.slots, keys, values, backend=backend)
            if len(step.sealed):
                self.pool.seal(layer, step.sealed, step.into, backend=backend)
            if step.spans is not None and len(step.spans):
                kernels.seal_spans(self.pool.layer(layer), step.spans, backend=backend)
        step.written.add(layer)

    def written(self, layer: int) -> None:
        """Note that a layer holds the reserved tokens: `kernels.DecodeStep` has written them."""
        self._reserved().written.add(layer)

    def keys_values(self, layer: int, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values that one layer holds of one sequence, in token order.

        Args:
            layer: The pool's layer.
            sequence: Which sequence.

        Returns:
            [Hkv, L, D] and [Hkv, L, Dv], views where the pages lie in one run, else copies; float32 if a page among
            them is coded. Tokens of a step that the layer hasn't written are not among them.
        """
        length, table, step = self.sequences[sequence].length, self.sequences[sequence].table, self.step
        if step is not None and layer not in step.written:
            length -= step.counts[sequence]
            table = self.sequences[sequence].written_table
        pages = self.pool.layer(layer)
        if not length:
            first = pages.segments[0]
            return first.keys[:, 0, :0], first.values[:, 0, :0]
        return tokens_of(pages, torch.tensor(table, device=pages.device), length)

    def _reserved(self) -> Step:
        assert self.step is not None, "reserve comes before write"
        return self.step

    def settle(self) -> None:
        """End the last step: undo it if not every layer has written it, else give back the pages that it replaced."""
        if self.step is not None and len(self.step.written) < self.pool.num_layers:
            self.undo()
        for sequence in self.sequences:
            sequence.settle()
        self.pool.trim()
        self.step = None

    def undo(self) -> None:
        """Take the last step back, if it has not been settled."""
        if self.step is not None:
            for sequence, count in zip(self.sequences, self.step.counts, strict=True):
                sequence.restore()
                sequence.crop(count)
            self.step = None

    def crop(self, counts: Iterable[int]) -> None:
        """Forget the last tokens of every sequence.

        Raises:
            ValueError: A sequence has fewer tokens; every sequence is as it was.
        """
        self.settle()
        counts = list(counts)
        if len(counts) != len(self) or any(
            not 0 <= n <= length for n, length in zip(counts, self.lengths, strict=True)
        ):
            raise ValueError(f"[crop] counts: expected at most {self.lengths}, got {counts}")
        for sequence, count in zip(self.sequences, counts, strict=True):
            sequence.crop(count)

    def reorder(self, indices: Iterable[int]) -> None:
        """Sequence i becomes what sequence indices[i] was; the batch may grow or shrink (beam search).

        Raises:
            ValueError: An index is out of range; every sequence is as it was.
        """
        indices = list(indices)
        if any(not 0 <= index < len(self.sequences) for index in indices):
            raise ValueError(f"[reorder] indices: expected 0 to {len(self.sequences) - 1}, got {indices}")
        self.settle()
        chosen = [self.sequences[index].fork() for index in indices]
        _free(self.sequences)
        self.sequences[:] = chosen

    def fork(self) -> SequenceBatch:
        """A second batch with the same tokens, sharing every page."""
        self.settle()
        other = SequenceBatch(self.pool, 0)
        other.sequences.extend(sequence.fork() for sequence in self.sequences)
        return other

    def free(self) -> None:
        """Give every page back; the sequences are empty then."""
        self.step = None
        _free(self.sequences)

    def _make_room(self, counts: list[int]) -> dict[int, int]:
        """Grow every sequence; returns the closed page for each plain one that the step seals and moves."""
        page_size = self.pool.geometry.page_size
        missing, copies = [], []
        places: list[int] = []  # logical, of the pages that are taken
        given_up: Counter[int] = Counter()
        for sequence, count in zip(self.sequences, counts, strict=True):
            missing.append(-(-(sequence.length + count) // page_size) - len(sequence.table))
            copy = count > 0 and sequence.length % page_size > 0
            if copy and not self.pool.is_closed(sequence.table[-1]):
                # Of several sequences that leave the same shared page, the last holder keeps it.
                page = sequence.table[-1]
                copy = self.pool.holders(page) - given_up[page] > 1
                given_up[page] += copy
            copies.append(copy)
            places += range(len(sequence.table) - copy, len(sequence.table) + missing[-1])
        to_close = self._to_close(counts)
        pages = self.pool.allocate(len(places), ends=self._ends(places))
        try:
            closed_places = self._closed_places(to_close)
            ends = self._ends(closed_places)
            closed = self.pool.allocate(len(closed_places), closed=True, ends=ends) if closed_places else []
        except PoolFullError:
            self.pool.release(pages)
            raise
        for sequence, count, new, copy in zip(self.sequences, counts, missing, copies, strict=True):
            if copy:
                self._copy_open_page(sequence, pages.pop(0))
            sequence.table.extend(pages[:new])
            del pages[:new]
            sequence.length += count
        return self._put_closed(to_close, closed)

    def _copy_open_page(self, sequence: Sequence, page: int) -> None:
        """Make the last page writable: it is shared, or a crop opened it again after it was closed."""
        self.pool.copy_page(sequence.table[-1], page)
        if self.pool.is_closed(sequence.table[-1]):
            # Decoding codes rounds to the model's type, so what undoes the step is the closed page.
            sequence.replace(len(sequence.table) - 1, page)
        else:
            self.pool.release([sequence.table[-1]])
            sequence.table[-1] = page

    def _to_close(self, counts: list[int]) -> list[range]:
        """Logical pages of every sequence that `counts` new tokens seal and move, without those moved before."""
        if not self.pool.geometry.closes:
            return [range(0)] * len(counts)
        page_size, to_close = self.pool.geometry.page_size, []
        for sequence, count in zip(self.sequences, counts, strict=True):
            first, end = sequence.sealed_pages, max(sequence.length + count - 1, 0) // page_size
            # A crop may have left a closed page as the last one, and full.
            is_full = sequence.length > 0 and sequence.length % page_size == 0
            to_close.append(range(first + (is_full and self.pool.is_closed(sequence.table[first])), end))
        return to_close

    def _ends(self, places: list[int]) -> set[int]:
        """Which of the logical places end a span."""
        return {i for i, place in enumerate(places) if self.pool.geometry.ends_span(place)}

    def _closed_places(self, to_close: list[range]) -> list[int]:
        """Logical places of the closed pages that the step needs, in the order in which `_put_closed` takes them.

        Sequences may share a full page that none has sealed yet: it is closed once.
        """
        places: list[int] = []
        shared: set[int] = set()
        for sequence, logical in zip(self.sequences, to_close, strict=True):
            is_full = sequence.length > 0 and sequence.length % self.pool.geometry.page_size == 0
            full = sequence.table[logical.start : logical.start + 1] if logical and is_full else []
            places += logical[1:] if full and full[0] in shared else logical
            shared.update(full)
        return places

    def _put_closed(self, to_close: list[range], closed: list[int]) -> dict[int, int]:
        """Put closed pages in the place of the plain ones that the step seals; returns which for which."""
        into: dict[int, int] = {}
        for sequence, logical_pages in zip(self.sequences, to_close, strict=True):
            for logical in logical_pages:
                page = sequence.table[logical]
                if page in into:
                    self.pool.share([into[page]])
                else:
                    into[page] = closed[len(into)]
                sequence.replace(logical, into[page])
        return into

    def _describe(self, counts: list[int], into: dict[int, int]) -> Step:
        geometry = self.pool.geometry
        page_size, device = geometry.page_size, geometry.device
        table = self._padded([sequence.table for sequence in self.sequences])
        written = self._padded([sequence.written_table for sequence in self.sequences]) if into else table
        slots, sealed = [torch.empty(0, dtype=torch.int64)], [torch.tensor(list(into), dtype=torch.int64)]
        for row, (sequence, count) in enumerate(zip(self.sequences, counts, strict=True)):
            if not count:
                continue
            tokens = torch.arange(sequence.length - count, sequence.length)
            slots.append(written[row, tokens // page_size] * page_size + tokens % page_size)
            if not geometry.closes:
                sealed_before = max(sequence.length - count - 1, 0) // page_size
                sealed.append(table[row, sealed_before : sequence.sealed_pages])
        return Step(
            counts,
            self.lengths,
            torch.cat(slots).to(device),
            torch.cat(sealed).to(device),
            torch.tensor(list(into.values()), dtype=torch.int64).to(device) if geometry.closes else None,
            table.to(device),
            written.to(device),
            self._spans(counts, table).to(device) if geometry.span_pages else None,
            page_size,
        )

    def _spans(self, counts: list[int], table: torch.Tensor) -> torch.Tensor:
        """[k, C] pages of the spans that `counts` new tokens have completed."""
        page_size, size = self.pool.geometry.page_size, self.pool.geometry.span_pages
        spans = [torch.empty((0, size), dtype=torch.int64)]
        for row, (sequence, count) in enumerate(zip(self.sequences, counts, strict=True)):
            before = max(sequence.length - count - 1, 0) // page_size // size
            after = sequence.sealed_pages // size
            spans.append(table[row, before * size : after * size].view(-1, size))
        return torch.cat(spans)

    def _padded(self, tables: list[list[int]]) -> torch.Tensor:
        """[B, P] int64, -1 past a sequence's own pages."""
        width = max(map(len, tables), default=0)
        padded = torch.tensor([table + [-1] * (width - len(table)) for table in tables], dtype=torch.int64)
        return padded.view(len(tables), width)


def _free(sequences: list[Sequence]) -> None:
    for sequence in sequences:
        sequence.free()
