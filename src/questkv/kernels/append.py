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
        values: [n, Hkv, Dv] likewise.
        backend: ``auto`` or a backend's name.

    Raises:
        ValueError: A shape, a device or a slot is wrong.
        TypeError: A dtype is wrong.

    Example:
        >>> append(pages, torch.arange(S), keys, values)  # S tokens into physical page 0
    """
    checks.check_new("append", pages, slots, keys, values)
    dispatch.resolve(backend, pages.device).append(pages, slots, keys, values)
