"""Forks that share a pool, each in a thread of its own."""

from __future__ import annotations

import heapq
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from questkv.pages import PageGeometry, PagePool, SequenceBatch
from questkv.pages import pool as pool_module

GEOMETRY = PageGeometry(2, 3, 4, torch.float32, torch.device("cpu"))


@pytest.fixture(autouse=True)
def many_switches() -> Iterator[None]:
    """Threads take turns at every chance."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def in_threads(*works: Callable[[], None]) -> None:
    """Run each in a thread of its own; the first error of one is raised here."""
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def give_way(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with a chance for the other threads before and behind it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0)
        result = function(*args, **kwargs)
        time.sleep(0)
        return result

    return run


def test_no_page_is_given_to_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SimpleNamespace(heappop=give_way(heapq.heappop), heappush=give_way(heapq.heappush))
    monkeypatch.setattr(pool_module, "heapq", slow)
    monkeypatch.setattr(pool_module, "_FIRST_SEGMENT_PAGES", 1)
    monkeypatch.setattr(PageGeometry, "allocate", give_way(PageGeometry.allocate))
    pool = PagePool(GEOMETRY, layers=2)
    taken: list[list[int]] = [[], [], []]

    def take(mine: list[int]) -> None:
        for _ in range(30):
            mine += pool.allocate(3)
            assert [pool.holders(page) for page in mine] == [1] * len(mine)
            pool.release([mine.pop(0)])

    in_threads(*(lambda mine=mine: take(mine) for mine in taken))  # type: ignore[misc]
    held = [page for mine in taken for page in mine]
    assert len(held) == 3 * 30 * 2
    assert len(set(held)) == len(held)
    assert pool.num_held == len(held)
    for mine in taken:
        pool.release(mine)
    assert pool.num_free == pool.num_pages == len(pool._holders)
    segments = pool.layer(0).segments
    assert sum(segment.keys.shape[1] for segment in segments) == pool.num_pages


def test_a_layer_is_never_seen_without_the_pages_that_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view of the layer that was begun before the pool grew must not be kept after."""
    monkeypatch.setattr(pool_module, "_FIRST_SEGMENT_PAGES", 1)
    monkeypatch.setattr(pool_module, "Pages", give_way(pool_module.Pages))
    pool = PagePool(GEOMETRY, layers=1)
    pool.allocate(1)

    def grow() -> None:
        for _ in range(12):
            assert max(pool.allocate(1)) < pool.layer(0).num_pages
            time.sleep(0)

    in_threads(grow, grow, grow)


def test_forks_in_threads_hold_what_they_were_given() -> None:
    pool = PagePool(GEOMETRY, layers=1)
    first = SequenceBatch(pool, 2)
    tokens = torch.arange(2 * 30 * 2 * 3.0).view(60, 2, 3)
    first.reserve([30, 30])
    first.write(0, tokens, -tokens)
    forks = [first.fork() for _ in range(3)]

    def extend(fork: SequenceBatch, number: int) -> None:
        for step in range(40):
            new = torch.full((2, 2, 3), float(1000 * (number + 1) + step))
            fork.reserve([1, 1])
            fork.write(0, new, -new)
            if step % 7 == 3:
                fork.fork().crop([5, 9])  # and its pages go back when it is collected

    in_threads(*(lambda fork=fork, i=i: extend(fork, i) for i, fork in enumerate(forks)))  # type: ignore[misc]
    for number, fork in enumerate(forks):
        for row in range(2):
            keys, values = fork.keys_values(0, row)
            added = torch.arange(40.0) + 1000 * (number + 1)
            expected = torch.cat([tokens.view(2, 30, 2, 3)[row], added[:, None, None].expand(40, 2, 3)])
            assert torch.equal(keys.transpose(0, 1), expected)
            assert torch.equal(values, -keys)
        fork.free()
    first.free()
    assert pool.num_free == pool.num_pages
