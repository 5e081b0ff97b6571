"""attend's first kernel: one part of the tokens that a row reads, for a group of query heads together."""

from __future__ import annotations

from questkv.kernels.triton.arithmetic import (
    FLOAT16_WEIGHT,
    add_weighted,
    narrow,
    product,
    product_with_float32,
    tanh,
    widen,
)
from questkv.kernels.triton.language import jit, tl
from questkv.kernels.triton.rows import part_size, row_extent
from questkv.kernels.triton.storage import (
    BOXES,
    CODED,
    KEYS,
    SCALES,
    VALUE_SCALES,
    VALUES,
    place_of,
    row_of,
)


@jit(do_not_specialize=["table_row", "table_head", "members_width", "list_width", "kv_heads"])
def attend_part(
    p_q,
    p_page_table,
    p_lengths,
    p_num_selected,
    p_list_counts,
    p_lists,
    p_members,
    p_segment_of,
    p_table,
    p_keys,
    p_values,
    p_coded_keys,
    p_coded_values,
    p_boxes,
    p_scales,
    p_value_scales,
    p_sums,
    p_tops,
    p_totals,
    scale,
    softcap,
    table_row,
    table_head,
    members_width,
    list_width,
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
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PIECE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CODES: tl.constexpr,
    SEGMENTED: tl.constexpr,
    UNIT: tl.constexpr,
    BOX_UNIT: tl.constexpr,
):
    """Largest logit m, sum of exp(logit - m), and the values' sum weighted by that, of BLOCK_G heads over one part.

    The tokens that a row reads are numbered 0, 1, ...: those of its listed pages, then those of its open page. Every
    token's key and value are loaded once for all heads. What is masked is loaded as 0 and weighs 0, so nothing that
    lies in a slot beyond the row's own reaches a sum.
    """
    i_part = tl.program_id(0)
    HEAD_BLOCKS: tl.constexpr = (G + BLOCK_G - 1) // BLOCK_G
    i_h = tl.program_id(1) // HEAD_BLOCKS
    i_r = tl.program_id(2).to(tl.int64)
    tokens, pages, listed, sealed = row_extent(
        i_r, i_h, p_lengths, p_num_selected, p_list_counts, kv_heads, S, LISTED, MEMBERS
    )
    size = part_size(tokens, BLOCK_T, MIN_PART, MAX_PARTS)
    start = i_part * size
    if start >= tokens:
        return
    end = tl.minimum(start + size, tokens)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    o_v = tl.arange(0, BLOCK_DV)
    m_v = o_v < DV
    o_g = (tl.program_id(1) % HEAD_BLOCKS) * BLOCK_G + tl.arange(0, BLOCK_G)
    m_g = o_g < G
    o_head = (i_r * kv_heads + i_h) * G + o_g  # [BLOCK_G] (row, query head)
    if not CODES:
        b_q = tl.load(p_q + o_head[:, None] * D + o_d[None, :], mask=m_g[:, None] & m_d[None, :], other=0.0)

    b_m = tl.full([BLOCK_G], float("-inf"), tl.float32)
    b_l = tl.zeros([BLOCK_G], tl.float32)
    b_sum = tl.zeros([BLOCK_G, BLOCK_DV], tl.float32)
    for first in range(start, end, BLOCK_T):
        o_t = first + tl.arange(0, BLOCK_T)
        m_t = o_t < end
        i_page = o_t // S
        slot = o_t - i_page * S
        # The open page comes last; a row that isn't listed reads its pages as they come.
        logical = tl.where(i_page < pages, i_page, sealed)
        if LISTED:
            m_list = m_t & (i_page < listed)
            p_list = p_lists + (i_r * kv_heads + i_h) * list_width + i_page
            logical = tl.where(m_list, tl.load(p_list, mask=m_list, other=0).to(tl.int32), logical)
        page = tl.load(p_page_table + i_r * table_row + i_h * table_head + logical, mask=m_t, other=0)  # [BLOCK_T]
        p_row = row_of(page, p_segment_of, p_table, SEGMENTED)
        place = place_of(page, i_h, p_row)
        o_token = place * S + slot  # [BLOCK_T] (KV head, page, slot) of the segment
        m_plain = m_t
        if CODES:
            m_coded = m_t & (tl.load(p_row + CODED) != 0)
            m_plain = m_t & (tl.load(p_row + CODED) == 0)

        o_key = tl.multiple_of(tl.load(p_row + KEYS) + o_token * D, UNIT)
        if CODES:
            o_box = tl.multiple_of(tl.load(p_row + BOXES) + place * (2 * D), BOX_UNIT)
            p_box_scale = p_scales + tl.load(p_row + SCALES) + place
            b_s = mixed_logits(
                p_q, p_keys, p_coded_keys, p_boxes, o_head, o_key, o_box, m_g, m_plain, m_coded, D, BLOCK_D, PIECE
            )
            b_s *= tl.load(p_box_scale, mask=m_coded, other=1.0)[None, :]
        else:
            m_k = m_plain[:, None] & m_d[None, :]
            b_k = tl.load(p_keys + o_key[:, None] + o_d[None, :], mask=m_k, other=0.0)  # [BLOCK_T, BLOCK_D]
            b_s = product(b_q, tl.trans(b_k))  # [BLOCK_G, BLOCK_T]
        b_s *= scale
        if SOFTCAP:
            b_s = softcap * tanh(tl.math.div_rn(b_s, softcap))

        m_s = m_g[:, None] & m_t[None, :]
        if MEMBERS:
            p_member = p_members + o_head[:, None] * members_width + logical[None, :]
            m_closed = m_s & (i_page < listed)[None, :]
            m_s = m_s & (~m_closed | (tl.load(p_member, mask=m_closed, other=0) != 0))
        b_s = tl.where(m_s, b_s, float("-inf"))
        # A NaN is not a largest logit; its own weight is NaN all the same.
        b_top = tl.maximum(b_m, tl.max(tl.where(b_s == b_s, b_s, float("-inf")), axis=1))
        b_from = tl.where(b_top == float("-inf"), 0.0, b_top)
        b_w = tl.where(m_s, tl.exp(b_s - b_from[:, None]), 0.0)  # [BLOCK_G, BLOCK_T]
        b_kept = tl.exp(b_m - b_from)
        b_l = b_l * b_kept + tl.sum(b_w, axis=1)
        b_sum = b_sum * b_kept[:, None]
        b_m = b_top

        if p_values.dtype.element_ty == tl.float16:
            b_w = b_w * FLOAT16_WEIGHT
        o_value = tl.multiple_of(tl.load(p_row + VALUES) + o_token * DV, UNIT)
        m_kv = m_plain[:, None] & m_v[None, :]
        b_v = tl.load(p_values + o_value[:, None] + o_v[None, :], mask=m_kv, other=0.0)  # [BLOCK_T, BLOCK_DV]
        if MEMBERS:
            # A head must not meet what is NaN or infinite in a page that only another head reads: 0 * NaN is NaN.
            m_bad = widen(b_v) * 0.0 != 0.0
            b_bad = product(m_s.to(tl.float16), m_bad.to(tl.float16))
            b_sum = tl.where(b_bad > 0.0, float("nan"), b_sum)
            b_v = tl.where(m_bad, 0.0, b_v)
        if CODES:
            b_code = tl.load(
                p_coded_values + o_value[:, None] + o_v[None, :], mask=m_coded[:, None] & m_v[None, :], other=0
            )
            b_v = tl.where(m_coded[:, None], narrow(b_code.to(tl.float32), b_v.dtype), b_v)
            b_sum = add_with_steps(b_w, b_v, b_sum, p_value_scales, p_row, o_token, m_s, m_coded)
        else:
            b_sum = add_weighted(b_w, b_v, b_sum)

    if p_values.dtype.element_ty == tl.float16:
        b_sum = b_sum * (1.0 / FLOAT16_WEIGHT)
    o_part = o_head * tl.num_programs(0) + i_part
    tl.store(p_tops + o_part, b_m, mask=m_g)
    tl.store(p_totals + o_part, b_l, mask=m_g)
    tl.store(p_sums + o_part[:, None] * DV + o_v[None, :], b_sum, mask=m_g[:, None] & m_v[None, :])


