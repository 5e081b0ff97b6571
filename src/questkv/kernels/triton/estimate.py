"""estimate: score every sealed page from its box."""

from __future__ import annotations

import torch

from questkv.kernels.rows import Rows
from questkv.kernels.scoring import Scoring
from questkv.kernels.triton.arithmetic import widen
from questkv.kernels.triton.language import cdiv, jit, next_power_of_2, tl
from questkv.kernels.triton.launch import check_row, on
from questkv.kernels.triton.shares import share_pages
from questkv.kernels.triton.storage import BOXES, SCALES, place_of, row_of, storage_of
from questkv.kernels.triton.tuning import estimate_blocks
from questkv.kernels.types import Pages


def estimate(
    q: torch.Tensor,
    pages: Pages,
    rows: Rows,
    scale: float,
    scoring: Scoring,
) -> torch.Tensor:
    """As `kernels.estimate`; without spans, which `storage_of` refuses, K changes nothing."""
    return scores_of(q, pages, rows, scale, scoring, for_select=False)


def scores_of(
    q: torch.Tensor,
    pages: Pages,
    rows: Rows,
    scale: float,
    scoring: Scoring,
    *,
    for_select: bool,
) -> torch.Tensor:
    """[R, H, P] scores, in one launch (three under ``softmax_mean``).

    They may be for `select` alone: rows whose K covers all their pages are skipped then, and what lies behind a row's
    pages holds anything.
    """
    page_table, lengths, group = rows.page_table.contiguous(), rows.lengths.contiguous(), scoring.group
    num_selected = rows.num_selected.contiguous() if for_select and rows.num_selected is not None else None
    queries, width, kv_heads = len(q), page_table.shape[1], pages.num_kv_heads
    ratio = q.shape[1] // kv_heads
    heads = kv_heads if group == "mean" else q.shape[1]
    scores = torch.empty((queries, heads, width), dtype=torch.float32, device=q.device)
    if not queries:
        return scores.new_empty((0, q.shape[1] if group == "per_head" else kv_heads, width))
    check_row("estimate", width, pages.page_size)
    storage, dim = storage_of(pages), pages.head_dim
    blocks = estimate_blocks(dim)
    with on(q.device):
        score_pages[(cdiv(width, blocks.pages), kv_heads, queries)](
            q.contiguous(),
            page_table,
            lengths,
            lengths if num_selected is None else num_selected,
            storage.segment_of,
            storage.table,
            *storage.bases[4:6],
            scores,
            scale,
            scoring.optimism,
            width,
            kv_heads,
            S=pages.page_size,
            D=dim,
            G=ratio,
            BLOCK_D=next_power_of_2(dim),
            BLOCK_P=blocks.pages,
            EACH_HEAD=group != "mean",
            INT8=storage.int8_boxes,
            SEGMENTED=len(storage.table) > 1,
            FOR_SELECT=num_selected is not None,
            UNIT=storage.box_unit,
            num_warps=blocks.warps,
        )
    if group == "softmax_mean":
        return share_pages(scores, lengths, pages.page_size, kv_heads, num_selected)
    return scores


@jit(do_not_specialize=["table_width", "kv_heads"])
def score_pages(
    p_q,
    p_page_table,
    p_lengths,
    p_num_selected,
    p_segment_of,
    p_table,
    p_boxes,
    p_scales,
    p_scores,
    scale,
    optimism,
    table_width,
    kv_heads,
    S: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    EACH_HEAD: tl.constexpr,
    INT8: tl.constexpr,
    SEGMENTED: tl.constexpr,
    FOR_SELECT: tl.constexpr,
    UNIT: tl.constexpr,
):
    """BLOCK_P pages of one KV head of one row: reads their boxes once, for all heads of the group."""
    i_p = tl.program_id(0)
    i_h = tl.program_id(1)
    i_r = tl.program_id(2).to(tl.int64)
    sealed = (tl.load(p_lengths + i_r) - 1) // S
    if FOR_SELECT:
        if (i_p * BLOCK_P >= sealed) | (tl.load(p_num_selected + i_r) >= sealed):
            return
    o_p = i_p * BLOCK_P + tl.arange(0, BLOCK_P)
    o_d = tl.arange(0, BLOCK_D)
    m_p = o_p < sealed
    m_box = m_p[:, None] & (o_d < D)[None, :]
    page = tl.load(p_page_table + i_r * table_width + o_p, mask=m_p, other=0)  # [BLOCK_P]
    p_row = row_of(page, p_segment_of, p_table, SEGMENTED)
    place = place_of(page, i_h, p_row)
    o_box = tl.multiple_of(tl.load(p_row + BOXES) + place * (2 * D), UNIT)
    p_box = p_boxes + o_box[:, None] + o_d[None, :]
    b_lo = widen(tl.load(p_box, mask=m_box, other=0))  # [BLOCK_P, BLOCK_D]
    b_hi = widen(tl.load(p_box + D, mask=m_box, other=0))  # [BLOCK_P, BLOCK_D]
    b_step = tl.full([BLOCK_P], 1.0, tl.float32)
    if INT8:
        b_step = tl.load(p_scales + tl.load(p_row + SCALES) + place, mask=m_p, other=0.0)  # [BLOCK_P]

    p_group = p_q + (i_r * kv_heads + i_h) * (G * D)
    if EACH_HEAD:
        for i_g in range(G):
            b_mean = widen(tl.load(p_group + i_g * D + o_d, mask=o_d < D, other=0.0)) * scale  # [BLOCK_D]
            b_score = score_of(b_mean, tl.abs(b_mean), b_lo, b_hi, b_step, optimism)
            p_score = p_scores + ((i_r * kv_heads + i_h) * G + i_g) * table_width + o_p
            tl.store(p_score, tl.where(m_p, b_score, float("-inf")), mask=o_p < table_width)
    else:
        # Head by head, not as a tile: the compiler would lay out the boxes as it does that tile, and move them there.
        b_mean = tl.zeros([BLOCK_D], tl.float32)
        b_size = tl.zeros([BLOCK_D], tl.float32)
        for i_g in tl.static_range(G):
            b_q = widen(tl.load(p_group + i_g * D + o_d, mask=o_d < D, other=0.0)) * scale  # [BLOCK_D]
            b_mean += b_q
            b_size += tl.abs(b_q)
        b_score = score_of(b_mean / G, b_size / G, b_lo, b_hi, b_step, optimism)
        p_score = p_scores + (i_r * kv_heads + i_h) * table_width + o_p
        tl.store(p_score, tl.where(m_p, b_score, float("-inf")), mask=o_p < table_width)


@jit
def score_of(b_mean, b_size, b_lo, b_hi, b_step, optimism):
    """[P] step * (U . hi + V . lo), with U = (M + a A) / 2 and V = (M - a A) / 2 (docs/method.md)."""
    b_u = (b_mean + optimism * b_size) * 0.5
    b_v = (b_mean - optimism * b_size) * 0.5
    b_score = tl.sum(b_lo * b_v[None, :] + b_hi * b_u[None, :], axis=1) * b_step
    # A page with a NaN or infinite key gives NaN (0 * inf, inf - inf) or +inf here: it must be read.
    return tl.where(b_score == b_score, b_score, float("inf"))
