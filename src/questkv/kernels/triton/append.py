"""append: write new tokens into their slots."""

from __future__ import annotations

import torch

from questkv.kernels.triton.language import cdiv, jit, next_power_of_2, tl
from questkv.kernels.triton.launch import on
from questkv.kernels.triton.storage import KEYS, VALUES, place_of, row_of, storage_of
from questkv.kernels.types import Pages

_TOKENS = 16  # of one program


def append(pages: Pages, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """As `kernels.append`, in one launch. A negative slot writes nothing."""
    if not len(slots):
        return
    storage = storage_of(pages)
    keys, values = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (keys, values))
    with on(pages.device):
        write_tokens[(cdiv(len(slots), _TOKENS), pages.num_kv_heads)](
            slots.contiguous(),
            keys,
            values,
            storage.segment_of,
            storage.table,
            *storage.bases[:2],
            *keys.stride()[:2],
            *values.stride()[:2],
            len(slots),
            S=pages.page_size,
            D=pages.head_dim,
            DV=pages.value_dim,
            BLOCK_D=next_power_of_2(pages.head_dim),
            BLOCK_DV=next_power_of_2(pages.value_dim),
            BLOCK_T=_TOKENS,
            SEGMENTED=len(storage.table) > 1,
            UNIT=storage.unit,
            num_warps=4,
        )


@jit(do_not_specialize=["tokens"])
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
    tokens,
    S: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SEGMENTED: tl.constexpr,
    UNIT: tl.constexpr,
):
    """BLOCK_T tokens of one KV head: D numbers of the key and DV of the value each."""
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    i_h = tl.program_id(1).to(tl.int64)
    slot = tl.load(p_slots + o_t, mask=o_t < tokens, other=-1)  # [BLOCK_T]
    m_t = slot >= 0
    page = tl.where(m_t, slot // S, 0)
    p_row = row_of(page, p_segment_of, p_table, SEGMENTED)
    o_slot = place_of(page, i_h, p_row) * S + (slot - page * S)
    o_d = tl.arange(0, BLOCK_D)
    o_v = tl.arange(0, BLOCK_DV)
    m_d = m_t[:, None] & (o_d < D)[None, :]
    m_v = m_t[:, None] & (o_v < DV)[None, :]
    p_key = p_new_keys + i_h * key_head + o_t[:, None] * key_token + o_d[None, :]
    p_value = p_new_values + i_h * value_head + o_t[:, None] * value_token + o_v[None, :]
    b_key = tl.load(p_key, mask=m_d)  # [BLOCK_T, BLOCK_D]
    b_value = tl.load(p_value, mask=m_v)  # [BLOCK_T, BLOCK_DV]
    o_key = tl.multiple_of(tl.load(p_row + KEYS) + o_slot * D, UNIT)
    o_value = tl.multiple_of(tl.load(p_row + VALUES) + o_slot * DV, UNIT)
    tl.store(p_keys + o_key[:, None] + o_d[None, :], b_key, mask=m_d)
    tl.store(p_values + o_value[:, None] + o_v[None, :], b_value, mask=m_v)
