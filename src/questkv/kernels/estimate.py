"""estimate: score every sealed page from its box."""

from __future__ import annotations

import torch

from questkv.kernels import checks, dispatch
from questkv.kernels.rows import Rows
from questkv.kernels.scoring import DEFAULT, Scoring
from questkv.kernels.softmax import check_scale
from questkv.kernels.types import Pages


def estimate(
    q: torch.Tensor, pages: Pages, rows: Rows, scale: float, scoring: Scoring = DEFAULT, *, backend: str = "auto"
) -> torch.Tensor:
    """Score the sealed pages of every row (paper, section 3.4, Algorithm 1; docs/method.md).

    With c and r the centre and half width of a page's box, a query head's score is
    ``scale * (q . c + optimism * |q| . r)``; with optimism 1 no key of the page has a larger logit.

    Where spans have boxes and the rows have a K, spans are scored first, by the same rule, and only the pages of the
    ceil(4 K / C) best spans (the lower of equal ones) and those behind the last whole span after them
    (docs/method.md). A row whose spans all belong to these has all pages scored, as every row has without a K.

    Args:
        q: [R, Hq, D] queries, the keys' dtype.
        pages: The layer's pages.
        rows: Page tables [R, P] and lengths; K or None.
        scale: Softmax scale, usually D ** -0.5.
        scoring: Its optimism and group.
        backend: ``auto`` or a backend's name.

    Returns:
        [R, H, P] float32, H = Hq under ``per_head``, else Hkv. Logical pages that are not sealed for the row, or not
        scored, hold -inf; pages that hold a NaN or infinite key, +inf.

    Raises:
        ValueError: A shape, a device or a value is wrong.
        TypeError: A dtype is wrong.

    Example:
        >>> scores = estimate(q, pages, Rows(page_table, lengths), D**-0.5, Scoring(optimism=1.0))  # the paper's bound
    """
    checks.check_query("estimate", q, pages)
    checks.check_rows("estimate", q, pages, rows)
    check_scale("estimate", scale)
    scores: torch.Tensor = dispatch.resolve(backend, pages.device).estimate(q, pages, rows, scale, scoring)
    return scores
