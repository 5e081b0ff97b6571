"""append: write new tokens into their slots."""

from __future__ import annotations

import torch

from questkv.kernels import checks, dispatch
from questkv.kernels.types import Pages


def append(
    pages: Pages, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, backend: str = "auto"
) -> None:
    """Write keys and values of n tokens into the pages; boxes are not touched (see `seal`).

    Args:
        pages: The layer's pages, written in place.
        slots: [n] int64, ``physical page * S + slot in the page`` of every token, all different.
        keys: [n, Hkv, D] the pages' dtype and device, any strides.
        values: Like `keys`.
        backend: ``auto`` or a backend's name.

    Raises:
        ValueError: A shape, a device or a slot is wrong.
        TypeError: A dtype is wrong.
    """
    checks.check_index("append", "slots", slots, pages)
    expected = [*slots.shape, pages.num_kv_heads, pages.head_dim]
    if slots.ndim != 1:
        raise ValueError(f"[append] slots: expected [n], got {list(slots.shape)}")
    for name, tensor in (("keys", keys), ("values", values)):
        if list(tensor.shape) != expected:
            raise ValueError(f"[append] {name}: expected {expected}, got {list(tensor.shape)}")
        if tensor.dtype != pages.dtype:
            raise TypeError(f"[append] {name}: expected {pages.dtype} like the pages, got {tensor.dtype}")
        if tensor.device != pages.device:
            raise ValueError(f"[append] {name}: expected device {pages.device}, got {tensor.device}")
    _check_slots(slots, pages)
    dispatch.resolve(backend).append(pages, slots, keys, values)


def _check_slots(slots: torch.Tensor, pages: Pages) -> None:
    # Reading values back would stop the host on a GPU; there the caller vouches for them.
    if slots.device.type != "cpu" or not slots.numel():
        return
    low, high, end = int(slots.min()), int(slots.max()), pages.num_pages * pages.page_size
    if low < 0 or high >= end:
        raise ValueError(f"[append] slots: expected slots 0 to {end - 1}, got {low if low < 0 else high}")
