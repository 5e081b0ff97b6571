"""decode: estimate, select and attend, row by row."""

from __future__ import annotations

import torch

from questkv.kernels.reference.append import append
from questkv.kernels.reference.attention import attend, dense
from questkv.kernels.reference.boxes import estimate, seal, seal_spans
from questkv.kernels.reference.select import select
from questkv.kernels.types import NewTokens, Pages


def decode(
    q: torch.Tensor,
    pages: Pages,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    num_selected: torch.Tensor,
    scale: float,
    optimism: float,
    group: str,
    sink_pages: int,
    recent_pages: int,
    softcap: float | None,
    sinks: torch.Tensor | None,
    pages_read: torch.Tensor | None,
    new: NewTokens | None,
) -> torch.Tensor:
    """A row whose K covers its sealed pages is dense; the others read what they select."""
    if new is not None:
        append(pages, new.slots, new.keys, new.values)
        seal(pages, new.sealed, new.into)
        if new.spans is not None:
            seal_spans(pages, new.spans)
    out = q.new_empty((*q.shape[:2], pages.value_dim))
    sealed = torch.div(lengths - 1, pages.page_size, rounding_mode="floor")
    for row in range(len(q)):
        one = slice(row, row + 1)
        query, table, length, count = q[one], page_table[one], lengths[one], sealed[one]
        if bool(num_selected[one] >= count):
            out[one] = dense(query, pages, table, length, scale, softcap, sinks)
            read = count * pages.num_kv_heads
        else:
            wanted = num_selected[one]
            scores = estimate(query, pages, table, length, wanted, scale, optimism, group)
            selection = select(scores, count, wanted, sink_pages, recent_pages)
            out[one] = attend(query, pages, table, length, selection, scale, softcap, sinks)
            read = _distinct(selection, pages.num_kv_heads)
        if pages_read is not None:
            pages_read[one] = read + pages.num_kv_heads
    return out


def _distinct(selection: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Pages of one row's selection [1, H, K], those that several heads of a group share counted once."""
    per_group = selection.view(kv_heads, -1).sort(dim=-1).values
    return per_group[:, :1].numel() + (per_group[:, 1:] != per_group[:, :-1]).sum()
