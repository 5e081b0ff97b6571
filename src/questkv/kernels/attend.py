"""attend: exact attention over the selected pages and the open page."""

from __future__ import annotations

import torch

from questkv.kernels import checks, dispatch
from questkv.kernels.rows import Rows
from questkv.kernels.softmax import Softmax
from questkv.kernels.types import Pages


def attend(
    q: torch.Tensor, pages: Pages, rows: Rows, selection: torch.Tensor, softmax: Softmax, *, backend: str = "auto"
) -> torch.Tensor:
    """Softmax attention of every row over its selected pages and its open page; nothing else is read.

    Paper, section 3.4: attention over the chosen pages as over a shorter cache. Scores, softmax and sums are float32.

    Args:
        q: [R, Hq, D] queries, the keys' dtype.
        pages: The layer's pages.
        rows: Page tables, which may be each KV head's own, and lengths.
        selection: [R, H, K] int64 logical sealed pages, ascending, -1 at the end of shorter lists; H = Hkv (the heads
            of a group read the same pages) or Hq (each query head reads its own).
        softmax: How logits become weights.
        backend: ``auto`` or a backend's name.

    Returns:
        [R, Hq, Dv] q's dtype.

    Raises:
        ValueError: A shape, a device or a value is wrong.
        TypeError: A dtype is wrong.
        UnsupportedError: Pages lie in host memory, or the backend takes no table of each head's own.

    Example:
        >>> selection = torch.zeros(R, Hkv, 1, dtype=torch.int64)  # the first page, for every head
        >>> out = attend(q, pages, Rows(page_table, lengths), selection, Softmax(D**-0.5))
    """
    checks.check_read("attend", q, pages, rows)
    checks.check_sinks("attend", softmax, q)
    _check_selection(q, pages, rows, selection)
    out: torch.Tensor = dispatch.resolve(backend, pages.device).attend(q, pages, rows, selection, softmax)
    return out


def _check_selection(q: torch.Tensor, pages: Pages, rows: Rows, selection: torch.Tensor) -> None:
    heads = (pages.num_kv_heads, q.shape[1])
    if selection.ndim != 3 or selection.shape[0] != q.shape[0] or selection.shape[1] not in heads:
        raise ValueError(
            f"[attend] selection: expected [R={q.shape[0]}, Hkv={heads[0]} or Hq={heads[1]}, K], "
            f"got {list(selection.shape)}"
        )
    checks.check_index("attend", "selection", selection, pages)
    if selection.device.type != "cpu" or not selection.numel():
        return
    sealed = torch.div(rows.lengths - 1, pages.page_size, rounding_mode="floor")
    wrong = (selection < -1) | (selection >= sealed[:, None, None])
    listed = selection >= 0
    # An entry that isn't padding is above the one before it; padding starts at the same place for every head.
    ascending = listed[..., :-1] & (selection[..., 1:] > selection[..., :-1])
    wrong[..., 1:] |= listed[..., 1:] & ~ascending
    wrong |= listed != listed[:, :1]
    if bool(wrong.any()):
        row = int(wrong.flatten(1).any(dim=1).nonzero()[0])
        raise ValueError(
            f"[attend] selection: expected ascending logical pages below the row's {int(sealed[row])} sealed pages, "
            f"equally many for every head, then -1, got {selection[row].tolist()} in row {row}"
        )
