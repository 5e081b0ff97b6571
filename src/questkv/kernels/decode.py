"""decode: write the new tokens, estimate, select and attend in one call."""

from __future__ import annotations

import torch

from questkv.kernels import checks, dispatch
from questkv.kernels.rows import Rows
from questkv.kernels.scoring import DEFAULT, Scoring
from questkv.kernels.softmax import Softmax
from questkv.kernels.types import Pages
from questkv.kernels.writes import Writes


def decode(
    q: torch.Tensor,
    pages: Pages,
    rows: Rows,
    softmax: Softmax,
    scoring: Scoring = DEFAULT,
    *,
    writes: Writes | None = None,
    pages_read: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """One decode step of every row: estimate, select, attend (paper, Algorithm 1 and figure 5).

    A row whose K covers its sealed pages takes the dense path and gives bit for bit what `dense` gives. Where spans
    have boxes, the others score pages in two levels (see `estimate`).

    What is the same in all layers of a step, `rows` and the places of `writes`, is checked with the first of them.

    Args:
        q: [R, Hq, D] queries, the keys' dtype; their own keys and values are in the pages already, or in `writes`.
        pages: The layer's pages.
        rows: Page tables [R, P], lengths and K.
        softmax: How logits become weights.
        scoring: How pages are scored and chosen.
        writes: Tokens that are appended, and pages that are sealed, before anything is read: one call a layer where
            `append` and `seal` would be two more.
        pages_read: [R] int64, overwritten with the pages that the row read, the open page included, summed over the
            KV heads (a page that several heads of a group read counts once).
        backend: ``auto`` or a backend's name.

    Returns:
        [R, Hq, Dv] q's dtype.

    Raises:
        ValueError: A shape, a device or a value is wrong.
        TypeError: A dtype is wrong.

    Example:
        >>> rows = Rows(page_table, lengths, num_selected=torch.full((R,), 8))  # once for all layers
        >>> places = Places(slots, sealed)  # once for all layers
        >>> out = decode(q, pages, rows, Softmax(D**-0.5), writes=Writes(new_keys, new_values, places))
    """
    checks.check_on_device("decode", pages)
    checks.check_query("decode", q, pages)
    checks.check_rows("decode", q, pages, rows)
    checks.check_budget("decode", pages, rows, scoring.forced_pages)
    checks.check_sinks("decode", softmax, q)
    if pages_read is not None:
        checks.check_per_row("decode", "pages_read", pages_read, q.shape[0], pages)
    if writes is not None:
        checks.check_places("decode", writes.places, pages)
        checks.check_states("decode", pages, writes.places.slots.shape[0], writes.keys, writes.values)
    out: torch.Tensor = dispatch.resolve(backend, pages.device).decode(
        q, pages, rows, softmax, scoring, writes, pages_read
    )
    return out
