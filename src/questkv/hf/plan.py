"""What one forward adds to every sequence and how each new token is attended: worked out once, used by all layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from questkv.config import QuestConfig
from questkv.errors import CacheMismatchError, UnsupportedError
from questkv.kernels import Rows, Scoring
from questkv.pages import Step


@dataclass(frozen=True)
class Columns:
    """The new columns of a padded batch.

    Attributes:
        batch: B.
        width: Columns, padding included.
        real: [B, width] bool, False where a column is padding; None if none is.
    """

    batch: int
    width: int
    real: torch.Tensor | None

    @staticmethod
    def of(batch: int, width: int, mask: torch.Tensor | None, columns: int, real: torch.Tensor | None) -> Columns:
        """The columns that a mask adds to those cached.

        Args:
            batch: B.
            width: New columns.
            mask: [B, columns + width] bool, or None if all new ones are real.
            columns: Columns cached.
            real: [B, columns] bool, which of these are real; None if all are.
        """
        if mask is None:
            return Columns(batch, width, None)
        if mask.shape[1] != columns + width:
            raise CacheMismatchError(
                f"[questkv] attention_mask: expected {columns + width} columns (cached and new tokens), got "
                f"{mask.shape[1]}"
            )
        past, new = mask[:, :columns], mask[:, columns:]
        known = torch.ones_like(past) if real is None else real
        if not torch.equal(past, known):
            raise UnsupportedError(
                "[questkv] attention_mask: expected the cached tokens' mask unchanged, got another; masking a token "
                "after it was cached is not supported"
            )
        return Columns(batch, width, None if bool(new.all()) else new)

    def behind(self, columns: int, real: torch.Tensor | None) -> torch.Tensor | None:
        """[B, columns + width] bool of all columns, None if all are real; `columns` and `real` as in `of`."""
        if real is None and self.real is None:
            return None
        device = (real if real is not None else self.real).device  # type: ignore[union-attr]
        past = real if real is not None else torch.ones(self.batch, columns, dtype=torch.bool, device=device)
        new = (
            self.real if self.real is not None else torch.ones(self.batch, self.width, dtype=torch.bool, device=device)
        )
        return torch.cat([past, new], dim=1)

    @cached_property
    def counts(self) -> list[int]:
        """Real new tokens of every sequence."""
        if self.real is None:
            return [self.width] * self.batch
        counts: list[int] = self.real.sum(dim=1).tolist()
        return counts

    def last(self, width: int) -> Columns:
        """The last `width` of these columns."""
        return Columns(self.batch, width, None if self.real is None else self.real[:, self.width - width :])

    def pack(self, states: torch.Tensor) -> torch.Tensor:
        """[B, H, width, D] -> [T, H, D], the real tokens, sequence after sequence."""
        if self.width == 1 and self.real is None:
            return states.squeeze(2)
        tokens: torch.Tensor = states.transpose(1, 2)
        packed: torch.Tensor = tokens.flatten(0, 1) if self.real is None else tokens[self.real]
        return packed

    def unpack(self, tokens: torch.Tensor) -> torch.Tensor:
        """[T, H, D] -> [B, width, H, D], zeros for padding."""
        out: torch.Tensor
        if self.real is None:
            # For one column the same, in a third of the time.
            out = tokens.unsqueeze(1) if self.width == 1 else tokens.unflatten(0, (self.batch, self.width))
        else:
            out = tokens.new_zeros((self.batch, self.width, *tokens.shape[1:]))
            out[self.real] = tokens
        return out


@dataclass(frozen=True)
class Run:
    """New tokens of one sequence that are attended as one dense block.

    Attributes:
        sequence: Row of the page table.
        tokens: Their places among the queries.
        length: Tokens of the sequence, these included.
        page_table: [P] the sequence's pages.
    """

    sequence: int
    tokens: slice
    length: int
    page_table: torch.Tensor


class Plan:
    """How every new token of a step is attended.

    A run of more than `sparse_prefill` new tokens, or one at the start of a sequence, is dense prefill; every other
    token is a row of its own that selects for itself. The choice looks at one sequence at a time, so it doesn't
    depend on the batch.

    Args:
        step: The new tokens, T over all sequences.
        config: The method's configuration.
        asked: How many of every sequence's new tokens have a query, its last ones; None for all of them.

    Attributes:
        rows: [R] int64 places of the rows among the queries.
    """

    def __init__(self, step: Step, config: QuestConfig, asked: list[int] | None = None) -> None:
        self.step = step
        self.config = config
        self.runs: list[Run] = []
        device = step.places.slots.device
        rows: list[int] = []
        tokens: list[int] = []  # of the rows, among the T new tokens
        start = query = 0
        asked = step.counts if asked is None else asked
        for sequence, (count, length, queries) in enumerate(zip(step.counts, step.lengths, asked, strict=True)):
            past = length - count
            if count > 1 and (not past or count > config.sparse_prefill):
                self.runs.append(Run(sequence, slice(query, query + queries), length, step.run(sequence)))
            else:
                rows.extend(range(query, query + queries))
                tokens.extend(range(start + count - queries, start + count))
            start += count
            query += queries
        self.rows = torch.tensor(rows, dtype=torch.int64, device=device)
        self.every_query_is_a_row = len(rows) == query
        # None where every new token is a row.
        self._tokens = None if len(rows) == start else torch.tensor(tokens, dtype=torch.int64, device=device)
        # So that a layer's `decode` may write the tokens: no block has to find them in the pages before, and none that
        # they seal moves into host memory.
        self.is_decode_step = bool(rows) and self._tokens is None and config.offload == "none"
        # Tokens visible to the rows, as the host knows them.
        self.row_lengths = step.row_lengths if self._tokens is None else [step.row_lengths[token] for token in tokens]

    @cached_property
    def scoring(self) -> Scoring:
        """How pages are scored and chosen."""
        return Scoring.of(self.config)

    @cached_property
    def _all_rows(self) -> Rows:
        """The rows in a dense layer: K are their sealed pages."""
        rows, tokens = self.step.rows, self._tokens
        if tokens is not None:
            rows = Rows(rows.page_table[tokens], rows.lengths[tokens])
        return rows.selecting(torch.tensor(self.sealed_counts, dtype=torch.int64, device=self.rows.device))

    @cached_property
    def _sparse_rows(self) -> Rows:
        """The rows in a sparse layer."""
        wanted = torch.tensor(self.selected_counts, dtype=torch.int64, device=self.rows.device)
        return self._all_rows.selecting(wanted)

    def rows_in(self, layer: int) -> Rows:
        """The rows in a layer of the model: page tables [R, P], lengths and K."""
        return self._all_rows if self.config.is_dense_layer(layer) else self._sparse_rows

    @cached_property
    def selected_counts(self) -> list[int]:
        """K of the rows in a sparse layer."""
        return [
            self._sealed(length) if self.config.is_dense_at(length) else self.config.pages_at(length)
            for length in self.row_lengths
        ]

    @cached_property
    def sealed_counts(self) -> list[int]:
        """Sealed pages of the rows: K in a dense layer."""
        return [self._sealed(length) for length in self.row_lengths]

    def selected_counts_in(self, layer: int) -> list[int]:
        """K of the rows in a layer of the model, as the host knows it."""
        return self.sealed_counts if self.config.is_dense_layer(layer) else self.selected_counts

    @cached_property
    def pages_held(self) -> int:
        """Pages that the rows' sequences hold, open pages included, per KV head."""
        return sum(self._sealed(length) + 1 for length in self.row_lengths)

    def places(self, heads: int, counts: list[int]) -> int:
        """Pages of a layer in host memory that the device keeps copies of, of every KV head.

        As many as `offload_cache` token budgets of all sequences hold; and what the row reads that reads most, where
        that is more: a sequence shorter than `dense_below`, or one that is read whole.

        Args:
            heads: Query heads of a KV head that select each for itself.
            counts: K of the rows.
        """
        budgets = sum(self.config.budget_at(length) for length in self.step.lengths)
        kept = math.ceil(self.config.offload_cache * heads * budgets / self.config.page_size)
        largest = (
            count if count >= sealed else heads * count
            for count, sealed in zip(counts, self.sealed_counts, strict=True)
        )
        return max(kept, *largest)

    def _sealed(self, length: int) -> int:
        return (length - 1) // self.config.page_size
