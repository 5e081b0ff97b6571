"""decode: estimate, select and attend, row by row."""

from __future__ import annotations

import torch

from questkv.kernels.reference.append import append
from questkv.kernels.reference.attention import attend, dense
from questkv.kernels.reference.boxes import estimate, seal, seal_spans
from questkv.kernels.reference.select import select
from questkv.kernels.rows import Rows
from questkv.kernels.scoring import Scoring
from questkv.kernels.softmax import Softmax
from questkv.kernels.types import Pages
from questkv.kernels.writes import Writes


def decode(
    q: torch.Tensor,
    pages: Pages,
    rows: Rows,
    softmax: Softmax,
    scoring: Scoring,
    writes: Writes | None,
    pages_read: torch.Tensor | None,
) -> torch.Tensor:
    """A row whose K covers its sealed pages is dense; the others read what they select."""
    if writes is not None:
        places = writes.places
        append(pages, places.slots, writes.keys, writes.values)
        seal(pages, places.sealed, places.into)
        if places.spans is not None:
            seal_spans(pages, places.spans)
    out = q.new_empty((*q.shape[:2], pages.value_dim))
    assert rows.num_selected is not None
    sealed = torch.div(rows.lengths - 1, pages.page_size, rounding_mode="floor")
    for row in range(len(q)):
        one = slice(row, row + 1)
        wanted, count = rows.num_selected[one], sealed[one]
        this = Rows(rows.page_table[one], rows.lengths[one], wanted)
        if bool(wanted >= count):
            out[one] = dense(q[one], pages, this, softmax)
            read = count * pages.num_kv_heads
        else:
            scores = estimate(q[one], pages, this, softmax.scale, scoring)
            selection = select(scores, count, wanted, scoring)
            out[one] = attend(q[one], pages, this, selection, softmax)
            read = _distinct(selection, pages.num_kv_heads)
        if pages_read is not None:
            pages_read[one] = read + pages.num_kv_heads
    return out


def _distinct(selection: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Pages of one row's selection [1, H, K], those that several heads of a group share counted once."""
    per_group = selection.view(kv_heads, -1).sort(dim=-1).values
    return per_group[:, :1].numel() + (per_group[:, 1:] != per_group[:, :-1]).sum()
