"""seal: the boxes of full pages, and their content in eight bits."""

from __future__ import annotations

import torch

from questkv.kernels.triton.arithmetic import narrow, whole, widen
from questkv.kernels.triton.language import constant, jit, next_power_of_2, tl
from questkv.kernels.triton.launch import on
from questkv.kernels.triton.storage import (
    BOXES,
    KEYS,
    SCALES,
    VALUE_SCALES,
    VALUES,
    place_of,
    row_of,
    storage_of,
)
from questkv.kernels.triton.tuning import seal_blocks
from questkv.kernels.types import Pages

# 127 * scale must reach the largest value although the division rounds; and a scale is never subnormal, which a GPU
# may flush to zero.
_SCALE_MARGIN = constant(1.0 + 2.0**-22)
_SMALLEST_SCALE = constant(2.0**-126)
_LEVELS = constant(255.0)  # steps between the lowest and the highest code


def seal_spans(pages: Pages, page_ids: torch.Tensor) -> None:
    """As `kernels.seal_spans`: refused, as everything is where spans have boxes."""
    storage_of(pages)


def seal(pages: Pages, page_ids: torch.Tensor, into: torch.Tensor | None = None) -> None:
    """As `kernels.seal`, in one launch. A negative page id seals nothing."""
    if not len(page_ids):
        return
    storage, dim = storage_of(pages), pages.head_dim
    blocks = seal_blocks(max(dim, pages.value_dim), pages.page_size)
    page_ids = page_ids.contiguous()
    with on(pages.device):
        seal_pages[(len(page_ids), pages.num_kv_heads)](
            page_ids,
            page_ids if into is None else into.contiguous(),
            storage.segment_of,
            storage.table,
            *storage.bases,
            S=pages.page_size,
            D=dim,
            DV=pages.value_dim,
            BLOCK_D=next_power_of_2(dim),
            BLOCK_DV=next_power_of_2(pages.value_dim),
            BLOCK_S=blocks.tokens,
            INT8=storage.int8_boxes,
            INTO=into is not None,
            SEGMENTED=len(storage.table) > 1,
            num_warps=blocks.warps,
        )


@jit
def seal_pages(
    p_page_ids,
    p_into,
    p_segment_of,
    p_table,
    p_keys,
    p_values,
    p_coded_keys,
    p_coded_values,
    p_boxes,
    p_scales,
    p_value_scales,
    S: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
    INT8: tl.constexpr,
    INTO: tl.constexpr,
    SEGMENTED: tl.constexpr,
):
    """One page of one KV head.

    Reads S * D numbers of keys (and S * DV of values, with INTO), twice; the second time from the cache.
    """
    i_page = tl.program_id(0)
    i_h = tl.program_id(1)
    page = tl.load(p_page_ids + i_page)
    if page < 0:
        return
    p_row = row_of(page, p_segment_of, p_table, SEGMENTED)
    o_page = place_of(page, i_h, p_row) * S
    p_key = p_keys + tl.load(p_row + KEYS) + o_page * D
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    b_lo, b_hi, hidden = bounds_of(p_key, S, D, BLOCK_D, BLOCK_S)

    p_to = p_row
    target = page
    if INTO:
        target = tl.load(p_into + i_page)
        p_to = row_of(target, p_segment_of, p_table, SEGMENTED)
    o_target = place_of(target, i_h, p_to)
    p_box = p_boxes + tl.load(p_to + BOXES) + o_target * 2 * D + o_d
    if not INT8:
        # A page with a NaN or infinite key: the box that scores +inf.
        b_lo = tl.where(hidden, float("-inf"), b_lo)
        b_hi = tl.where(hidden, float("inf"), b_hi)
        tl.store(p_box, narrow(b_lo, p_boxes.dtype.element_ty), mask=m_d)
        tl.store(p_box + D, narrow(b_hi, p_boxes.dtype.element_ty), mask=m_d)
    else:
        # float64 holds code * scale exactly (8 and 24 bits), so the comparisons below are exact.
        b_lo = tl.where(hidden | (o_d >= D), 0.0, b_lo).to(tl.float64)
        b_hi = tl.where(hidden | (o_d >= D), 0.0, b_hi).to(tl.float64)
        largest = tl.max(tl.maximum(tl.abs(b_lo), tl.abs(b_hi)), axis=0)
        scale = tl.maximum((largest / 127.0 * _SCALE_MARGIN).to(tl.float32), _SMALLEST_SCALE)
        step = scale.to(tl.float64)
        b_code_lo = tl.floor(b_lo / step)
        b_code_lo -= (b_code_lo * step > b_lo).to(tl.float64)
        b_code_hi = tl.ceil(b_hi / step)
        b_code_hi += (b_code_hi * step < b_hi).to(tl.float64)
        tl.store(p_box, b_code_lo.to(tl.int32).to(tl.int8), mask=m_d)
        tl.store(p_box + D, b_code_hi.to(tl.int32).to(tl.int8), mask=m_d)
        tl.store(p_scales + tl.load(p_to + SCALES) + o_target, tl.where(hidden, float("inf"), scale))
        if INTO:
            p_value = p_values + tl.load(p_row + VALUES) + o_page * DV
            p_key_code = p_coded_keys + tl.load(p_to + KEYS) + o_target * S * D
            p_value_code = p_coded_values + tl.load(p_to + VALUES) + o_target * S * DV
            p_steps = p_value_scales + tl.load(p_to + VALUE_SCALES) + o_target * S * 2
            code_keys(p_key, p_key_code, b_code_lo, b_code_hi, step, hidden, S, D, BLOCK_D, BLOCK_S)
            code_values(p_value, p_value_code, p_steps, S, DV, BLOCK_DV, BLOCK_S)


