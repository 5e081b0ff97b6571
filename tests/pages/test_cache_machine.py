"""Pages under every sequence of operations, against plain lists of keys and values (DESIGN invariants 1 to 9)."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kernels.eight_bits import decoded_keys, decoded_values, half_step_of_keys, key_codes, rounding_of_keys, value_codes
from pages.cache_checks import LAYERS, CacheChecks, Token, Tracked
from questkv.errors import PoolFullError
from questkv.pages import PageGeometry, PagePool, SequenceBatch
from questkv.pages import geometry as geometry_module
from questkv.pages import pool as pool_module

MOST_BATCHES = 3


class CacheMachine(CacheChecks, RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4]),
        kv_heads=st.sampled_from([1, 2]),
        group=st.sampled_from([1, 3]),
        head_dim=st.sampled_from([1, 5]),
        storage=st.sampled_from(
            [
                ("int8", "model", "none", 0),
                ("model", "model", "none", 0),
                ("int8", "int8", "none", 0),
                ("model", "model", "host", 0),
                ("int8", "int8", "host", 0),
                ("int8", "model", "none", 2),
                ("model", "model", "none", 3),
                ("int8", "int8", "none", 2),
            ]
        ),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        most_pages=st.integers(4, 30),
        seed=st.integers(0, 2**31),
    )
    def start(self, page_size, kv_heads, group, head_dim, storage, dtype, most_pages, seed):
        # Small segments, so that a few tokens lie in several of them.
        self.first_segment, pool_module._FIRST_SEGMENT_PAGES = pool_module._FIRST_SEGMENT_PAGES, 2
        self.random = torch.Generator().manual_seed(seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(geometry_module, "_host_without_gpu", True)
            geometry = PageGeometry(kv_heads, head_dim, page_size, dtype, torch.device("cpu"), *storage)
        self.pool = PagePool(geometry, layers=LAYERS - 1, max_tokens=most_pages * page_size)
        self.pool.add_layer(host=geometry.offload == "host")
        self.backend = "auto" if geometry.offload == "none" else "reference"
        self.group, self.page_size = group, page_size
        self.tracked = [Tracked(SequenceBatch(self.pool, 2), [[], []])]

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        pool_module._FIRST_SEGMENT_PAGES = self.first_segment
        while self.tracked:
            self.tracked.pop().batch.free()
        assert self.pool.num_held == 0
        assert self.pool.num_free == self.pool.num_pages

    # What can happen to a cache

    @rule(data=st.data())
    def append(self, data):
        tracked = self._any(data)
        if self._reserve(tracked, data):
            self._write(tracked, range(LAYERS))
            self._remember(tracked)

    @rule(data=st.data(), written=st.integers(0, LAYERS - 1))
    def append_interrupted_before_every_layer_wrote(self, data, written):
        tracked = self._any(data)
        if self._reserve(tracked, data):
            self._write(tracked, range(written))
            tracked.interrupted = True

    @rule(data=st.data())
    def append_more_than_the_pool_may_hold(self, data):
        tracked = self._any(data)
        too_many = (self.pool.max_pages + 1) * self.page_size
        counts = [0] * len(tracked.tokens)
        counts[data.draw(st.integers(0, len(counts) - 1))] = too_many
        tracked.batch.settle()
        tracked.interrupted = False
        before = self._tables(), self.pool.num_held
        with pytest.raises(PoolFullError, match="more fit"):
            tracked.batch.reserve(counts)
        assert (self._tables(), self.pool.num_held) == before

    @precondition(lambda self: len(self.tracked) < MOST_BATCHES)
    @rule(data=st.data())
    def fork(self, data):
        tracked = self._any(data)
        other = Tracked(tracked.batch.fork(), [list(tokens) for tokens in tracked.tokens])
        tracked.interrupted = False
        self.tracked.append(other)

    @rule(data=st.data())
    def crop(self, data):
        tracked = self._any(data)
        counts = [data.draw(st.integers(0, len(tokens))) for tokens in tracked.tokens]
        tracked.batch.crop(counts)
        tracked.interrupted = False
        tracked.tokens = [tokens[: len(tokens) - n] for tokens, n in zip(tracked.tokens, counts, strict=True)]

    @rule(data=st.data())
    def crop_more_than_there_is(self, data):
        tracked = self._any(data)
        with pytest.raises(ValueError, match=r"\[crop\]"):
            tracked.batch.crop([0] * (len(tracked.tokens) - 1) + [len(tracked.tokens[-1]) + 1])
        tracked.interrupted = False

    @rule(data=st.data())
    def reorder(self, data):
        tracked = self._any(data)
        last = len(tracked.tokens) - 1
        indices = data.draw(st.lists(st.integers(0, last), min_size=1, max_size=4), label="indices")
        tracked.batch.reorder(indices)
        tracked.interrupted = False
        tracked.tokens = [list(tracked.tokens[index]) for index in indices]

    @rule(data=st.data())
    def free(self, data):
        tracked = self._any(data)
        tracked.batch.free()
        tracked.interrupted = False
        tracked.tokens = [[] for _ in tracked.tokens]

    @precondition(lambda self: len(self.tracked) > 1)
    @rule(data=st.data())
    def forget_a_batch(self, data):
        self.tracked.pop(data.draw(st.integers(0, len(self.tracked) - 1)))

    # What must hold after each of them

    @invariant()
    def every_page_is_held_once_for_every_table_that_has_it(self):
        holders = Counter(page for pages in self._held_lists() for page in pages)
        assert [self.pool.holders(page) for page in range(self.pool.num_pages)] == [
            holders[page] for page in range(self.pool.num_pages)
        ]
        assert sorted(page for free in self.pool._free.values() for page in free) == [
            page for page in range(self.pool.num_pages) if not holders[page]
        ]
        assert (self.pool.num_held, self.pool.num_free) == (len(holders), self.pool.num_pages - len(holders))
        assert all(self._pages_of(coded) <= self.pool.max_pages for coded in (False, True))

    @invariant()
    def a_table_has_exactly_the_pages_its_tokens_need(self):
        for tracked in self.tracked:
            for sequence, tokens in zip(tracked.batch.sequences, tracked.tokens, strict=True):
                assert len(sequence.table) == -(-sequence.length // self.page_size)
                assert sequence.length == len(tokens) or tracked.interrupted

    @invariant()
    def stored_tokens_boxes_and_attention_are_those_of_the_lists(self):
        self._poison()
        for tracked in self.tracked:
            for row, (table, tokens) in enumerate(zip(tracked.tables, tracked.tokens, strict=True)):
                for layer in range(LAYERS):
                    self._check_tokens(layer, table, tokens)
                    self._check_boxes(layer, table, tokens)
                    self._check_spans(layer, table, tokens)
                    if tokens and not tracked.interrupted:
                        kept = tracked.batch.keys_values(layer, row)
                        assert torch.equal(kept[0].float(), torch.stack([token.keys[layer] for token in tokens], dim=1))
                        assert torch.equal(kept[1].float(), torch.stack([t.values[layer] for t in tokens], dim=1))
            for layer in range(LAYERS):
                self._check_decode(layer, tracked)

    # How it is done

    def _any(self, data) -> Tracked:
        return self.tracked[data.draw(st.integers(0, len(self.tracked) - 1), label="batch")]

    def _tables(self) -> list[list[int]]:
        return [list(sequence.table) for tracked in self.tracked for sequence in tracked.batch.sequences]

    def _held_lists(self) -> list[list[int]]:
        """The tables, each with the pages that a step took out of it and that isn't settled."""
        return [
            [*sequence.table, *sequence.replaced] for tracked in self.tracked for sequence in tracked.batch.sequences
        ]

    def _reserve(self, tracked: Tracked, data) -> bool:
        """Reserve drawn counts; False if they don't fit, which must be so."""
        counts = [data.draw(st.integers(0, 2 * self.page_size + 1), label="count") for _ in tracked.tokens]
        tracked.batch.settle()  # so that what the tables are now is what they must be after a failure
        tracked.interrupted = False
        before, needed = self._tables(), self._pages_needed(tracked, counts)
        held = {page for pages in self._held_lists() for page in pages}
        room = [
            self.pool.max_pages - sum(self.pool.is_closed(page) == coded for page in held) for coded in (False, True)
        ]
        fits = needed[0] <= room[0] and needed[1] <= room[1]
        try:
            tracked.batch.reserve(counts)
        except PoolFullError:
            # Pages that end spans may be the ones that are missing.
            assert not fits or self.pool.geometry.span_pages
            assert (self._tables(), self.pool.num_held) == (before, len(held))
            return False
        assert fits
        return True

    def _pages_needed(self, tracked: Tracked, counts: list[int]) -> tuple[int, int]:
        """Plain and closed pages that a step takes."""
        new, leaving, coded, full = 0, Counter(), 0, []
        for sequence, count in zip(tracked.batch.sequences, counts, strict=True):
            new += -(-(sequence.length + count) // self.page_size) - len(sequence.table)
            past, open_slots = sequence.length, sequence.length % self.page_size
            if count and open_slots:
                if self.pool.is_closed(sequence.table[-1]):
                    new += 1
                else:
                    leaving[sequence.table[-1]] += 1
            if count and self.pool.geometry.closes:
                coded += (past + count - 1) // self.page_size - past // self.page_size
                if past and not open_slots and not self.pool.is_closed(sequence.table[-1]):
                    full.append(sequence.table[-1])
        holders = Counter(page for pages in self._held_lists() for page in pages)
        held_by_others = {page: holders[page] - writers for page, writers in leaving.items()}
        new += sum(writers - (held_by_others[page] == 0) for page, writers in leaving.items())
        return new, coded + len(set(full))

    def _pages_of(self, coded: bool) -> int:
        return sum(self.pool.is_closed(page) == coded for page in range(self.pool.num_pages))

    def _write(self, tracked: Tracked, layers: range) -> None:
        step, geometry = tracked.batch.step, self.pool.geometry
        shape = (LAYERS, sum(step.counts), geometry.kv_heads, geometry.head_dim)
        self.new = [torch.randn(shape, generator=self.random).to(geometry.dtype) for _ in range(2)]
        for layer in layers:
            tracked.batch.write(layer, self.new[0][layer], self.new[1][layer], backend=self.backend)

    def _remember(self, tracked: Tracked) -> None:
        keys, values = (new.float() for new in self.new)
        at = 0
        for row, (tokens, count) in enumerate(zip(tracked.tokens, tracked.batch.step.counts, strict=True)):
            past = len(tokens)
            tokens.extend(Token(k, values[:, at + i], k) for i, k in enumerate(keys[:, at : at + count].unbind(1)))
            at += count
            if self.pool.geometry.kv_dtype == "int8" and count:
                self._remember_coded(tokens, past, tracked.batch.sequences[row].table)

    def _remember_coded(self, tokens: list[Token], past: int, table: list[int]) -> None:
        """What the pages that are sealed now hold, and a page that a crop had opened again."""
        size, dtype = self.page_size, self.pool.geometry.dtype
        for i in range(past // size * size, past):  # decoded into a plain page, unless they were in one
            keys, values = (tensor.to(dtype).float() for tensor in (tokens[i].keys, tokens[i].values))
            tokens[i] = Token(keys, values, keys)
        for page in range(max(past - 1, 0) // size, (len(tokens) - 1) // size):
            own = range(page * size, (page + 1) * size)
            if (page + 1) * size == past and tokens[past - 1].keys is not tokens[past - 1].boxed:
                continue  # coded before a crop, and full: it stays as it is
            coded = [self._coded(layer, table[page], [tokens[i] for i in own]) for layer in range(LAYERS)]
            for slot, i in enumerate(own):
                keys, values = (torch.stack([layer[which][:, slot] for layer in coded]) for which in (0, 1))
                tokens[i] = Token(keys, values, tokens[i].keys)

    def _coded(self, layer: int, page: int, tokens: list[Token]) -> tuple[torch.Tensor, torch.Tensor]:
        """[Hkv, S, D] keys and values of one page after coding them by the formulas, in the box that is stored."""
        segment, at = self.pool._locate(layer, page)
        box, scale = segment.boxes[:, at], segment.scales[:, at]
        keys = torch.stack([token.keys[layer] for token in tokens], dim=1)
        values = torch.stack([token.values[layer] for token in tokens], dim=1)
        decoded = decoded_keys(key_codes(keys, box, scale), box, scale)
        allowed = half_step_of_keys(box, scale) * (1 + 1e-9) + rounding_of_keys(decoded, box, scale)
        assert ((decoded.double() - keys.double()).abs() <= allowed).all()
        return decoded, decoded_values(*value_codes(values))


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
