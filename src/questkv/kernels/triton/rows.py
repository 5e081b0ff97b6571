"""What a row reads, worked out in a kernel from the row alone: how many tokens, in parts of how many."""

from __future__ import annotations

from questkv.kernels.triton.language import jit, tl


@jit
def row_extent(
    i_r,
    i_h,
    p_lengths,
    p_num_selected,
    p_list_counts,
    kv_heads,
    S: tl.constexpr,
    LISTED: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    """Of one KV head of one row: tokens it reads, sealed pages among them, how many of those are listed, sealed pages.

    A row that may read all its sealed pages takes them without a list, in the same order: so it gives the bits of the
    dense path.
    """
    length = tl.load(p_lengths + i_r)
    sealed = (length - 1) // S
    pages = sealed
    listed = sealed * 0
    if LISTED:
        chosen = tl.load(p_num_selected + i_r)
        entries = chosen
        if MEMBERS:
            # Where the row isn't listed, nobody wrote this.
            entries = tl.load(p_list_counts + i_r * kv_heads + i_h)
        pages = tl.where(chosen < sealed, entries, sealed)
        listed = tl.where(chosen < sealed, entries, 0)
    tokens = pages * S + (length - sealed * S)
    return tokens.to(tl.int32), pages.to(tl.int32), listed.to(tl.int32), sealed.to(tl.int32)


@jit
def part_size(tokens, BLOCK_T: tl.constexpr, MIN_PART: tl.constexpr, MAX_PARTS: tl.constexpr):
    """Tokens of a part, whole tiles: a function of the row's tokens, so that no sum depends on the batch."""
    return tl.maximum(MIN_PART, tl.cdiv(tokens, MAX_PARTS * BLOCK_T) * BLOCK_T)
