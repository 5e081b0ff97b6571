"""Block sizes by architecture and shape; docs/triton.md has the reasons, and what the compiler reports for each.

A block's size may depend on what a layer and its machine are, never on a batch, a length or a capacity: a row's sums
would be added in another order, and its result would depend on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from questkv.kernels.triton.language import cdiv, next_power_of_2

# Tensor cores multiply 16 rows at a time; a group of query heads is padded to that.
_DOT_ROWS = 16


@dataclass(frozen=True)
class AttendBlocks:
    """How `attend` divides its work.

    Attributes:
        tokens: Tokens of one tile.
        heads: Query heads of one program, padded.
        min_part: Fewest tokens of a part, a multiple of `tokens`.
        max_parts: Most parts of a row.
        warps: Warps a program.
        stages: Tiles under way at once.
        merge: Parts that are merged at a time.
        piece: Channels of coded keys that are decoded at a time.
    """

    tokens: int
    heads: int
    min_part: int
    max_parts: int
    warps: int
    stages: int
    merge: int
    piece: int

    def parts(self, tokens: int) -> int:
        """Most parts of any row of at most `tokens` tokens."""
        return min(self.max_parts, max(cdiv(tokens, self.min_part), 1))


@dataclass(frozen=True)
class EstimateBlocks:
    """How `estimate` divides its work: pages of one program, its warps, and values of one tile of `shares`."""

    pages: int
    warps: int
    shares: int


@dataclass(frozen=True)
class SelectBlocks:
    """How `select` divides its work: scores of one tile, and its warps."""

    pages: int
    warps: int


@dataclass(frozen=True)
class SealBlocks:
    """How `seal` divides its work: tokens of one tile, and its warps."""

    tokens: int
    warps: int


@dataclass(frozen=True)
class TransferBlocks:
    """How `transfer` divides its work: channels copied at a time, and warps of one program, which copies one page."""

    channels: int
    warps: int


# (tokens, warps, stages) by architecture, bytes of a channel, and channels, a power of 2. What is here spills nothing.
_PLAIN = {
    (80, 2, 64): (64, 4, 2),
    (80, 2, 128): (32, 4, 3),
    (80, 2, 256): (32, 8, 2),
    (80, 4, 64): (32, 4, 2),
    (80, 4, 128): (16, 4, 2),
    (80, 4, 256): (16, 8, 2),
    (90, 2, 64): (64, 4, 2),
    (90, 2, 128): (64, 4, 2),
    (90, 2, 256): (32, 8, 2),
    (90, 4, 64): (32, 4, 2),
    (90, 4, 128): (16, 4, 2),
    (90, 4, 256): (16, 8, 2),
}
# The same where pages may be coded: a tile is decoded in registers, and nothing is fetched ahead of it.
_CODED = {
    (80, 2, 64): (32, 4, 1),
    (80, 2, 128): (16, 4, 1),
    (80, 2, 256): (16, 4, 1),
    (80, 4, 64): (16, 4, 1),
    (80, 4, 128): (16, 4, 1),
    (80, 4, 256): (16, 8, 1),
    (90, 2, 64): (32, 4, 1),
    (90, 2, 128): (32, 4, 1),
    (90, 2, 256): (16, 4, 1),
    (90, 4, 64): (16, 4, 1),
    (90, 4, 128): (16, 4, 1),
    (90, 4, 256): (16, 8, 1),
}


@cache
def attend_blocks(arch: int, head_dim: int, group: int, kv_heads: int, element: int, coded: bool) -> AttendBlocks:
    """For one layer.

    Args:
        arch: 10 times the compute capability.
        head_dim: D or Dv, the larger.
        group: G.
        kv_heads: Hkv.
        element: Bytes of a key's channel.
        coded: Whether pages may be coded.
    """
    dim = max(next_power_of_2(head_dim), 64)
    row = (90 if arch >= 90 else 80, element, dim)
    tokens, warps, stages = (_CODED if coded else _PLAIN)[row]
    # Sums of [heads, D] stay in registers, with the queries: 2048 of them are 16 a thread.
    heads = max(min(next_power_of_2(group), 2048 // dim), _DOT_ROWS)
    # A budget of 2048 tokens makes as many parts as give every multiprocessor a few programs, whatever Hkv.
    part = 128 if kv_heads >= 16 else 64 if kv_heads >= 4 else 32
    return AttendBlocks(
        tokens=tokens,
        heads=heads,
        min_part=max(part, tokens),
        max_parts=max(32, min(128, next_power_of_2(cdiv(2048, kv_heads)))),
        warps=warps,
        stages=stages,
        merge=16,
        piece=64,
    )


@cache
def estimate_blocks(head_dim: int) -> EstimateBlocks:
    """For one layer: 64 values of lo and hi a thread at most."""
    return EstimateBlocks(pages=min(max(4096 // next_power_of_2(head_dim), 16), 128), warps=4, shares=2048)


@cache
def select_blocks() -> SelectBlocks:
    """For every layer."""
    return SelectBlocks(pages=1024, warps=8)


@cache
def seal_blocks(head_dim: int, page_size: int) -> SealBlocks:
    """For one layer, by D or Dv, the larger: 8 float64 numbers a thread and tensor."""
    return SealBlocks(tokens=min(next_power_of_2(page_size), max(1024 // next_power_of_2(head_dim), 1)), warps=4)


@cache
def transfer_blocks(page: int) -> TransferBlocks:
    """For one layer, by the numbers in a page's keys or values of a head, whichever are more.

    At most 16 a thread and tile: two loads of 16 bytes.
    """
    return TransferBlocks(channels=min(next_power_of_2(page), 2048), warps=4)
