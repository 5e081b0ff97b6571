"""transfer: copy whole pages, head by head, between host memory and the device, in one launch.

A kernel reads and writes pinned host memory at its own address (CUDA's unified addressing), through the bus: whoever
copies scattered pages of a few KiB need not list them on the host.
"""

from __future__ import annotations

import torch

from questkv.kernels.triton.language import jit, next_power_of_2, tl
from questkv.kernels.triton.launch import on
from questkv.kernels.triton.storage import (
    BOXES,
    CODED,
    KEYS,
    SCALES,
    VALUE_SCALES,
    VALUES,
    place_of,
    row_of,
    storage_of,
)
from questkv.kernels.triton.tuning import transfer_blocks
from questkv.kernels.types import Pages


def transfer(source: Pages, page_ids: torch.Tensor, target: Pages, into: torch.Tensor) -> None:
    """As `kernels.transfer`; nothing waits for the GPU."""
    if not page_ids.numel():
        return
    old, new = storage_of(source), storage_of(target)
    dim, value_dim = source.head_dim, source.value_dim
    blocks = transfer_blocks(source.page_size * max(dim, value_dim))
    page_ids, into = page_ids.contiguous(), into.contiguous()
    with on(source.device):
        copy_pages[(page_ids.shape[1], source.num_kv_heads)](
            page_ids,
            into,
            old.segment_of,
            old.table,
            *old.bases,
            new.segment_of,
            new.table,
            *new.bases,
            S=source.page_size,
            D=dim,
            DV=value_dim,
            BLOCK=blocks.channels,
            BLOCK_S=next_power_of_2(2 * source.page_size),
            BLOCK_D=next_power_of_2(2 * dim),
            INT8=old.int8_boxes,
            CODES=old.has_codes,
            OLD_SEGMENTED=len(old.table) > 1,
            NEW_SEGMENTED=len(new.table) > 1,
            UNIT=min(old.unit, new.unit),
            num_warps=blocks.warps,
        )


@jit
def copy_pages(
    p_page_ids,
    p_into,
    p_old_segment_of,
    p_old_table,
    p_old_keys,
    p_old_values,
    p_old_coded_keys,
    p_old_coded_values,
    p_old_boxes,
    p_old_scales,
    p_old_value_scales,
    p_new_segment_of,
    p_new_table,
    p_new_keys,
    p_new_values,
    p_new_coded_keys,
    p_new_coded_values,
    p_new_boxes,
    p_new_scales,
    p_new_value_scales,
    S: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INT8: tl.constexpr,
    CODES: tl.constexpr,
    OLD_SEGMENTED: tl.constexpr,
    NEW_SEGMENTED: tl.constexpr,
    UNIT: tl.constexpr,
):
    """One page of one KV head: S * D numbers of keys and S * DV of values, its box, and what scales them."""
    i_h = tl.program_id(1)
    o_list = i_h.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    page = tl.load(p_page_ids + o_list)
    if page < 0:
        return
    to = tl.load(p_into + o_list)
    p_old = row_of(page, p_old_segment_of, p_old_table, OLD_SEGMENTED)
    p_new = row_of(to, p_new_segment_of, p_new_table, NEW_SEGMENTED)
    o_old = place_of(page, i_h, p_old)
    o_new = place_of(to, i_h, p_new)
    o_old_keys = tl.multiple_of(tl.load(p_old + KEYS), UNIT) + tl.multiple_of(o_old * (S * D), UNIT)
    o_old_values = tl.multiple_of(tl.load(p_old + VALUES), UNIT) + tl.multiple_of(o_old * (S * DV), UNIT)
    o_new_keys = tl.multiple_of(tl.load(p_new + KEYS), UNIT) + tl.multiple_of(o_new * (S * D), UNIT)
    o_new_values = tl.multiple_of(tl.load(p_new + VALUES), UNIT) + tl.multiple_of(o_new * (S * DV), UNIT)
    coded = 0
    if CODES:
        coded = tl.load(p_old + CODED)
    if coded != 0:
        copy(p_old_coded_keys + o_old_keys, p_new_coded_keys + o_new_keys, S * D, BLOCK)
        copy(p_old_coded_values + o_old_values, p_new_coded_values + o_new_values, S * DV, BLOCK)
        p_steps = p_old_value_scales + tl.load(p_old + VALUE_SCALES) + o_old * (2 * S)
        copy(p_steps, p_new_value_scales + tl.load(p_new + VALUE_SCALES) + o_new * (2 * S), 2 * S, BLOCK_S)
    else:
        copy(p_old_keys + o_old_keys, p_new_keys + o_new_keys, S * D, BLOCK)
        copy(p_old_values + o_old_values, p_new_values + o_new_values, S * DV, BLOCK)
    p_box = p_old_boxes + tl.load(p_old + BOXES) + o_old * (2 * D)
    copy(p_box, p_new_boxes + tl.load(p_new + BOXES) + o_new * (2 * D), 2 * D, BLOCK_D)
    if INT8:
        scale = tl.load(p_old_scales + tl.load(p_old + SCALES) + o_old)
        tl.store(p_new_scales + tl.load(p_new + SCALES) + o_new, scale)


@jit
def copy(p_from, p_to, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """SIZE numbers that lie side by side."""
    for start in range(0, SIZE, BLOCK):
        o = start + tl.arange(0, BLOCK)
        tl.store(p_to + o, tl.load(p_from + o, mask=o < SIZE), mask=o < SIZE)
