"""append: write new tokens into their slots."""

from __future__ import annotations

import torch

from questkv.kernels.triton.language import jit, next_power_of_2, tl
from questkv.kernels.triton.launch import on
from questkv.kernels.triton.storage import KEYS, VALUES, place_of, row_of, storage_of
from questkv.kernels.types import Pages


def append(pages: Pages, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """As `kernels.append`, in one launch. A negative slot writes nothing."""
    if not len(slots):
        return
    storage, dim = storage_of(pages), pages.head_dim
    keys, values = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (keys, values))
    with on(pages.device):
        write_tokens[(len(slots), pages.num_kv_heads)](
            slots.contiguous(),
            keys,
            values,
            storage.segment_of,
            storage.table,
            *storage.bases[:2],
            *keys.stride()[:2],
            *values.stride()[:2],
            S=pages.page_size,
            D=dim,
            BLOCK_D=next_power_of_2(dim),
            SEGMENTED=len(storage.table) > 1,
            num_warps=1,
        )


@jit
def write_tokens(
    p_slots,
    p_new_keys,
    p_new_values,
    p_segment_of,
    p_table,
    p_keys,
    p_values,
    key_token,
    key_head,
    value_token,
    value_head,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SEGMENTED: tl.constexpr,
):
    """One token of one KV head: D keys and D values."""
    i_t = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1)
    slot = tl.load(p_slots + i_t)
    if slot < 0:
        return
    page = slot // S
    p_row = row_of(page, p_segment_of, p_table, SEGMENTED)
    o_slot = (place_of(page, i_h, p_row) * S + (slot - page * S)) * D
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    b_key = tl.load(p_new_keys + i_t * key_token + i_h.to(tl.int64) * key_head + o_d, mask=m_d)  # [D]
    b_value = tl.load(p_new_values + i_t * value_token + i_h.to(tl.int64) * value_head + o_d, mask=m_d)  # [D]
    tl.store(p_keys + tl.load(p_row + KEYS) + o_slot + o_d, b_key, mask=m_d)
    tl.store(p_values + tl.load(p_row + VALUES) + o_slot + o_d, b_value, mask=m_d)
