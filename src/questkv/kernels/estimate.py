"""estimate: score every sealed page from its box."""

from __future__ import annotations

import torch

from questkv.kernels import checks, dispatch
from questkv.kernels.types import Pages


def estimate(
    q: torch.Tensor,
    pages: Pages,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    num_selected: torch.Tensor | None = None,
    *,
    scale: float,
    optimism: float = 1.0,
    group: str = "mean",
    backend: str = "auto",
) -> torch.Tensor:
    """Score the sealed pages of every row (paper, section 3.4, Algorithm 1; docs/method.md).

    With c and r the centre and half width of a page's box, a query head's score is
    ``scale * (q . c + optimism * |q| . r)``; with optimism 1 no key of the page has a larger logit.

    Args:
        q: [R, Hq, D] queries, the keys' dtype.
        pages: The layer's pages.
        page_table: [R, P] int64 physical page of every logical page; entries past a row's pages are padding (-1).
        lengths: [R] int64 tokens visible to the row, its own included, 1 to P * S. Its first (length - 1) // S pages
            are sealed.
        num_selected: [R] int64 K of every row, where spans have boxes: then their boxes are scored first, by the same
            rule, and only the pages of the ceil(4 K / C) best spans (the lower of equal ones) and those behind the
            last whole span after them (docs/method.md). A row whose spans all belong to these has all pages scored.
            None scores every page.
        scale: Softmax scale, usually D ** -0.5.
        optimism: >= 0; how much of the half width counts.
        group: ``mean`` or ``softmax_mean`` (one score per KV head), or ``per_head`` (one per query head).
        backend: ``auto`` or a backend's name.

    Returns:
        [R, H, P] float32, H = Hq under ``per_head``, else Hkv. Logical pages that are not sealed for the row, or not
        scored, hold -inf; pages that hold a NaN or infinite key, +inf.

    Raises:
        ValueError: A shape, a device or a value is wrong.
        TypeError: A dtype is wrong.
    """
    if torch.compiler.is_compiling():
        scored: torch.Tensor = torch.ops.questkv.estimate(
            q, *pages.tensors(), page_table, lengths, num_selected, scale, optimism, group, backend
        )
        return scored
    checks.check_rows("estimate", q, pages, page_table, lengths)
    checks.check_scale("estimate", scale)
    checks.check_scoring("estimate", optimism, group)
    if num_selected is not None:
        checks.check_per_row("estimate", "num_selected", num_selected, q.shape[0], pages)
    scores: torch.Tensor = dispatch.resolve(backend, pages.device).estimate(
        q, pages, page_table, lengths, num_selected, scale, optimism, group
    )
    return scores
