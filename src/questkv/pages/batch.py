"""Sequences that are decoded together, and the step that adds tokens to all of them in every layer."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch

from questkv import kernels
from questkv.kernels.blockwise import tokens_of
from questkv.pages.exclusive import exclusive
from questkv.pages.pool import PagePool
from questkv.pages.sequence import Sequence
from questkv.pages.step import Step, describe


class BatchState(NamedTuple):
    """A batch's sequences, the step that is under way, and the sequences before it."""

    sequences: list[Sequence]
    step: Step | None
    before: list[Sequence] | None


class _Kept:
    """What a batch holds; the pool counts it, and gives it back when the batch is garbage."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences

    @property
    def pages(self) -> list[int]:
        """Every page of every sequence."""
        return [page for sequence in self.sequences for page in sequence.pages]


class SequenceBatch:
    """B sequences of one pool.

    Tokens come in steps: `reserve` makes room in all sequences or in none, `write` puts one layer's keys and values
    there. A step that not every layer has written when the next one is reserved (an interrupted forward) is undone.
    Pages are given back when the batch is garbage collected.

    What fails in a method leaves the sequences as they were, whatever the exception and wherever it came.

    Args:
        pool: Where the pages come from.
        size: B.
    """

    def __init__(self, pool: PagePool, size: int) -> None:
        self.pool = pool
        self.step: Step | None = None
        self._kept = _Kept([Sequence(pool) for _ in range(size)])
        # The sequences before the step that is under way.
        self._before: list[Sequence] | None = None
        pool.enter(self._kept)
        weakref.finalize(self, pool.leave, self._kept)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences; a method that changes them makes another list."""
        return self._kept.sequences

    @property
    def lengths(self) -> list[int]:
        """Tokens of every sequence."""
        return [sequence.length for sequence in self.sequences]

    @property
    def state(self) -> BatchState:
        """What `put_back` takes: the sequences and the step as they are."""
        return BatchState(self.sequences, self.step, self._before)

    @exclusive
    def put_back(self, state: BatchState) -> None:
        """Be what the batch was when it had `state`.

        Its tokens are still there as long as at most one step was reserved since then and none after that settled.
        """
        self._kept.sequences, self.step, self._before = state
        self.pool.recount()

    @exclusive
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
        state = self.state
        try:
            sequences, into, given_up = self._make_room(counts)
            self.step = describe(self.pool.geometry, sequences, counts, into)
            self._before, self._kept.sequences = state.sequences, sequences
            self.pool.release(given_up)
            return self.step
        except BaseException:
            self.put_back(state)
            raise

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, *, backend: str = "auto") -> None:
        """Write the reserved tokens of one layer and seal the pages that they seal.

        Args:
            layer: The pool's layer.
            keys: [T, Hkv, D] the new tokens, sequence after sequence.
            values: [T, Hkv, Dv] likewise.
            backend: ``auto`` or a backend's name.
        """
        step = self._reserved()
        places = step.places
        # A step may add no token at all (a chunk of padding), and the pool may then have no page yet.
        if len(places.slots):
            kernels.append(self.pool.layer(layer), places.slots, keys, values, backend=backend)
            if len(places.sealed):
                self.pool.seal(layer, places.sealed, places.into, backend=backend)
            if places.spans is not None and len(places.spans):
                kernels.seal_spans(self.pool.layer(layer), places.spans, backend=backend)
        step.written.add(layer)

    def written(self, layer: int) -> None:
        """Note that a layer holds the reserved tokens: `kernels.decode` has written them."""
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

    @exclusive
    def finish(self) -> None:
        """End the last step, which every layer has written: give back the pages that it replaced."""
        state = self.state
        try:
            replaced = [page for sequence in self.sequences for page in sequence.replaced]
            if replaced:
                self._kept.sequences = [sequence.settled() for sequence in self.sequences]
                self.pool.release(replaced)
            self.step = self._before = None
        except BaseException:
            self.put_back(state)
            raise

    @exclusive
    def settle(self) -> None:
        """End the last step: undo it if not every layer has written it; and give memory that is free back."""
        if self.step is not None and len(self.step.written) < self.pool.num_layers:
            self.undo()
        self.finish()
        self.pool.trim()

    @exclusive
    def undo(self) -> None:
        """Take the last step back, if it has not been settled."""
        if self.step is not None and self._before is not None:
            self.put_back(BatchState(self._before, None, None))

    @exclusive
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
        self._change([sequence.cropped(count) for sequence, count in zip(self.sequences, counts, strict=True)])

    @exclusive
    def reorder(self, indices: Iterable[int]) -> None:
        """Sequence i becomes what sequence indices[i] was; the batch may grow or shrink (beam search).

        Raises:
            ValueError: An index is out of range; every sequence is as it was.
        """
        indices = list(indices)
        if any(not 0 <= index < len(self.sequences) for index in indices):
            raise ValueError(f"[reorder] indices: expected 0 to {len(self.sequences) - 1}, got {indices}")
        self.settle()
        self._change([self.sequences[index] for index in indices])

    @exclusive
    def fork(self) -> SequenceBatch:
        """A second batch with the same tokens, sharing every page."""
        self.settle()
        other = SequenceBatch(self.pool, 0)
        try:
            other._change(self.sequences)
            return other
        except BaseException:
            other.free()
            raise

    @exclusive
    def free(self) -> None:
        """Give every page back; the sequences are empty then."""
        self.settle()
        self._change([Sequence(self.pool) for _ in self.sequences])

    @exclusive
    def _change(self, sequences: list[Sequence]) -> None:
        """Have these sequences from now on, or stay as it was."""
        state = self.state
        try:
            gone, self._kept.sequences = self._kept.pages, sequences
            # Shared first, so that a page that stays is at no time free.
            self.pool.share(self._kept.pages)
            self.pool.release(gone)
        except BaseException:
            self.put_back(state)
            raise

    def _make_room(self, counts: list[int]) -> tuple[list[Sequence], dict[int, int], list[int]]:
        """The sequences, grown; the closed page for each plain one that the step seals and moves; pages given up."""
        page_size = self.pool.geometry.page_size
        copies, kept = self._copies(counts)
        missing: list[int] = []
        places: list[int] = []  # logical, of the pages that are taken
        for sequence, count, copy in zip(self.sequences, counts, copies, strict=True):
            missing.append(-(-(sequence.length + count) // page_size) - len(sequence.table))
            places += range(len(sequence.table) - copy, len(sequence.table) + missing[-1])
        to_close = self._to_close(counts)
        closed_places = self._closed_places(to_close)
        pages = self.pool.allocate(len(places), ends=self._ends(places))
        closed: list[int] = []
        if closed_places:
            closed = self.pool.allocate(len(closed_places), closed=True, ends=self._ends(closed_places))
        grown: list[Sequence] = []
        given_up: list[int] = []
        for sequence, count, new, copy in zip(self.sequences, counts, missing, copies, strict=True):
            after = Sequence(self.pool, list(sequence.table), sequence.length + count)
            if copy:
                page, last = pages.pop(0), len(after.table) - 1
                self.pool.copy_page(after.table[last], page)
                if after.table[last] in kept:
                    given_up.append(after.table[last])
                    after.table[last] = page
                else:
                    # Held until the step ends: whoever else has it might write there.
                    after.replace(last, page)
            after.table += pages[:new]
            del pages[:new]
            grown.append(after)
        return grown, self._put_closed(grown, to_close, closed), given_up

    def _copies(self, counts: list[int]) -> tuple[list[bool], set[int]]:
        """Which sequences need a copy of their last page: it is shared, or a crop opened it again after it was closed.

        Of several sequences that leave the same page, with nobody else there, the longest keeps it: it writes behind
        the others' tokens, so that they are still there when the step is undone. Such pages are the second result.
        """
        copies, kept = [False] * len(self.sequences), set[int]()
        leaving: dict[int, list[int]] = {}
        for row, (sequence, count) in enumerate(zip(self.sequences, counts, strict=True)):
            if count and sequence.length % self.pool.geometry.page_size:
                copies[row] = True
                if not self.pool.is_closed(sequence.table[-1]):
                    leaving.setdefault(sequence.table[-1], []).append(row)
        for page, rows in leaving.items():
            if self.pool.holders(page) == len(rows):
                copies[max(rows, key=lambda row: (self.sequences[row].length, row))] = False
                kept.add(page)
        return copies, kept

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

    def _put_closed(self, grown: list[Sequence], to_close: list[range], closed: list[int]) -> dict[int, int]:
        """Put closed pages in the place of the plain ones that the step seals; returns which for which."""
        into: dict[int, int] = {}
        for sequence, logical_pages in zip(grown, to_close, strict=True):
            for logical in logical_pages:
                page = sequence.table[logical]
                if page in into:
                    self.pool.share([into[page]])
                else:
                    into[page] = closed[len(into)]
                sequence.replace(logical, into[page])
        return into
