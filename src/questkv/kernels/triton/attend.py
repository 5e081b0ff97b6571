"""attend and dense: softmax attention of every row over what it may read, in parts, and the parts' merge."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from questkv.kernels.rows import Rows
from questkv.kernels.softmax import Softmax
from questkv.kernels.triton.language import cdiv, next_power_of_2
from questkv.kernels.triton.launch import architecture, check_head_dim, check_row, on
from questkv.kernels.triton.merge import merge_parts
from questkv.kernels.triton.parts import attend_part
from questkv.kernels.triton.storage import storage_of
from questkv.kernels.triton.tuning import attend_blocks
from questkv.kernels.triton.union import unite
from questkv.kernels.types import Pages


def attend(
    q: torch.Tensor,
    pages: Pages,
    rows: Rows,
    selection: torch.Tensor,
    softmax: Softmax,
) -> torch.Tensor:
    """As `kernels.attend`."""
    # Every head of a row selects equally many.
    num_selected = (selection[:, 0] >= 0).sum(dim=1)
    if selection.shape[1] == pages.num_kv_heads or not len(q):
        lists = selection.contiguous()
        return attention(q, pages, rows, softmax, Lists(num_selected, lists))
    width = rows.page_table.shape[-1]
    members = torch.zeros((*selection.shape[:2], width + 1), dtype=torch.uint8, device=q.device)
    # Padding goes into a column of its own.
    members.scatter_(2, selection.where(selection >= 0, width), 1)
    members = members[:, :, :width].contiguous()
    lists, counts = unite(members, rows.lengths.contiguous(), num_selected, pages.page_size, pages.num_kv_heads)
    return attention(q, pages, rows, softmax, Lists(num_selected, lists, counts, members))


def dense(
    q: torch.Tensor,
    pages: Pages,
    rows: Rows,
    softmax: Softmax,
) -> torch.Tensor:
    """As `kernels.dense`."""
    return attention(q, pages, rows, softmax, None)


@dataclass(frozen=True, eq=False)
class Lists:
    """Which of their sealed pages rows read.

    Attributes:
        num_selected: [R]; rows whose sealed pages it covers read all of them.
        pages: [R, Hkv, K] int64 logical pages of the other rows, ascending.
        counts: [R, Hkv] int64 entries of a list that count; None: num_selected.
        members: [R, Hq, P] uint8, 1 where a query head reads a page of its list; None: every head reads all of it.
    """

    num_selected: torch.Tensor
    pages: torch.Tensor
    counts: torch.Tensor | None = None
    members: torch.Tensor | None = None


def attention(
    q: torch.Tensor,
    pages: Pages,
    rows: Rows,
    softmax: Softmax,
    lists: Lists | None,
    pages_read: torch.Tensor | None = None,
) -> torch.Tensor:
    """[R, Hq, Dv], in two launches whose shapes depend on R and the page table's width, not on lengths.

    Args:
        q: [R, Hq, D].
        pages: The layer's pages.
        rows: Page tables, which may be each KV head's own, and lengths.
        softmax: How logits become weights.
        lists: What each row reads; None: all rows read everything.
        pages_read: [R] int64, written as by `kernels.decode`.
    """
    page_table, lengths, value_dim = rows.page_table.contiguous(), rows.lengths.contiguous(), pages.value_dim
    out = torch.empty((*q.shape[:2], value_dim), dtype=q.dtype, device=q.device)
    if not len(q):
        return out
    check_head_dim("attend", pages)
    check_row("attend", page_table.shape[-1], pages.page_size)
    storage, dim, kv_heads, size = storage_of(pages), pages.head_dim, pages.num_kv_heads, pages.page_size
    queries, heads, width = len(q), q.shape[1], page_table.shape[-1]
    blocks = attend_blocks(
        architecture(q.device), max(dim, value_dim), heads // kv_heads, kv_heads, q.element_size(), storage.has_codes
    )
    parts = blocks.parts(width * size)
    sums = torch.empty((queries, heads, parts, value_dim), dtype=torch.float32, device=q.device)
    tops, totals = torch.empty((2, queries, heads, parts), dtype=torch.float32, device=q.device)
    chosen = lengths if lists is None else lists.num_selected
    counts = chosen if lists is None or lists.counts is None else lists.counts
    members = None if lists is None else lists.members
    shared = {
        "S": size,
        "DV": value_dim,
        "G": heads // kv_heads,
        "BLOCK_DV": max(next_power_of_2(value_dim), 16),
        "BLOCK_T": blocks.tokens,
        "MIN_PART": blocks.min_part,
        "MAX_PARTS": blocks.max_parts,
        "LISTED": lists is not None,
        "MEMBERS": members is not None,
    }
    block_d = max(next_power_of_2(dim), 16)
    with on(q.device):
        attend_part[(parts, kv_heads * cdiv(heads // kv_heads, blocks.heads), queries)](
            q.contiguous(),
            page_table,
            lengths,
            chosen,
            counts,
            page_table if lists is None else lists.pages,
            page_table if members is None else members,
            storage.segment_of,
            storage.table,
            *storage.bases,
            sums,
            tops,
            totals,
            softmax.scale,
            softmax.softcap or 0.0,
            page_table.stride(0),
            0 if page_table.ndim == 2 else page_table.stride(1),
            width,
            0 if lists is None else lists.pages.shape[2],
            kv_heads,
            **shared,
            D=dim,
            BLOCK_D=block_d,
            BLOCK_G=blocks.heads,
            PIECE=min(blocks.piece, block_d),
            SOFTCAP=softmax.softcap is not None,
            CODES=storage.has_codes,
            SEGMENTED=len(storage.table) > 1,
            UNIT=storage.unit,
            BOX_UNIT=storage.box_unit,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
        merge_parts[(heads, queries)](
            sums,
            tops,
            totals,
            lengths,
            chosen,
            counts,
            q if softmax.sinks is None else softmax.sinks.detach().contiguous(),
            out,
            lengths if pages_read is None else pages_read,
            0 if pages_read is None else pages_read.stride(0),
            parts,
            kv_heads,
            **shared,
            BLOCK_N=blocks.merge,
            SINKS=softmax.sinks is not None,
            COUNTED=pages_read is not None,
            num_warps=blocks.warps,
        )
    return out
