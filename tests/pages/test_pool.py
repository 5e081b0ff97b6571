"""The pool: growth, limits, memory, and what it says about them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from questkv.errors import PoolFullError
from questkv.kernels import PageSegment, seal
from questkv.pages import PageGeometry, PagePool, SequenceBatch
from questkv.pages import memory as memory_module
from questkv.pages import pool as pool_module
from questkv.pages.memory import prefer_huge_pages

FIRST_SEGMENT = pool_module._FIRST_SEGMENT_PAGES
CPU = torch.device("cpu")


def geometry(page_size: int = 4, box_dtype: str = "int8", dtype: torch.dtype = torch.float32) -> PageGeometry:
    return PageGeometry(2, 3, page_size, dtype, CPU, box_dtype)


def state(pool: PagePool) -> tuple[object, ...]:
    segments = [[segment.keys.data_ptr() for segment in pool.layer(layer).segments] for layer in range(pool.num_layers)]
    return pool.num_pages, pool.num_free, pool.num_layers, pool.bytes_reserved, segments


def fits(error: PoolFullError) -> int:
    """Tokens that the message says fit."""
    found = re.search(r"and (\d+) more fit", str(error))
    assert found, error
    return int(found[1])


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_growth_moves_nothing_that_is_there() -> None:
    pool = PagePool(geometry(), layers=2)
    pool.allocate(FIRST_SEGMENT)
    before = [pool.layer(layer).segments[0] for layer in range(2)]
    addresses = [(s.keys.data_ptr(), s.values.data_ptr(), s.boxes.data_ptr(), s.scales.data_ptr()) for s in before]
    for segment in before:
        segment.keys.fill_(3.0)
    grown = pool.allocate(FIRST_SEGMENT + 5)
    assert grown == list(range(FIRST_SEGMENT, 2 * FIRST_SEGMENT + 5))
    for layer in range(2):
        first = pool.layer(layer).segments[0]
        assert (
            first.keys.data_ptr(),
            first.values.data_ptr(),
            first.boxes.data_ptr(),
            first.scales.data_ptr(),
        ) == addresses[layer]
        assert bool((first.keys == 3.0).all())
        assert len(pool.layer(layer).segments) == 2
        assert pool.layer(layer).num_pages == pool.num_pages


def test_growth_doubles_so_that_segments_stay_few() -> None:
    pool = PagePool(geometry(), layers=1)
    for _ in range(40 * FIRST_SEGMENT):
        pool.allocate(1)
    assert pool.num_pages < 2 * 40 * FIRST_SEGMENT
    assert len(pool.layer(0).segments) <= 7


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc/self/statm")
def test_reserved_memory_is_not_touched_before_a_token_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "available_bytes", lambda device: None)
    large = PageGeometry(4, 128, 16, torch.float32, CPU)
    pages = 2**30 // large.page_bytes
    pool = PagePool(large, layers=1)
    before = resident_bytes()
    pool.allocate(pages)
    assert pool.bytes_reserved > 0.99 * 2**30
    # Holder counts and the list of free pages are Python objects, some tens of bytes a page.
    assert resident_bytes() - before < pages * 1024 + 2**24


def test_a_limited_pool_holds_exactly_its_limit_and_says_what_fits() -> None:
    pool = PagePool(geometry(page_size=4), layers=1, max_tokens=43)
    pool.allocate(7)
    with pytest.raises(PoolFullError, match="limited to 40 tokens") as caught:
        pool.allocate(4)
    assert "holds 28 tokens in pages of 4" in str(caught.value)
    assert fits(caught.value) == 12
    pool.allocate(3)
    assert pool.num_free == 0
    with pytest.raises(PoolFullError) as caught:
        pool.allocate(1)
    assert fits(caught.value) == 0


def test_the_limit_counts_pages_that_are_reserved_but_free() -> None:
    pool = PagePool(geometry(page_size=1), layers=1, max_tokens=5)
    held = pool.allocate(4)
    pool.release(held[:2])
    with pytest.raises(PoolFullError) as caught:
        pool.allocate(4)
    assert fits(caught.value) == 3
    assert len(pool.allocate(3)) == 3


def test_a_limit_below_one_page_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_tokens: expected at least one page \(4\), got 3"):
        PagePool(geometry(page_size=4), max_tokens=3)


@pytest.mark.parametrize("box_dtype", ["int8", "model"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_accounting_is_the_size_of_the_tensors(box_dtype: str, dtype: torch.dtype) -> None:
    pool = PagePool(geometry(box_dtype=box_dtype, dtype=dtype), layers=3)
    pool.allocate(10)
    pool.allocate(FIRST_SEGMENT)

    def size(*tensors: torch.Tensor | None) -> int:
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    segments = [segment for layer in range(3) for segment in pool.layer(layer).segments]
    total = sum(size(s.keys, s.values, s.boxes, s.scales) for s in segments)
    boxes = sum(size(s.boxes, s.scales) for s in segments)
    assert pool.bytes_reserved == total
    assert pool.bytes_held * pool.num_pages == total * pool.num_held
    assert pool.box_bytes_held * pool.num_pages == boxes * pool.num_held
    assert pool.num_held == 10 + FIRST_SEGMENT < pool.num_pages


def test_int8_boxes_cost_what_the_design_says() -> None:
    wide = PageGeometry(8, 128, 16, torch.bfloat16, CPU)
    assert wide.box_bytes == 8 * (2 * 128 + 4)
    assert wide.kv_bytes == 8 * 4 * 16 * 128
    assert wide.box_bytes / wide.kv_bytes < 0.033


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError])
@pytest.mark.parametrize("failing_layer", [0, 1])
def test_a_failed_allocation_leaves_the_pool_as_it_was(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception], failing_layer: int
) -> None:
    pool = PagePool(geometry(), layers=2)
    pool.allocate(FIRST_SEGMENT)
    before, real, calls = state(pool), PageGeometry.allocate, []

    def allocate(self: PageGeometry, num_pages: int, *, closed: bool = False, host: bool = False) -> PageSegment:
        calls.append(num_pages)
        if (len(calls) - 1) % (failing_layer + 1) == failing_layer:
            raise kind("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes")
        return real(self, num_pages, closed=closed)

    monkeypatch.setattr(PageGeometry, "allocate", allocate)
    with pytest.raises(PoolFullError, match="could not be allocated") as caught:
        pool.allocate(2)
    assert fits(caught.value) == 0
    assert state(pool) == before
    monkeypatch.undo()
    assert pool.allocate(2) == [FIRST_SEGMENT, FIRST_SEGMENT + 1]


def test_when_twice_the_pages_cannot_be_allocated_the_missing_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PagePool(geometry(), layers=2)
    pool.allocate(FIRST_SEGMENT)
    real = PageGeometry.allocate

    def allocate(self: PageGeometry, num_pages: int, *, closed: bool = False, host: bool = False) -> PageSegment:
        if num_pages > 3:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        return real(self, num_pages, closed=closed)

    monkeypatch.setattr(PageGeometry, "allocate", allocate)
    assert len(pool.allocate(3)) == 3
    assert pool.num_pages == FIRST_SEGMENT + 3


def test_an_error_that_is_not_about_memory_is_not_called_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(self: PageGeometry, num_pages: int, *, closed: bool = False, host: bool = False) -> PageSegment:
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(PageGeometry, "allocate", allocate)
    with pytest.raises(RuntimeError, match="device-side assert") as caught:
        PagePool(geometry(), layers=1).allocate(1)
    assert not isinstance(caught.value, PoolFullError)


def test_too_little_memory_is_refused_before_it_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PagePool(geometry(), layers=2)
    pool.allocate(FIRST_SEGMENT - 1)
    before = state(pool)
    room = 5 * 2 * geometry().page_bytes + 1
    monkeypatch.setattr(pool_module, "available_bytes", lambda device: room)
    with pytest.raises(PoolFullError, match="memory are available") as caught:
        pool.allocate(7)
    assert fits(caught.value) == 4 * (1 + 5)
    assert state(pool) == before
    assert len(pool.allocate(6)) == 6


def test_a_layer_that_cannot_be_added_leaves_the_pool_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PagePool(geometry(), layers=1)
    pool.allocate(2 * FIRST_SEGMENT)
    before = state(pool)

    def allocate(self: PageGeometry, num_pages: int, *, closed: bool = False, host: bool = False) -> PageSegment:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(PageGeometry, "allocate", allocate)
    with pytest.raises(PoolFullError):
        pool.add_layer()
    assert state(pool) == before


def test_an_added_layer_has_storage_for_every_page() -> None:
    pool = PagePool(geometry(), layers=1)
    pool.allocate(FIRST_SEGMENT)
    pool.allocate(FIRST_SEGMENT)
    assert pool.add_layer() == 1
    assert [s.keys.shape for s in pool.layer(1).segments] == [s.keys.shape for s in pool.layer(0).segments]


def test_pages_freed_last_are_given_again_lowest_first() -> None:
    pool = PagePool(geometry(), layers=1)
    pages = pool.allocate(6)
    pool.release([pages[4], pages[1]])
    assert pool.allocate(2) == [pages[1], pages[4]]


def test_a_free_page_can_neither_be_shared_nor_released() -> None:
    pool = PagePool(geometry(), layers=1)
    (page,) = pool.allocate(1)
    pool.release([page])
    with pytest.raises(AssertionError, match="is free"):
        pool.share([page])
    with pytest.raises(AssertionError, match="is free"):
        pool.release([page])


def test_available_memory_is_the_smaller_of_system_and_container(monkeypatch: pytest.MonkeyPatch) -> None:
    for system, container, expected in [(9, 5, 5), (4, 5, 4), (None, 5, 5), (9, None, 9), (None, None, None)]:
        monkeypatch.setattr(memory_module, "_system", lambda value=system: value)
        monkeypatch.setattr(memory_module, "_control_group", lambda value=container: value)
        assert memory_module.available_bytes(CPU) == expected
    assert memory_module.available_bytes(torch.device("meta")) is None


def test_a_batch_that_runs_out_of_memory_keeps_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PagePool(geometry(), layers=1)
    batch = SequenceBatch(pool, 2)
    batch.reserve([5, 3])
    batch.write(0, torch.ones(8, 2, 3), torch.ones(8, 2, 3))
    tables = [list(sequence.table) for sequence in batch.sequences]
    monkeypatch.setattr(pool_module, "available_bytes", lambda device: 0)
    with pytest.raises(PoolFullError):
        batch.reserve([1, 4 * FIRST_SEGMENT])
    assert batch.lengths == [5, 3]
    assert [sequence.table for sequence in batch.sequences] == tables
    batch.reserve([1, 1])
    batch.write(0, torch.ones(2, 2, 3), torch.ones(2, 2, 3))
    assert batch.lengths == [6, 4]


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no transparent huge pages"
)
def test_large_tensors_ask_for_huge_pages_and_small_ones_do_not() -> None:
    large, small = torch.empty(64 * 2**20, dtype=torch.int8), torch.empty(2**20, dtype=torch.int8)
    assert prefer_huge_pages(large) is large
    assert prefer_huge_pages(small) is small
    asked = {}
    for name, tensor in (("large", large), ("small", small)):
        middle, here = tensor.data_ptr() + tensor.numel() // 2, False
        for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
            bounds = line.split()[0].split("-")
            if len(bounds) == 2:
                here = int(bounds[0], 16) <= middle < int(bounds[1], 16)
            elif here and line.startswith("VmFlags:"):
                asked[name] = "hg" in line.split()
    assert asked == {"large": True, "small": False}


def int8_pool(max_tokens: int | None = None, layers: int = 2) -> PagePool:
    return PagePool(PageGeometry(2, 3, 4, torch.bfloat16, CPU, kv_dtype="int8"), layers=layers, max_tokens=max_tokens)


def test_a_pool_of_pages_in_eight_bits_keeps_two_kinds_apart() -> None:
    pool = int8_pool()
    plain = pool.allocate(FIRST_SEGMENT - 1)
    coded = pool.allocate(3, closed=True)
    more = pool.allocate(2)
    assert not any(map(pool.is_closed, [*plain, *more]))
    assert all(map(pool.is_closed, coded))
    assert [segment.coded for segment in pool.layer(1).segments] == [False, True, False]
    pool.release([plain[5], coded[1]])
    assert pool.allocate(1, closed=True) == [coded[1]]
    assert pool.allocate(1) == [plain[5]]


def test_the_limit_holds_for_each_kind() -> None:
    pool = int8_pool(max_tokens=4 * 5)
    pool.allocate(5)
    pool.allocate(4, closed=True)
    for coded, room in ((False, 0), (True, 4)):
        with pytest.raises(PoolFullError, match="limited to 20 tokens") as caught:
            pool.allocate(2, closed=coded)
        assert fits(caught.value) == room


def test_bytes_of_both_kinds_are_those_of_their_tensors() -> None:
    pool = int8_pool()
    pool.allocate(7)
    pool.allocate(5, closed=True)
    names = ("keys", "values", "boxes", "scales", "value_scales")
    reserved, held = 0, 0
    for layer in range(2):
        for segment, count in zip(pool.layer(layer).segments, (7, 5), strict=True):
            tensors = [t for t in (getattr(segment, name) for name in names) if t is not None]
            size = sum(t.numel() * t.element_size() for t in tensors)
            reserved += size
            held += size // segment.keys.shape[1] * count
    assert (pool.bytes_reserved, pool.bytes_held) == (reserved, held)


def test_a_page_in_eight_bits_takes_at_most_56_percent_of_one_in_sixteen() -> None:
    wide = PageGeometry(8, 128, 16, torch.bfloat16, CPU, kv_dtype="int8")
    assert wide.closed_page_bytes == 8 * (16 * (2 * 128 + 8) + 2 * 128 + 4)
    assert wide.closed_page_bytes <= 0.56 * wide.kv_bytes


def test_copying_a_coded_page_decodes_it() -> None:
    pool = int8_pool()
    plain, target = pool.allocate(2)
    (coded,) = pool.allocate(1, closed=True)
    for layer in range(2):
        segment = pool.layer(layer).segments[0]
        for tensor in (segment.keys, segment.values):
            tensor[:, plain].normal_()
        seal(pool.layer(layer), torch.tensor([plain]), torch.tensor([coded]))
    pool.copy_page(coded, target)
    for layer in range(2):
        segment = pool.layer(layer).segments[0]
        for tensor in (segment.keys, segment.values):
            moved = (tensor[:, target].float() - tensor[:, plain].float()).abs()
            # Half a code (values span less than 8, a box little more) and one rounding to bfloat16.
            assert 0 < float(moved.max()) < 9 / 510 + 4 * 2.0**-8
    with pytest.raises(AssertionError, match="only sealing writes closed pages"):
        pool.copy_page(plain, coded)


def test_a_batch_without_room_for_its_codes_keeps_its_tokens() -> None:
    pool = int8_pool(max_tokens=4 * 4, layers=1)
    batch, other = SequenceBatch(pool, 1), SequenceBatch(pool, 1)
    ones = torch.ones(13, 2, 3, dtype=torch.bfloat16)
    for sequences in (batch, other):
        sequences.reserve([6])
        sequences.write(0, ones[:6], ones[:6])
        sequences.settle()
    assert pool.num_held == 4
    with pytest.raises(PoolFullError, match="more fit"):
        batch.reserve([13])
    assert (pool.num_held, batch.lengths, len(batch.sequences[0].table)) == (4, [6], 2)
    batch.reserve([2])
    batch.write(0, ones[:2], ones[:2])
    assert batch.lengths == [8]


@pytest.mark.parametrize(("kv_dtype", "closed"), [("model", False), ("int8", False), ("int8", True)])
def test_bytes_of_values_of_another_width_are_those_of_the_tensors(kv_dtype: str, closed: bool) -> None:
    narrow = PageGeometry(2, 12, 4, torch.bfloat16, CPU, kv_dtype=kv_dtype, value_dim=7)
    segment = narrow.allocate(5, closed=closed)
    tensors = (segment.keys, segment.values, segment.value_scales, segment.boxes, segment.scales)
    sizes = [0 if tensor is None else tensor.nbytes // 5 for tensor in tensors]
    assert segment.values.shape == (2, 5, 4, 7)
    assert sum(sizes[:3]) == (narrow.closed_kv_bytes if closed else narrow.kv_bytes)
    assert sum(sizes) == (narrow.closed_page_bytes if closed else narrow.page_bytes)


def test_a_geometry_whose_values_are_as_wide_as_its_keys_has_one_name() -> None:
    assert PageGeometry(2, 12, 4, torch.bfloat16, CPU) == PageGeometry(2, 12, 4, torch.bfloat16, CPU, value_dim=12)


def test_a_page_is_copied_with_values_of_another_width() -> None:
    pool = PagePool(PageGeometry(2, 12, 4, torch.float32, CPU, value_dim=7), layers=1)
    first, second = pool.allocate(2)
    segment = pool.layer(0).segments[0]
    segment.keys[:, first], segment.values[:, first] = torch.randn(2, 4, 12), torch.randn(2, 4, 7)
    pool.copy_page(first, second)
    assert torch.equal(segment.keys[:, second], segment.keys[:, first])
    assert torch.equal(segment.values[:, second], segment.values[:, first])
