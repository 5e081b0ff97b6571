"""What the device holds of pages in host memory, against a list of what was read when."""

from __future__ import annotations

import random

import pytest
import torch

from interpreter import has_triton, patch_once
from pages.lru import Lru
from questkv.errors import PoolFullError, UnsupportedError
from questkv.kernels import PageSegment
from questkv.pages import PageGeometry, PagePool, geometry
from questkv.pages.fetched import FetchedPages

CPU = torch.device("cpu")
NAMES = ("keys", "values", "boxes", "scales", "value_scales")
BACKENDS = ["reference", *(["triton"] if has_triton() else [])]
STORAGE = [("model", "model", torch.bfloat16), ("int8", "model", torch.float32), ("int8", "int8", torch.float16)]


@pytest.fixture(autouse=True)
def _host_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "_host_without_gpu", True)


def a_pool(storage: tuple[str, str, torch.dtype], pages: int) -> tuple[PagePool, list[int]]:
    """A layer on the device and one whose closed pages lie in host memory, with random content."""
    box_dtype, kv_dtype, dtype = storage
    pool = PagePool(PageGeometry(2, 5, 3, dtype, CPU, box_dtype, kv_dtype, "host"))
    pool.add_layer()
    pool.add_layer(host=True)
    pool.allocate(3)
    closed = pool.allocate(pages, closed=True)
    fill(pool)
    return pool, closed


def fill(pool: PagePool) -> None:
    for segment in pool.layer(1).segments:
        for name in NAMES:
            tensor = getattr(segment, name)
            if tensor is not None:
                tensor.copy_((100 * torch.rand(tensor.shape)).to(tensor.dtype))


def poison(segment: PageSegment) -> None:
    for name in NAMES:
        tensor = getattr(segment, name)
        if tensor is not None:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 111)


