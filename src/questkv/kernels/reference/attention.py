"""attend and dense: exact softmax attention over what is selected, and over everything."""

from __future__ import annotations

import torch

from questkv.kernels.blockwise import softmax_attention, tokens_of
from questkv.kernels.gather import gather_heads, gather_pairs, gather_tokens
from questkv.kernels.rows import Rows
from questkv.kernels.softmax import Softmax
from questkv.kernels.types import Pages


def attend(
    q: torch.Tensor,
    pages: Pages,
    rows: Rows,
    selection: torch.Tensor,
    softmax: Softmax,
) -> torch.Tensor:
    """out[r] = attention of q[r] over the pages of selection[r] and the open page of row r."""
    out = q.new_empty((*q.shape[:2], pages.value_dim))
    page_table = rows.page_table
    for row, length in enumerate(rows.lengths.tolist()):
        sealed = (length - 1) // pages.page_size
        open_page, in_open_page = page_table[row, ..., sealed : sealed + 1], length - sealed * pages.page_size
        chosen = selection[row][:, : int((selection[row, 0] >= 0).sum())]
        heads, page_ids, place = _distinct(_pages_of(page_table[row], chosen), pages.num_kv_heads)
        keys, values = (
            torch.cat(
                [
                    sealed_tokens[place].flatten(1, 2),
                    open_tokens[:, 0, :in_open_page]
                    .to(sealed_tokens.dtype)
                    .repeat_interleave(len(place) // pages.num_kv_heads, dim=0),
                ],
                dim=1,
            )
            for sealed_tokens, open_tokens in zip(
                gather_pairs(pages, heads, page_ids), _gather(pages, open_page), strict=True
            )
        )
        out[row] = softmax_attention(q[row], keys, values, softmax)
    return out


def dense(
    q: torch.Tensor,
    pages: Pages,
    rows: Rows,
    softmax: Softmax,
) -> torch.Tensor:
    """out[r] = attention of q[r] over the first lengths[r] tokens of row r."""
    out = q.new_empty((*q.shape[:2], pages.value_dim))
    page_table = rows.page_table
    for row, length in enumerate(rows.lengths.tolist()):
        if page_table.ndim == 2:
            keys, values = tokens_of(pages, page_table[row], length)
        else:
            table = page_table[row, :, : -(-length // pages.page_size)]
            keys, values = (tokens.flatten(1, 2)[:, :length] for tokens in gather_heads(pages, table))
        out[row] = softmax_attention(q[row], keys, values, softmax)
    return out


def _pages_of(table: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """[H, K] physical pages of the chosen logical ones, by a table [P], or [Hkv, P] where each head has its own."""
    if table.ndim == 1:
        return table[chosen]
    return table.repeat_interleave(len(chosen) // len(table), dim=0).gather(1, chosen)


def _gather(pages: Pages, page_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[Hkv, n, S, D] keys and [Hkv, n, S, Dv] values of pages [n], or [Hkv, n] where each head has its own."""
    return gather_tokens(pages, page_ids) if page_ids.ndim == 1 else gather_heads(pages, page_ids)


def _distinct(page_ids: torch.Tensor, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The distinct (KV head, physical page) pairs behind page_ids [H, K], and [H, K] the place of each in them.

    Query heads of one group may choose the same page: it is read once and handed to each of them.
    """
    heads = torch.arange(len(page_ids), device=page_ids.device) // (len(page_ids) // kv_heads)
    pairs, place = torch.unique(heads[:, None] + page_ids * kv_heads, return_inverse=True)
    return pairs % kv_heads, pairs // kv_heads, place
