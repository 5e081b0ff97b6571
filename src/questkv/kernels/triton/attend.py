"""attend and dense: softmax attention of every row over what it may read, in parts, and the parts' merge."""

from __future__ import annotations

import torch

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
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    selection: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """As `kernels.attend`."""
    page_table, lengths = page_table.contiguous(), lengths.contiguous()
    # Every head of a row selects equally many.
    num_selected = (selection[:, 0] >= 0).sum(dim=1)
    if selection.shape[1] == pages.num_kv_heads or not len(q):
        lists = selection.contiguous()
        return attention(q, pages, page_table, lengths, scale, softcap, sinks, num_selected, lists)
    width = page_table.shape[-1]
    members = torch.zeros((*selection.shape[:2], width + 1), dtype=torch.uint8, device=q.device)
    # Padding goes into a column of its own.
    members.scatter_(2, selection.where(selection >= 0, width), 1)
    members = members[:, :, :width].contiguous()
    lists, counts = unite(members, lengths, num_selected, pages.page_size, pages.num_kv_heads)
    return attention(q, pages, page_table, lengths, scale, softcap, sinks, num_selected, lists, counts, members)


def dense(
    q: torch.Tensor,
    pages: Pages,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """As `kernels.dense`."""
    return attention(q, pages, page_table.contiguous(), lengths.contiguous(), scale, softcap, sinks)


def attention(
    q: torch.Tensor,
    pages: Pages,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    num_selected: torch.Tensor | None = None,
    lists: torch.Tensor | None = None,
    list_counts: torch.Tensor | None = None,
    members: torch.Tensor | None = None,
    pages_read: torch.Tensor | None = None,
) -> torch.Tensor:
    """[R, Hq, D], in two launches whose shapes depend on R and the page table's width, not on lengths.

    Args:
        q: [R, Hq, D].
        pages: The layer's pages.
        page_table: [R, P], or [R, Hkv, P] where each KV head has its own, contiguous.
        lengths: [R] contiguous.
        scale: Softmax scale.
        softcap: As in `kernels.attend`.
        sinks: As in `kernels.attend`.
        num_selected: [R]; rows whose sealed pages it covers read all of them. None: all rows do.
        lists: [R, Hkv, K] int64 logical pages of the other rows, ascending.
        list_counts: [R, Hkv] int64 entries of a list that count; None: num_selected.
        members: [R, Hq, P] uint8, 1 where a query head reads a page of its list; None: every head reads all of it.
        pages_read: [R] int64, written as by `kernels.decode`.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not len(q):
        return out
    check_head_dim("attend", pages)
    check_row("attend", page_table.shape[-1], pages.page_size)
    storage, dim, kv_heads, size = storage_of(pages), pages.head_dim, pages.num_kv_heads, pages.page_size
    rows, heads, width = len(q), q.shape[1], page_table.shape[-1]
    blocks = attend_blocks(
        architecture(q.device), dim, heads // kv_heads, kv_heads, q.element_size(), storage.has_codes
    )
    parts = blocks.parts(width * size)
    sums = torch.empty((rows, heads, parts, dim), dtype=torch.float32, device=q.device)
    tops, totals = torch.empty((2, rows, heads, parts), dtype=torch.float32, device=q.device)
    chosen = lengths if num_selected is None else num_selected
    counts = chosen if list_counts is None else list_counts
    shared = {
        "S": size,
        "D": dim,
        "G": heads // kv_heads,
        "BLOCK_D": max(next_power_of_2(dim), 16),
        "BLOCK_T": blocks.tokens,
        "MIN_PART": blocks.min_part,
        "MAX_PARTS": blocks.max_parts,
        "LISTED": num_selected is not None,
        "MEMBERS": members is not None,
    }
    with on(q.device):
        attend_part[(parts, kv_heads * cdiv(heads // kv_heads, blocks.heads), rows)](
            q.contiguous(),
            page_table,
            lengths,
            chosen,
            counts,
            page_table if lists is None else lists,
            page_table if members is None else members,
            storage.segment_of,
            storage.table,
            *storage.bases,
            sums,
            tops,
            totals,
            scale,
            softcap or 0.0,
            page_table.stride(0),
            0 if page_table.ndim == 2 else page_table.stride(1),
            width,
            0 if lists is None else lists.shape[2],
            kv_heads,
            **shared,
            BLOCK_G=blocks.heads,
            PIECE=min(blocks.piece, shared["BLOCK_D"]),
            SOFTCAP=softcap is not None,
            CODES=storage.has_codes,
            SEGMENTED=len(storage.table) > 1,
            UNIT=storage.unit,
            BOX_UNIT=storage.box_unit,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
        merge_parts[(heads, rows)](
            sums,
            tops,
            totals,
            lengths,
            chosen,
            counts,
            q if sinks is None else sinks.detach().contiguous(),
            out,
            lengths if pages_read is None else pages_read,
            0 if pages_read is None else pages_read.stride(0),
            parts,
            kv_heads,
            **shared,
            BLOCK_N=blocks.merge,
            SINKS=sinks is not None,
            COUNTED=pages_read is not None,
            num_warps=blocks.warps,
        )
    return out
