"""dense, prefill: exact attention over everything a row may see."""

from __future__ import annotations

import torch

from questkv.kernels import checks, dispatch
from questkv.kernels.types import Pages


def dense(
    q: torch.Tensor,
    pages: Pages,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Softmax attention of every row over all its tokens; arguments, result and errors as in `attend`."""
    if torch.compiler.is_compiling():
        attended: torch.Tensor = torch.ops.questkv.dense(
            q, *pages.tensors(), page_table, lengths, scale, softcap, sinks, backend
        )
        return attended
    checks.check_read("dense", q, pages, page_table, lengths)
    checks.check_scale("dense", scale)
    checks.check_softmax("dense", softcap, sinks, q)
    out: torch.Tensor = dispatch.resolve(backend, pages.device).dense(
        q, pages, page_table, lengths, scale, softcap, sinks
    )
    return out


def prefill(
    q: torch.Tensor,
    pages: Pages,
    page_table: torch.Tensor,
    length: int,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Causal softmax attention of the last n tokens of one sequence over all that each of them may see.

    The same result as `dense` with a row for every token, computed as one block.

    Args:
        q: [n, Hq, D] queries of tokens length - n to length - 1.
        pages: The layer's pages, the n tokens' keys and values already in them.
        page_table: [P] int64 physical page of every logical page of the sequence; pages in host memory are copied.
        length: Tokens of the sequence, the n new ones included.
        scale: Softmax scale.
        softcap: As in `attend`.
        sinks: As in `attend`.
        backend: ``auto`` or a backend's name.

    Returns:
        [n, Hq, Dv] q's dtype.

    Raises:
        ValueError: A shape, a device or a value is wrong.
        TypeError: A dtype is wrong.
    """
    if torch.compiler.is_compiling():
        attended: torch.Tensor = torch.ops.questkv.prefill(
            q, *pages.tensors(), page_table, length, scale, softcap, sinks, backend
        )
        return attended
    checks.check_query("prefill", q, pages)
    if page_table.ndim != 1:
        raise ValueError(f"[prefill] page_table: expected [P], got {list(page_table.shape)}")
    checks.check_index("prefill", "page_table", page_table, pages)
    checks.check_page_ids("prefill", "page_table", page_table, pages)
    if isinstance(length, bool) or not isinstance(length, int):
        raise TypeError(f"[prefill] length: expected an int, got {length!r}")
    fewest = max(q.shape[0], 1)
    if not fewest <= length <= page_table.shape[0] * pages.page_size:
        raise ValueError(
            f"[prefill] length: expected {fewest} (tokens in q, at least 1) to {page_table.shape[0] * pages.page_size} "
            f"(tokens in page_table), got {length}"
        )
    last = (length - 1) // pages.page_size
    checks.check_kind("prefill", "page_table", page_table[last : last + 1], pages, coded=False)
    checks.check_scale("prefill", scale)
    checks.check_softmax("prefill", softcap, sinks, q)
    out: torch.Tensor = dispatch.resolve(backend, pages.device).prefill(
        q, pages, page_table, length, scale, softcap, sinks
    )
    return out
