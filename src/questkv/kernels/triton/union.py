"""The rule ``per_head``: the pages that any head of a group chose, in one list."""

from __future__ import annotations

import torch

from questkv.kernels.triton.language import jit, next_power_of_2, tl
from questkv.kernels.triton.launch import on


def unite(
    members: torch.Tensor, lengths: torch.Tensor, num_selected: torch.Tensor, page_size: int, kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists [R, Hkv, P] int64, ascending, and their counts [R, Hkv] int64, in one launch.

    Args:
        members: [R, Hq, P] uint8, 1 where a head chose a page.
        lengths: [R] tokens of the rows.
        num_selected: [R]; rows that select all their pages are skipped.
        page_size: S.
        kv_heads: Hkv.
    """
    rows, heads, width = members.shape
    group = heads // kv_heads
    lists = torch.empty((rows, kv_heads, width), dtype=torch.int64, device=members.device)
    counts = torch.empty((rows, kv_heads), dtype=torch.int64, device=members.device)
    block_g = next_power_of_2(group)
    with on(members.device):
        list_members[(kv_heads, rows)](
            members,
            lengths,
            num_selected,
            lists,
            counts,
            width,
            kv_heads,
            S=page_size,
            G=group,
            BLOCK_G=block_g,
            BLOCK_P=max(4096 // block_g, 64),
            num_warps=4,
        )
    return lists, counts


@jit(do_not_specialize=["width", "kv_heads"])
def list_members(
    p_members,
    p_lengths,
    p_num_selected,
    p_lists,
    p_counts,
    width,
    kv_heads,
    S: tl.constexpr,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """One KV head of one row: reads G flags a page, writes the pages that have any."""
    i_h = tl.program_id(0)
    i_r = tl.program_id(1).to(tl.int64)
    sealed = ((tl.load(p_lengths + i_r) - 1) // S).to(tl.int32)
    if tl.load(p_num_selected + i_r) >= sealed:
        return
    o_g = tl.arange(0, BLOCK_G)
    o_list = i_r * kv_heads + i_h
    written = 0
    for start in range(0, sealed, BLOCK_P):
        o_p = start + tl.arange(0, BLOCK_P)
        m = (o_g < G)[:, None] & (o_p < sealed)[None, :]
        p_flag = p_members + (o_list * G + o_g)[:, None] * width + o_p[None, :]
        b_any = tl.max(tl.load(p_flag, mask=m, other=0).to(tl.int32), axis=0)  # [BLOCK_P]
        place = written + tl.cumsum(b_any, axis=0) - b_any
        tl.store(p_lists + o_list * width + place, o_p.to(tl.int64), mask=b_any == 1)
        written += tl.sum(b_any, axis=0)
    tl.store(p_counts + o_list, written)
