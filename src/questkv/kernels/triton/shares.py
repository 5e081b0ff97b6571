"""The group rule ``softmax_mean``: every head's scores as shares of its own attention, and their mean."""

from __future__ import annotations

import torch

from questkv.kernels.triton.language import cdiv, jit, next_power_of_2, tl
from questkv.kernels.triton.launch import on


def share_pages(
    scores: torch.Tensor, lengths: torch.Tensor, page_size: int, kv_heads: int, num_selected: torch.Tensor | None
) -> torch.Tensor:
    """[R, Hkv, P] shares of [R, Hq, P] scores, in two launches. Arguments as in `estimate.scores_of`."""
    rows, heads, width = scores.shape
    group = heads // kv_heads
    shares = scores.new_empty((rows, kv_heads, width))
    highest, total = scores.new_empty((2, rows, heads))
    counts = lengths if num_selected is None else num_selected
    block_g = next_power_of_2(group)
    block_p = max(2048 // block_g, 16)
    sizes = {
        "S": page_size,
        "G": group,
        "BLOCK_G": block_g,
        "BLOCK_P": block_p,
        "FOR_SELECT": num_selected is not None,
        "num_warps": 4,
    }
    with on(scores.device):
        sum_heads[(kv_heads, rows)](scores, lengths, counts, highest, total, width, kv_heads, **sizes)
        mean_shares[(cdiv(width, block_p), kv_heads, rows)](
            scores, lengths, counts, highest, total, shares, width, kv_heads, **sizes
        )
    return shares


@jit
def scores_at(p_scores, o_p, o_g, sealed, width, G: tl.constexpr):
    """[BLOCK_G, BLOCK_P] scores, -inf beyond the row's pages, and [BLOCK_P] where a head's is +inf: those are read.

    Pages that must be read have no share: they would take all of it.
    """
    m = (o_g < G)[:, None] & (o_p < sealed)[None, :]
    b_s = tl.load(p_scores + o_g[:, None].to(tl.int64) * width + o_p[None, :], mask=m, other=float("-inf"))
    must_read = tl.max(b_s, axis=0) == float("inf")
    return tl.where(must_read[None, :], float("-inf"), b_s), must_read


@jit(do_not_specialize=["width", "kv_heads"])
def sum_heads(
    p_scores,
    p_lengths,
    p_num_selected,
    p_highest,
    p_total,
    width,
    kv_heads,
    S: tl.constexpr,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
    FOR_SELECT: tl.constexpr,
):
    """Of every head of one group: the highest score m, and the sum of exp(score - m) over the row's pages."""
    i_h = tl.program_id(0)
    i_r = tl.program_id(1).to(tl.int64)
    sealed = (tl.load(p_lengths + i_r) - 1) // S
    if FOR_SELECT:
        if tl.load(p_num_selected + i_r) >= sealed:
            return
    o_g = tl.arange(0, BLOCK_G)
    o_head = (i_r * kv_heads + i_h) * G
    b_top = tl.full([BLOCK_G, BLOCK_P], float("-inf"), tl.float32)
    for start in range(0, sealed, BLOCK_P):
        b_s, _ = scores_at(p_scores + o_head * width, start + tl.arange(0, BLOCK_P), o_g, sealed, width, G)
        b_top = tl.maximum(b_top, b_s)
    b_m = tl.max(b_top, axis=1)  # [BLOCK_G]
    b_from = tl.where(b_m == float("-inf"), 0.0, b_m)
    b_sum = tl.zeros([BLOCK_G, BLOCK_P], tl.float32)
    for start in range(0, sealed, BLOCK_P):
        b_s, _ = scores_at(p_scores + o_head * width, start + tl.arange(0, BLOCK_P), o_g, sealed, width, G)
        b_sum += tl.exp(b_s - b_from[:, None])
    tl.store(p_highest + o_head + o_g, b_from, mask=o_g < G)
    tl.store(p_total + o_head + o_g, tl.sum(b_sum, axis=1), mask=o_g < G)


@jit(do_not_specialize=["width", "kv_heads"])
def mean_shares(
    p_scores,
    p_lengths,
    p_num_selected,
    p_highest,
    p_total,
    p_shares,
    width,
    kv_heads,
    S: tl.constexpr,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
    FOR_SELECT: tl.constexpr,
):
    """BLOCK_P pages' mean share over one group."""
    i_p = tl.program_id(0)
    i_h = tl.program_id(1)
    i_r = tl.program_id(2).to(tl.int64)
    sealed = (tl.load(p_lengths + i_r) - 1) // S
    if FOR_SELECT:
        if (i_p * BLOCK_P >= sealed) | (tl.load(p_num_selected + i_r) >= sealed):
            return
    o_p = i_p * BLOCK_P + tl.arange(0, BLOCK_P)
    o_g = tl.arange(0, BLOCK_G)
    o_head = (i_r * kv_heads + i_h) * G
    b_s, must_read = scores_at(p_scores + o_head * width, o_p, o_g, sealed, width, G)
    b_m = tl.load(p_highest + o_head + o_g, mask=o_g < G, other=0.0)
    b_total = tl.load(p_total + o_head + o_g, mask=o_g < G, other=0.0)
    # Where all scores are -inf (overflow, or no page left) there is nothing to share out.
    b_total = tl.where(b_total == 0.0, 1.0, b_total)
    b_share = tl.math.div_rn(tl.exp(b_s - b_m[:, None]), b_total[:, None])  # [BLOCK_G, BLOCK_P]
    b_mean = tl.sum(tl.where((o_g < G)[:, None], b_share, 0.0), axis=0) / G
    b_mean = tl.where(must_read, float("inf"), b_mean)
    p_share = p_shares + (i_r * kv_heads + i_h) * width + o_p
    tl.store(p_share, tl.where(o_p < sealed, b_mean, float("-inf")), mask=o_p < width)
