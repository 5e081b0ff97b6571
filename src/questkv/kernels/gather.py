"""Reading pages out of their segments: a view where they lie in one run, else a copy of just those pages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch


def gather_run(parts: Sequence[torch.Tensor], page_ids: torch.Tensor) -> torch.Tensor:
    """All heads of the given pages.

    Args:
        parts: The segments' tensors, each [Hkv, N, ...].
        page_ids: [n] int64 physical pages.

    Returns:
        [Hkv, n, ...], a view if the pages are one run of a single segment.
    """
    pieces = [_view(parts, first, count) for first, count in _runs(parts, page_ids)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def gather_pairs(parts: Sequence[torch.Tensor], heads: torch.Tensor, page_ids: torch.Tensor) -> torch.Tensor:
    """One head of each given page.

    Args:
        parts: The segments' tensors, each [Hkv, N, ...].
        heads: [m] int64 KV heads.
        page_ids: [m] int64 physical pages.

    Returns:
        [m, ...], a copy.
    """
    if len(parts) == 1:
        return _pick(parts[0], heads, page_ids)
    out = parts[0].new_empty((len(page_ids), *parts[0].shape[2:]))
    start = 0
    for part in parts:
        here = ((page_ids >= start) & (page_ids < start + part.shape[1])).nonzero().squeeze(1)
        if len(here):
            out[here] = _pick(part, heads[here], page_ids[here] - start)
        start += part.shape[1]
    return out


def _pick(part: torch.Tensor, heads: torch.Tensor, page_ids: torch.Tensor) -> torch.Tensor:
    return part.flatten(0, 1).index_select(0, heads * part.shape[1] + page_ids)


def _runs(parts: Sequence[torch.Tensor], page_ids: torch.Tensor) -> list[tuple[int, int]]:
    """(first page, pages) of the longest runs of consecutive pages that lie in one segment, in the given order."""
    breaks = page_ids[1:] != page_ids[:-1] + 1
    start = 0
    for part in parts[:-1]:
        start += part.shape[1]
        breaks = breaks | (page_ids[1:] == start)
    cuts = [0, *(breaks.nonzero().flatten() + 1).tolist(), len(page_ids)]
    return [(int(page_ids[cut]), after - cut) for cut, after in itertools.pairwise(cuts)]


def _view(parts: Sequence[torch.Tensor], first: int, count: int) -> torch.Tensor:
    for part in parts:
        if first < part.shape[1]:
            return part[:, first : first + count]
        first -= part.shape[1]
    raise IndexError("a physical page lies in no segment")
