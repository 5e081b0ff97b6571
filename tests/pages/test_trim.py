"""Memory of plain pages that a prompt only passed through goes back to the system."""

from __future__ import annotations

import sys

import pytest
import torch

from questkv.pages import PageGeometry, PagePool, SequenceBatch
from questkv.pages.memory import give_back
from questkv.pages.pool import _KEPT_PAGES

CPU = torch.device("cpu")
S = 16
# A page of a head is 16 KiB, several of the system's.
GEOMETRY = PageGeometry(2, 256, S, torch.float32, CPU, kv_dtype="int8")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked to take memory back")


def write(batch: SequenceBatch, counts: list[int]) -> torch.Tensor:
    batch.reserve(counts)
    new = 1 + torch.rand(sum(counts), 2, 256)
    batch.write(0, new, new)
    batch.settle()
    return new


def resident(pool: PagePool) -> list[int]:
    """Plain pages that still hold what was written: memory that was given back reads as zeros."""
    keys = pool.layer(0).segments[0].keys
    return [page for page in range(keys.shape[1]) if bool((keys[:, page, S // 2] != 0).any())]


def test_a_prompt_in_one_forward_leaves_a_few_plain_pages_and_every_token() -> None:
    batch = SequenceBatch(PagePool(GEOMETRY, layers=1), 1)
    new = write(batch, [300 * S + 9])
    left = resident(batch.pool)
    assert left == [*range(_KEPT_PAGES), 300]  # the open page among them
    keys, values = batch.keys_values(0, 0)
    # Half a code of a range of 1, and for keys a box that may be wider by a code of its own on each side.
    assert (values - new.transpose(0, 1)).abs().max() < 0.003
    assert (keys - new.transpose(0, 1)).abs().max() < 0.003
    assert torch.equal(keys[:, 300 * S :], new[300 * S :].transpose(0, 1))


def test_pages_that_were_given_back_are_written_again() -> None:
    batch = SequenceBatch(PagePool(GEOMETRY, layers=1), 2)
    write(batch, [200 * S, 7])
    new = write(batch, [150 * S, 100 * S])
    for row, own in enumerate((new[: 150 * S], new[150 * S :])):
        keys, _ = batch.keys_values(0, row)
        assert (keys[:, -len(own) :] - own.transpose(0, 1)).abs().max() < 0.003
    assert len(resident(batch.pool)) < 2 * _KEPT_PAGES + 3


def test_short_steps_give_nothing_back() -> None:
    batch = SequenceBatch(PagePool(GEOMETRY, layers=1), 1)
    for _ in range(4):
        write(batch, [_KEPT_PAGES * S])
    assert len(resident(batch.pool)) >= _KEPT_PAGES


def test_plain_pools_keep_their_memory() -> None:
    geometry = PageGeometry(2, 256, S, torch.float32, CPU)
    batch = SequenceBatch(PagePool(geometry, layers=1), 1)
    write(batch, [300 * S])
    batch.crop([300 * S])
    assert len(resident(batch.pool)) == 300


def test_memory_beside_the_tensor_stays() -> None:
    whole = torch.ones(64 * 1024, dtype=torch.uint8)
    give_back(whole[1000:-1000])
    assert bool((whole[:1000] == 1).all())
    assert bool((whole[-1000:] == 1).all())
    assert int(whole.sum()) < len(whole)
