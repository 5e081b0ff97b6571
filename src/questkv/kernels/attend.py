"""attend: exact attention over the selected pages and the open page."""

from __future__ import annotations

import torch

from questkv.kernels import checks, dispatch
from questkv.kernels.types import Pages


def attend(
    q: torch.Tensor,
    pages: Pages,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    selection: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Softmax attention of every row over its selected pages and its open page; nothing else is read.

    Paper, section 3.4: attention over the chosen pages as over a shorter cache. Scores, softmax and sums are float32.

    Args:
        q: [R, Hq, D] queries, the keys' dtype.
        pages: The layer's pages.
        page_table: [R, P] int64 physical page of every logical page, -1 past the row's pages; or [R, Hkv, P] where
            each KV head has pages of its own (not with backend ``native``).
        lengths: [R] int64 tokens visible to the row, its own included. The last (length - 1) % S + 1 of them lie in
            its open page.
        selection: [R, H, K] int64 logical sealed pages, ascending, -1 at the end of shorter lists; H = Hkv (the heads
            of a group read the same pages) or Hq (each query head reads its own).
        scale: Softmax scale.
        softcap: Logits become ``softcap * tanh(logit / softcap)`` (Gemma 2).
        sinks: [Hq] one more logit per query head that takes mass and adds nothing to the output (gpt-oss).
        backend: ``auto`` or a backend's name.

    Returns:
        [R, Hq, Dv] q's dtype.

    Raises:
        ValueError: A shape, a device or a value is wrong.
        TypeError: A dtype is wrong.
        UnsupportedError: Pages lie in host memory, or the backend takes no table of each head's own.
    """
    if torch.compiler.is_compiling():
        attended: torch.Tensor = torch.ops.questkv.attend(
            q, *pages.tensors(), page_table, lengths, selection, scale, softcap, sinks, backend
        )
        return attended
    checks.check_read("attend", q, pages, page_table, lengths)
    checks.check_scale("attend", scale)
    checks.check_softmax("attend", softcap, sinks, q)
    _check_selection(q, pages, page_table, lengths, selection)
    out: torch.Tensor = dispatch.resolve(backend, pages.device).attend(
        q, pages, page_table, lengths, selection, scale, softcap, sinks
    )
    return out


def _check_selection(
    q: torch.Tensor, pages: Pages, page_table: torch.Tensor, lengths: torch.Tensor, selection: torch.Tensor
) -> None:
    heads = (pages.num_kv_heads, q.shape[1])
    if selection.ndim != 3 or selection.shape[0] != q.shape[0] or selection.shape[1] not in heads:
        raise ValueError(
            f"[attend] selection: expected [R={q.shape[0]}, Hkv={heads[0]} or Hq={heads[1]}, K], "
            f"got {list(selection.shape)}"
        )
    checks.check_index("attend", "selection", selection, pages)
    if selection.device.type != "cpu" or not selection.numel():
        return
    sealed = torch.div(lengths - 1, pages.page_size, rounding_mode="floor")
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
