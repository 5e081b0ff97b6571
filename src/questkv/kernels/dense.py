"""dense, prefill: exact attention over everything a row may see."""

from __future__ import annotations

import torch

from questkv.kernels import checks, dispatch
from questkv.kernels.rows import Rows
from questkv.kernels.softmax import Softmax
from questkv.kernels.types import Pages


def dense(q: torch.Tensor, pages: Pages, rows: Rows, softmax: Softmax, *, backend: str = "auto") -> torch.Tensor:
    """Softmax attention of every row over all its tokens; arguments, result and errors as in `attend`.

    Example:
        >>> out = dense(q, pages, Rows(page_table, lengths), Softmax(D**-0.5, softcap=50.0))
    """
    checks.check_read("dense", q, pages, rows)
    checks.check_sinks("dense", softmax, q)
    out: torch.Tensor = dispatch.resolve(backend, pages.device).dense(q, pages, rows, softmax)
    return out


def prefill(
    q: torch.Tensor,
    pages: Pages,
    page_table: torch.Tensor,
    length: int,
    softmax: Softmax,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Causal softmax attention of the last n tokens of one sequence over all that each of them may see.

    The same result as `dense` with a row for every token, computed as one block.

    Args:
        q: [n, Hq, D] queries of tokens length - n to length - 1.
        pages: The layer's pages, the n tokens' keys and values already in them.
        page_table: [P] int64 physical page of every logical page of the sequence; pages in host memory are copied.
        length: Tokens of the sequence, the n new ones included.
        softmax: How logits become weights.
        backend: ``auto`` or a backend's name.

    Returns:
        [n, Hq, Dv] q's dtype.

    Raises:
        ValueError: A shape, a device or a value is wrong.
        TypeError: A dtype is wrong.

    Example:
        >>> prompt = torch.randn(S, Hq, D)  # the queries of a prompt of S tokens, which fill physical page 0
        >>> out = prefill(prompt, pages, torch.tensor([0]), S, Softmax(D**-0.5))
    """
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
    checks.check_sinks("prefill", softmax, q)
    out: torch.Tensor = dispatch.resolve(backend, pages.device).prefill(q, pages, page_table, length, softmax)
    return out