def check(pool: PagePool, fetched: FetchedPages, simulated: list[Lru], closed: list[int]) -> None:
    """Copies are where the simulation has them and equal their pages; all else leads to what was never written."""
    table = fetched.table(torch.tensor([closed, closed]))
    first = fetched.view.starts[-2]
    assert fetched.view.segments[-1] is fetched.segment
    for head, lru in enumerate(simulated):
        at = lru.pages
        assert table[:, head].tolist() == [[first + at.get(page, fetched.slots) for page in closed]] * 2
        for page, slot in at.items():
            segment, place = pool._locate(1, page)
            for name in NAMES:
                stored, copy = getattr(segment, name), getattr(fetched.segment, name)
                assert stored is None or torch.equal(stored[head, place], copy[head, slot])
    for name in NAMES:
        never = getattr(fetched.segment, name)
        if never is not None:
            assert bool((never[:, -1].isnan() if never.is_floating_point() else never[:, -1] == 111).all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("storage", STORAGE, ids=["boxes in the model's type", "plain", "eight bits"])
def test_the_page_read_longest_ago_makes_room_and_what_is_there_is_not_copied(storage, backend) -> None:
    if backend == "triton":
        patch_once()
    pool, closed = a_pool(storage, 20)
    fetched, rng = pool.fetched(1), random.Random(5)
    fetched.reserve(9)
    poison(fetched.segment)
    simulated = [Lru(9), Lru(9)]
    for step in range(12 if backend == "triton" else 60):
        if step % 10 == 7:
            # A page that was freed and given away again: what is there is not what it holds now.
            again = rng.sample(closed, 3)
            fetched.forget(torch.tensor(again))
            for lru in simulated:
                lru.forget(again)
        if step == 8:
            pool.allocate(70)  # the layer grows by a plain segment, and later by a closed one
            fetched = pool.fetched(1)
        if step == 9:
            closed += pool.allocate(60, closed=True)[:5]
            fetched = pool.fetched(1)
        width = rng.randint(1, 9)
        pages = [[rng.choice([-1, *closed]) for _ in range(width)] for _ in range(2)]
        counts = fetched.fetch(torch.tensor(pages), backend=backend)
        expected = [lru.fetch([page for page in own if page >= 0]) for lru, own in zip(simulated, pages, strict=True)]
        assert counts.tolist() == [sum(head) for head in zip(*expected, strict=True)]
        check(pool, fetched, simulated, closed)
        for head, own in enumerate(pages):
            assert {page for page in own if page >= 0} <= simulated[head].pages.keys()


def test_plain_pages_are_read_where_they_are() -> None:
    pool, closed = a_pool(STORAGE[1], 5)
    more = pool.allocate(70)  # in a segment behind the closed pages'
    fetched = pool.fetched(1)
    fetched.reserve(4)
    table = fetched.table(torch.tensor([[more[-1], 2, closed[0], -1]]))
    assert table.shape == (1, 2, 4)
    assert table[0, 0].tolist() == table[0, 1].tolist() == [64 + len(more) - 62, 2, fetched.view.num_pages - 1, -1]
    segment, at = pool._locate(1, more[-1])
    assert fetched.view.segments[1].keys[:, int(table[0, 0, 0]) - 64].data_ptr() == segment.keys[:, at].data_ptr()


def test_more_room_is_made_from_nothing_and_never_taken_away() -> None:
    pool, closed = a_pool(STORAGE[1], 8)
    fetched = pool.fetched(1)
    assert (fetched.slots, fetched.bytes) == (0, 0)
    fetched.reserve(4)
    page_bytes = sum(
        t.numel() * t.element_size() for name in NAMES if (t := getattr(fetched.segment, name)) is not None
    )
    assert (fetched.slots, fetched.bytes, pool.fetched_bytes) == (4, page_bytes, page_bytes)
    ids = torch.tensor([closed[:4], closed[4:8]])
    assert fetched.fetch(ids, backend="reference").tolist() == [0, 8]
    fetched.reserve(3)
    assert fetched.fetch(ids, backend="reference").tolist() == [8, 0]
    fetched.reserve(20)
    assert fetched.slots == 20
    assert fetched.fetch(ids, backend="reference").tolist() == [0, 8]
    fetched.reserve(21)
    assert fetched.slots == 25  # a quarter more, since a share of a context grows with every token


def test_more_pages_at_a_time_than_there_is_room_for_are_refused() -> None:
    pool, closed = a_pool(STORAGE[1], 8)
    fetched = pool.fetched(1)
    fetched.reserve(4)
    with pytest.raises(ValueError, match=r"\[fetch\] page_ids: expected at most 4 pages at a time, .* got 5"):
        fetched.fetch(torch.tensor([closed[:5], closed[:5]]))
    assert fetched.fetch(torch.empty(2, 0, dtype=torch.int64)).tolist() == [0, 0]


def test_no_room_on_the_device_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, _ = a_pool(STORAGE[1], 8)
    fetched = pool.fetched(1)

    def allocate(self: PageGeometry, num_pages: int, **kwargs: bool) -> PageSegment:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(PageGeometry, "allocate", allocate)
    with pytest.raises(PoolFullError, match=r"\[questkv\] offload_cache: expected room on cpu for 4 pages of"):
        fetched.reserve(4)
    monkeypatch.undo()
    fetched.reserve(4)
    assert fetched.slots == 4


def test_without_a_gpu_there_is_nothing_to_offload_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "_host_without_gpu", False)
    with pytest.raises(
        UnsupportedError, match=r"\[questkv\] offload: expected a model on a GPU for 'host', got one on"
    ):
        PageGeometry(2, 5, 3, torch.float32, CPU, offload="host")


def test_bytes_in_host_memory_are_those_of_keys_and_values_in_offloaded_layers() -> None:
    for storage in STORAGE:
        pool, closed = a_pool(storage, 7)
        segment = pool.layer(1).segments[1]
        assert segment.host
        assert not pool.layer(0).segments[1].host
        tensors = [t for t in (segment.keys, segment.values, segment.value_scales) if t is not None]
        a_page = sum(t.numel() * t.element_size() for t in tensors) // segment.keys.shape[1]
        assert pool.host_bytes_held == 7 * a_page
        pool.release(closed[:2])
        assert pool.host_bytes_held == 5 * a_page