@jit
def bounds_of(p_key, S: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr):
    """[D] float32 lowest and highest key of every channel, and whether a key is NaN or infinite."""
    o_d = tl.arange(0, BLOCK_D)
    b_lo = tl.full([BLOCK_D], float("inf"), tl.float32)
    b_hi = tl.full([BLOCK_D], float("-inf"), tl.float32)
    b_bad = tl.zeros([BLOCK_D], tl.int32)
    for start in range(0, S, BLOCK_S):
        o_s = start + tl.arange(0, BLOCK_S)
        m = (o_s < S)[:, None] & (o_d < D)[None, :]
        b_k = widen(tl.load(p_key + o_s[:, None] * D + o_d[None, :], mask=m, other=0.0))  # [BLOCK_S, BLOCK_D]
        m_bad = ~(tl.abs(b_k) < float("inf"))
        b_bad += tl.sum(m_bad.to(tl.int32), axis=0)
        b_lo = tl.minimum(b_lo, tl.min(tl.where(m & ~m_bad, b_k, float("inf")), axis=0))
        b_hi = tl.maximum(b_hi, tl.max(tl.where(m & ~m_bad, b_k, float("-inf")), axis=0))
    return b_lo, b_hi, tl.sum(b_bad, axis=0) > 0


@jit
def code_keys(
    p_key,
    p_code,
    b_code_lo,
    b_code_hi,
    step,
    hidden,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """C = round(((k - s a) 255) / (s (b - a))) in float64, 0 where a = b or the page is hidden."""
    o_d = tl.arange(0, BLOCK_D)
    b_lo = (b_code_lo * step)[None, :]
    b_width = ((b_code_hi - b_code_lo) * step)[None, :]
    for start in range(0, S, BLOCK_S):
        o_s = start + tl.arange(0, BLOCK_S)
        m = (o_s < S)[:, None] & (o_d < D)[None, :]
        o_kd = o_s[:, None] * D + o_d[None, :]
        b_k = widen(tl.load(p_key + o_kd, mask=m, other=0.0)).to(tl.float64)  # [BLOCK_S, BLOCK_D]
        m_flat = (b_width == 0.0) | hidden
        b_code = (b_k - b_lo) * _LEVELS / tl.where(m_flat, 1.0, b_width)
        b_code = whole(tl.minimum(tl.maximum(tl.where(m_flat, 0.0, b_code), 0.0), _LEVELS))
        tl.store(p_code + o_kd, b_code.to(tl.int32).to(tl.uint8), mask=m)


@jit
def code_values(
    p_value, p_code, p_steps, S: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr
):
    """C = round((v - offset) / step), a token's offset and step in float32, both NaN where a value isn't finite."""
    o_d = tl.arange(0, BLOCK_DV)
    for start in range(0, S, BLOCK_S):
        o_s = start + tl.arange(0, BLOCK_S)
        m = (o_s < S)[:, None] & (o_d < DV)[None, :]
        o_kd = o_s[:, None] * DV + o_d[None, :]
        b_v = widen(tl.load(p_value + o_kd, mask=m, other=0.0))  # [BLOCK_S, BLOCK_DV]
        m_bad = ~(tl.abs(b_v) < float("inf"))
        hidden = tl.sum(m_bad.to(tl.int32), axis=1) > 0  # [BLOCK_S]
        b_lo = tl.min(tl.where(m & ~m_bad, b_v, float("inf")), axis=1)
        b_hi = tl.max(tl.where(m & ~m_bad, b_v, float("-inf")), axis=1)
        b_lo = tl.where(hidden | (o_s >= S), 0.0, b_lo)
        b_hi = tl.where(hidden | (o_s >= S), 0.0, b_hi)
        b_step = tl.math.div_rn(b_hi - b_lo, _LEVELS)
        m_flat = (hidden | (b_step == 0.0))[:, None]
        b_step64 = tl.where(m_flat, 1.0, b_step.to(tl.float64)[:, None])
        b_code = (b_v.to(tl.float64) - b_lo.to(tl.float64)[:, None]) / b_step64
        b_code = whole(tl.minimum(tl.maximum(tl.where(m_flat, 0.0, b_code), 0.0), _LEVELS))
        tl.store(p_code + o_kd, b_code.to(tl.int32).to(tl.uint8), mask=m)
        tl.store(p_steps + o_s * 2, tl.where(hidden, float("nan"), b_step), mask=o_s < S)
        tl.store(p_steps + o_s * 2 + 1, tl.where(hidden, float("nan"), b_lo), mask=o_s < S)
