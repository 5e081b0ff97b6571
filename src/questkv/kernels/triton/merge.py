"""attend's second kernel: the parts of a row into its output."""

from __future__ import annotations

from questkv.kernels.triton.arithmetic import narrow, widen
from questkv.kernels.triton.language import jit, tl
from questkv.kernels.triton.rows import part_size, row_extent


@jit(do_not_specialize=["pages_read_stride", "parts", "kv_heads"])
def merge_parts(
    p_sums,
    p_tops,
    p_totals,
    p_lengths,
    p_num_selected,
    p_list_counts,
    p_sinks,
    p_out,
    p_pages_read,
    pages_read_stride,
    parts,
    kv_heads,
    S: tl.constexpr,
    DV: tl.constexpr,
    G: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_T: tl.constexpr,
    MIN_PART: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    LISTED: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SINKS: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """One query head of one row: sum of exp(m_i - m) times each part's sums, over the sum of their weights.

    A part that holds nothing for this head has m_i = -inf and weighs 0. Every row holds its open page, so m is finite
    unless the row's logits aren't.
    """
    i_head = tl.program_id(0)
    i_r = tl.program_id(1).to(tl.int64)
    tokens, _, _, _ = row_extent(
        i_r, i_head // G, p_lengths, p_num_selected, p_list_counts, kv_heads, S, LISTED, MEMBERS
    )
    used = tl.cdiv(tokens, part_size(tokens, BLOCK_T, MIN_PART, MAX_PARTS))
    o_row = i_r * tl.num_programs(0) + i_head
    o_d = tl.arange(0, BLOCK_DV)

    b_top = tl.full([BLOCK_N], float("-inf"), tl.float32)
    for first in range(0, used, BLOCK_N):
        o_n = first + tl.arange(0, BLOCK_N)
        b_m = tl.load(p_tops + o_row * parts + o_n, mask=o_n < used, other=float("-inf"))
        b_top = tl.maximum(b_top, b_m)
    top = tl.max(b_top, axis=0)
    if SINKS:
        sink = widen(tl.load(p_sinks + i_head))
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)

    b_sum = tl.zeros([BLOCK_DV], tl.float32)
    total = tl.zeros([1], tl.float32)
    for first in range(0, used, BLOCK_N):
        o_n = first + tl.arange(0, BLOCK_N)
        m_n = o_n < used
        b_m = tl.load(p_tops + o_row * parts + o_n, mask=m_n, other=float("-inf"))
        b_l = tl.load(p_totals + o_row * parts + o_n, mask=m_n, other=0.0)
        p_part = p_sums + (o_row * parts + o_n)[:, None] * DV + o_d[None, :]
        b_part = tl.load(p_part, mask=m_n[:, None] & (o_d < DV)[None, :], other=0.0)  # [BLOCK_N, BLOCK_DV]
        b_w = tl.exp(b_m - top)
        total += tl.sum(b_w * b_l, axis=0)
        b_sum += tl.sum(b_w[:, None] * b_part, axis=0)
    if SINKS:
        total += tl.exp(sink - top)
    b_out = narrow(tl.math.div_rn(b_sum, total), p_out.dtype.element_ty)
    tl.store(p_out + o_row * DV + o_d, b_out, mask=o_d < DV)

    if COUNTED:
        if i_head == 0:
            read = tl.zeros([1], tl.int64)
            for i_h in range(0, kv_heads):
                _, pages, _, _ = row_extent(
                    i_r, i_h, p_lengths, p_num_selected, p_list_counts, kv_heads, S, LISTED, MEMBERS
                )
                read += pages + 1
            tl.store(p_pages_read + i_r * pages_read_stride + tl.arange(0, 1), read)