@jit
def mixed_logits(
    p_q,
    p_keys,
    p_coded_keys,
    p_boxes,
    o_head,
    o_key,
    o_box,
    m_g,
    m_plain,
    m_coded,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PIECE: tl.constexpr,
):
    """[BLOCK_G, BLOCK_T] q . k of plain and coded keys; of coded ones it is still to be times the box's scale s.

    A coded key is k' = s (a + c (b - a) / 255). Without s what is summed lies in [-128, 128] and suits any type; and
    where s is +inf all of it is 0, and 0 * inf is NaN. Channels go in pieces: a whole row of decoded keys, and of their
    parts in the model's type, wants more registers than there are.
    """
    b_s = tl.zeros([m_g.shape[0], m_plain.shape[0]], tl.float32)
    for i in tl.static_range(BLOCK_D // PIECE):
        o_d = i * PIECE + tl.arange(0, PIECE)
        m_d = (o_d < D)[None, :]
        b_q = tl.load(p_q + o_head[:, None] * D + o_d[None, :], mask=m_g[:, None] & m_d, other=0.0)
        b_k = tl.load(p_keys + o_key[:, None] + o_d[None, :], mask=m_plain[:, None] & m_d, other=0.0)
        m = m_coded[:, None] & m_d
        b_code = tl.load(p_coded_keys + o_key[:, None] + o_d[None, :], mask=m, other=0).to(tl.float32)
        b_lo = tl.load(p_boxes + o_box[:, None] + o_d[None, :], mask=m, other=0).to(tl.float32)
        b_hi = tl.load(p_boxes + o_box[:, None] + D + o_d[None, :], mask=m, other=0).to(tl.float32)
        b_place = b_lo + b_code * ((b_hi - b_lo) * (1.0 / 255.0))  # [BLOCK_T, PIECE]
        b_s += product_with_float32(b_q, tl.trans(tl.where(m_coded[:, None], b_place, widen(b_k))))
    return b_s


@jit
def add_with_steps(b_w, b_v, b_sum, p_value_scales, p_row, o_token, m_s, m_coded):
    """b_sum plus weights times values, coded ones v' = offset + step c: the step goes into the token's weight.

    Codes are whole numbers to 255, which every type holds.
    """
    p_step = p_value_scales + tl.load(p_row + VALUE_SCALES) + o_token * 2
    b_step = tl.load(p_step, mask=m_coded, other=1.0)
    b_offset = tl.load(p_step + 1, mask=m_coded, other=0.0)
    b_sum += tl.sum(tl.where(m_s, b_w * b_offset[None, :], 0.0), axis=1)[:, None]
    b_w = tl.where(m_s, b_w * b_step[None, :], 0.0)
    if b_v.dtype == tl.float16:
        # Float16 would overflow where a step is above 2: weights times a power of 2 that is at least the largest.
        largest = tl.max(tl.where(b_step > 1.0, b_step, 1.0), axis=0)
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * 2.0
        power = tl.where(largest > 1.0, power, 1.0)
        return b_sum + add_weighted(b_w / power, b_v, tl.zeros_like(b_sum)) * power
    return add_weighted(b_w, b_v, b_sum)
