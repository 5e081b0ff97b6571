"""decode: write the new tokens, estimate, select and attend, in launches whose shapes lengths have no part in."""

from __future__ import annotations

import torch

from questkv.kernels.triton.append import append
from questkv.kernels.triton.attend import attention
from questkv.kernels.triton.estimate import scores_of
from questkv.kernels.triton.launch import check_head_dim
from questkv.kernels.triton.seal import seal
from questkv.kernels.triton.select import choose
from questkv.kernels.triton.union import unite
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
    """As `kernels.decode`; nothing waits for the GPU.

    Grids and buffers depend on the arguments' shapes alone, so a CUDA graph of one call replays for whatever lengths,
    tables and budgets are copied into its arguments, up to P pages a row. Rows that read all their pages are skipped by
    estimate and select, and read them without a list.
    """
    check_head_dim("decode", pages)
    if new is not None:
        append(pages, new.slots, new.keys, new.values)
        seal(pages, new.sealed, new.into)
    q, page_table, lengths, num_selected = (t.contiguous() for t in (q, page_table, lengths, num_selected))
    if not len(q):
        return q.new_empty((0, q.shape[1], pages.value_dim))
    scores = scores_of(q, pages, page_table, lengths, scale, optimism, group, num_selected)
    each_head = group == "per_head"
    chosen = torch.empty(scores.shape, dtype=torch.uint8 if each_head else torch.int64, device=q.device)
    choose(scores, lengths, pages.page_size, num_selected, sink_pages, recent_pages, chosen)
    lists, counts, members = chosen, None, None
    if each_head:
        members = chosen
        lists, counts = unite(chosen, lengths, num_selected, pages.page_size, pages.num_kv_heads)
    return attention(
        q,
        pages,
        page_table,
        lengths,
        scale,
        softcap,
        sinks,
        num_selected,
        lists,
        counts,
        members,
        pages_read,
    )
