"""decode: write the new tokens, estimate, select and attend, in launches whose shapes lengths have no part in."""

from __future__ import annotations

import torch

from questkv.kernels.rows import Rows
from questkv.kernels.scoring import Scoring
from questkv.kernels.softmax import Softmax
from questkv.kernels.triton.append import append
from questkv.kernels.triton.attend import Lists, attention
from questkv.kernels.triton.estimate import scores_of
from questkv.kernels.triton.launch import check_head_dim
from questkv.kernels.triton.seal import seal
from questkv.kernels.triton.select import choose
from questkv.kernels.triton.union import unite
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
    """As `kernels.decode`; nothing waits for the GPU.

    Grids and buffers depend on the arguments' shapes alone, so a CUDA graph of one call replays for whatever lengths,
    tables and budgets are copied into its arguments, up to P pages a row. Rows that read all their pages are skipped by
    estimate and select, and read them without a list.
    """
    check_head_dim("decode", pages)
    if writes is not None:
        append(pages, writes.places.slots, writes.keys, writes.values)
        seal(pages, writes.places.sealed, writes.places.into)
    assert rows.num_selected is not None
    q, lengths, num_selected = (t.contiguous() for t in (q, rows.lengths, rows.num_selected))
    if not len(q):
        return q.new_empty((0, q.shape[1], pages.value_dim))
    scores = scores_of(q, pages, rows, softmax.scale, scoring, for_select=True)
    each_head = scoring.group == "per_head"
    chosen = torch.empty(scores.shape, dtype=torch.uint8 if each_head else torch.int64, device=q.device)
    choose(scores, lengths, pages.page_size, num_selected, scoring, chosen)
    lists = Lists(num_selected, chosen)
    if each_head:
        united = unite(chosen, lengths, num_selected, pages.page_size, pages.num_kv_heads)
        lists = Lists(num_selected, *united, chosen)
    return attention(q, pages, rows, softmax, lists, pages_read)
