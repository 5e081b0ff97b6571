"""What a GPU still has room for, by fakes: the driver's count and what PyTorch holds in reserve."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from questkv.errors import PoolFullError
from questkv.pages import PageGeometry, PagePool
from questkv.pages.memory import available_bytes

GPU = torch.device("cuda", 1)
GEOMETRY = PageGeometry(2, 8, 4, torch.float32, GPU)


def fake_gpu(patch: pytest.MonkeyPatch, *, free: int, reserved: int, allocated: int) -> None:
    """A GPU 1 as torch.cuda would show it; another device is an error."""
    counts: dict[str, Any] = {
        "mem_get_info": (free, 10**12),
        "memory_reserved": reserved,
        "memory_allocated": allocated,
    }
    for name, count in counts.items():
        patch.setattr(torch.cuda, name, lambda device, count=count: {GPU: count}[device])


@pytest.mark.parametrize(
    ("free", "reserved", "allocated", "expected"),
    [(1000, 0, 0, 1000), (1000, 700, 200, 1500), (0, 900, 900, 0), (0, 900, 100, 800)],
)
def test_what_pytorch_holds_in_reserve_is_available(
    free: int, reserved: int, allocated: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu(monkeypatch, free=free, reserved=reserved, allocated=allocated)
    assert available_bytes(GPU) == expected


def test_a_pool_grows_into_what_pytorch_holds_in_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = replace(GEOMETRY, device=torch.device("cpu"))
    monkeypatch.setattr(
        PageGeometry, "_allocate", lambda self, *of, allocate=PageGeometry._allocate: allocate(on_cpu, *of)
    )
    needed = 100 * GEOMETRY.page_bytes
    fake_gpu(monkeypatch, free=0, reserved=needed + 50, allocated=50)
    pool = PagePool(GEOMETRY, layers=1)
    assert len(pool.allocate(100)) == 100
    fake_gpu(monkeypatch, free=0, reserved=needed + 49, allocated=50)
    pool = PagePool(GEOMETRY, layers=1)
    with pytest.raises(PoolFullError, match=r"of memory are available.* and 396 more fit$"):
        pool.allocate(100)
    assert pool.num_pages == 0
