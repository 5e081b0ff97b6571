"""transfer: copy whole pages, head by head, between host memory and the device."""

from __future__ import annotations

import torch

from questkv.errors import UnsupportedError
from questkv.kernels import checks, dispatch
from questkv.kernels.types import Pages


def transfer(
    source: Pages, page_ids: torch.Tensor, target: Pages, into: torch.Tensor, *, backend: str = "auto"
) -> None:
    """Copy page page_ids[h, i] of KV head h, all that is stored of it, to page into[h, i] of another layer's pages.

    Keys, values and boxes as they are, with whatever scales them: a page and its copy are both plain or both coded.

    Args:
        source: The pages read.
        page_ids: [Hkv, n] int64 physical pages of `source`; a negative one copies nothing.
        target: The pages written, of the same shapes and dtypes; may be `source` itself.
        into: [Hkv, n] int64 physical pages of `target`, those of a head all different and none of them also read.
        backend: ``auto`` or a backend's name.

    Raises:
        ValueError: A shape, a device or a page id is wrong.
        TypeError: A dtype is wrong.
        UnsupportedError: The backend has no such operator (``native``: pages in host memory are for GPUs).

    Example:
        >>> two, others = torch.tensor([[0, 1]] * Hkv), torch.tensor([[2, 3]] * Hkv)
        >>> transfer(pages, two, pages, others, backend="reference")  # a copy of pages 0 and 1 in every KV head
    """
    for name in ("num_kv_heads", "page_size", "head_dim", "value_dim", "dtype", "device"):
        ours, theirs = getattr(source, name), getattr(target, name)
        if ours != theirs:
            raise ValueError(f"[transfer] target: expected {name} {ours} like the source's, got {theirs}")
    if source.segments[0].boxes.dtype != target.segments[0].boxes.dtype:
        raise TypeError(
            f"[transfer] target: expected boxes of {source.segments[0].boxes.dtype} like the source's, "
            f"got {target.segments[0].boxes.dtype}"
        )
    for name, ids, pages in (("page_ids", page_ids, source), ("into", into, target)):
        if ids.ndim != 2 or ids.shape[0] != source.num_kv_heads:
            raise ValueError(f"[transfer] {name}: expected [Hkv={source.num_kv_heads}, n], got {list(ids.shape)}")
        checks.check_index("transfer", name, ids, pages)
    if into.shape != page_ids.shape:
        raise ValueError(f"[transfer] into: expected {list(page_ids.shape)} like page_ids, got {list(into.shape)}")
    _check_ids(source, page_ids, target, into)
    operator = getattr(dispatch.resolve(backend, source.device), "transfer", None)
    if operator is None:
        raise UnsupportedError(
            "[transfer] backend: expected 'triton' (or 'reference'), got 'native'; pages in host memory are for GPUs"
        )
    operator(source, page_ids, target, into)


def _check_ids(source: Pages, page_ids: torch.Tensor, target: Pages, into: torch.Tensor) -> None:
    # Reading values back would stop the host on a GPU; there the caller vouches for them.
    if page_ids.device.type != "cpu":
        return
    copied = page_ids >= 0
    page_ids, into = page_ids[copied], into[copied]
    checks.check_page_ids("transfer", "page_ids", page_ids, source)
    checks.check_page_ids("transfer", "into", into, target)
    kinds = [
        torch.zeros(pages.num_pages, dtype=torch.bool) if pages.coded is None else pages.coded
        for pages in (source, target)
    ]
    wrong = (kinds[0][page_ids] != kinds[1][into]).nonzero()
    if len(wrong):
        first = int(wrong[0])
        raise ValueError(
            "[transfer] into: expected pages of the kind of those in page_ids, plain or coded, got page "
            f"{int(into[first])} for page {int(page_ids[first])}"
        )
