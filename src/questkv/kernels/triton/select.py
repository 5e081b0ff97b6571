"""select: choose the pages to read, by radix selection on the ordered bits of the scores."""

from __future__ import annotations

import torch

from questkv.kernels.scoring import Scoring
from questkv.kernels.triton.language import jit, tl
from questkv.kernels.triton.launch import on
from questkv.kernels.triton.tuning import select_blocks


def select(scores: torch.Tensor, num_pages: torch.Tensor, num_selected: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """As `kernels.select`.

    The kernel needs nothing of the host; the width of what it returns does, so this call waits for the GPU once where
    `decode` never does.
    """
    width = int(torch.minimum(num_pages, num_selected).max()) if len(scores) else 0
    selection = torch.empty((*scores.shape[:2], width), dtype=torch.int64, device=scores.device)
    if selection.numel():
        scores, num_pages, num_selected = (tensor.contiguous() for tensor in (scores, num_pages, num_selected))
        choose(scores, num_pages, 0, num_selected, scoring, selection)
    return selection


def choose(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
    num_selected: torch.Tensor,
    scoring: Scoring,
    chosen: torch.Tensor,
) -> None:
    """Write the chosen pages of every (row, head), in one launch; every argument is contiguous.

    Args:
        scores: [R, H, P].
        lengths: [R] tokens of the rows, or with a page size of 0 their sealed pages.
        page_size: S. With one, rows that select all their pages are skipped.
        num_selected: [R].
        scoring: Its sink and recent pages.
        chosen: [R, H, K] int64: written as the selection, ascending, -1 at the end; or [R, H, P] uint8: written for
            the row's sealed pages, 1 where a page is chosen.
    """
    blocks = select_blocks()
    with on(scores.device):
        choose_pages[(scores.shape[1], scores.shape[0])](
            scores,
            lengths,
            num_selected,
            chosen,
            scoring.sink_pages,
            scoring.recent_pages,
            scores.shape[2],
            chosen.shape[2],
            S=page_size,
            BLOCK=blocks.pages,
            FLAGS=chosen.dtype == torch.uint8,
            num_warps=blocks.warps,
        )


@jit
def ordered(p_scores, o_p, m_p):
    """[BLOCK] uint32 that order as scores do: NaN as +inf, -0 as 0."""
    b_s = tl.load(p_scores + o_p, mask=m_p, other=0.0)
    b_s = tl.where(b_s == b_s, b_s, float("inf"))
    bits = tl.where(b_s == 0.0, 0.0, b_s).to(tl.int32, bitcast=True)
    # Of negative numbers all bits are turned over, of others the sign.
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@jit(do_not_specialize=["sink_pages", "recent_pages", "width", "chosen_width"])
def choose_pages(
    p_scores,
    p_lengths,
    p_num_selected,
    p_chosen,
    sink_pages,
    recent_pages,
    width,
    chosen_width,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """One head of one row. Four passes over the scores find the lowest chosen one, a byte at a time; a fifth writes."""
    i_h = tl.program_id(0)
    i_r = tl.program_id(1).to(tl.int64)
    pages = tl.load(p_lengths + i_r)
    if S > 0:
        pages = (pages - 1) // S
    count = tl.minimum(tl.load(p_num_selected + i_r), pages).to(tl.int32)
    pages = pages.to(tl.int32)
    if S > 0:
        if count >= pages:
            return
    o_row = i_r * tl.num_programs(0) + i_h
    p_score = p_scores + o_row * width
    first = sink_pages
    end = pages - recent_pages
    want = count - sink_pages - recent_pages
    if count >= pages:
        # All are chosen: as forced ones.
        first = pages
        want = 0
    threshold = tl.zeros([1], tl.uint32)
    o_digit = tl.arange(0, 256)
    for i_byte in tl.static_range(4):
        shift = 24 - 8 * i_byte
        b_counts = tl.zeros([256], tl.int32)
        for start in range(0, pages, BLOCK):
            o_p = start + tl.arange(0, BLOCK)
            m_p = (o_p >= first) & (o_p < end)
            b_key = ordered(p_score, o_p, m_p)
            if i_byte > 0:
                m_p = m_p & ((b_key >> (shift + 8)) == (threshold >> (shift + 8)))
            b_counts += tl.histogram(((b_key >> shift) & 255).to(tl.int32), 256, mask=m_p)
        # The highest digit that has `want` scores at or above it.
        b_above = tl.sum(b_counts, axis=0) - tl.cumsum(b_counts, axis=0)
        digit = tl.max(tl.where((b_above + b_counts >= want) | (o_digit == 0), o_digit, 0), axis=0)
        want -= tl.sum(tl.where(o_digit == digit, b_above, 0), axis=0)
        threshold = threshold | (digit.to(tl.uint32) << shift)

    # What is wanted still are pages that score just the threshold, the lower ones.
    ties = 0
    written = 0
    p_out = p_chosen + o_row * chosen_width
    for start in range(0, pages, BLOCK):
        o_p = start + tl.arange(0, BLOCK)
        m_p = o_p < pages
        b_key = ordered(p_score, o_p, m_p)
        forced = (o_p < first) | (o_p >= end)
        b_tie = ((b_key == threshold) & m_p & ~forced).to(tl.int32)
        tie_rank = ties + tl.cumsum(b_tie, axis=0) - b_tie
        b_take = (m_p & (forced | (b_key > threshold) | ((b_tie == 1) & (tie_rank < want)))).to(tl.int32)
        if FLAGS:
            tl.store(p_out + o_p, b_take.to(tl.uint8), mask=m_p)
        else:
            place = written + tl.cumsum(b_take, axis=0) - b_take
            tl.store(p_out + place, o_p.to(tl.int64), mask=(b_take == 1) & (place < chosen_width))
            written += tl.sum(b_take, axis=0)
        ties += tl.sum(b_tie, axis=0)
    if not FLAGS:
        for start in range(count, chosen_width, BLOCK):
            o_k = start + tl.arange(0, BLOCK)
            tl.store(p_out + o_k, tl.full([BLOCK], -1, tl.int64), mask=o_k < chosen_width)
