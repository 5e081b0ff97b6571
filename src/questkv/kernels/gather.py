"""Reading pages out of their segments: a view where they lie in one run, else a copy of just those pages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from questkv.kernels.coded import decode_keys, decode_values
from questkv.kernels.types import Pages, PageSegment


def gather_run(parts: Sequence[torch.Tensor], page_ids: torch.Tensor) -> torch.Tensor:
    """All heads of the given pages.

    Args:
        parts: The segments' tensors, each [Hkv, N, ...].
        page_ids: [n] int64 physical pages.

    Returns:
        [Hkv, n, ...], a view if the pages are one run of a single segment.
    """
    sizes = [part.shape[1] for part in parts]
    pieces = [parts[part][:, here] for part, here in runs_of(sizes, page_ids)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def gather_tokens(pages: Pages, page_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All heads' keys and values of the given pages, coded ones decoded, those in host memory copied to the device.

    Args:
        pages: The layer's pages.
        page_ids: [n] int64 physical pages.

    Returns:
        [Hkv, n, S, D] and [Hkv, n, S, Dv]: float32 if a page among them is coded, else the pages' dtype, and then a
        view if they are one run of a single segment.
    """
    sizes = [segment.keys.shape[1] for segment in pages.segments]
    pieces = [
        _decoded(pages.segments[part], lambda tensor, here=here: _on(pages.device, tensor[:, here]))  # type: ignore[misc]
        for part, here in runs_of(sizes, page_ids)
    ]
    return _join([keys for keys, _ in pieces]), _join([values for _, values in pieces])


def _on(device: torch.device, run: torch.Tensor) -> torch.Tensor:
    """A run of pages [Hkv, n, ...] on the device: the same tensor if it is there, else copied from host memory.

    Head by head, since one head's run is contiguous: the copy engine then reads pinned memory by itself.
    """
    if run.device == device:
        return run
    there = torch.empty(run.shape, dtype=run.dtype, device=device)
    for target, source in zip(there, run, strict=True):
        target.copy_(source, non_blocking=True)
    return there


def gather_heads(pages: Pages, page_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of pages of each head's own, coded ones decoded.

    Args:
        pages: The layer's pages.
        page_ids: [Hkv, n] int64 physical pages.

    Returns:
        [Hkv, n, S, D] and [Hkv, n, S, Dv], copies: float32 if any segment is coded, else the pages' dtype.
    """
    heads = torch.arange(len(page_ids), device=page_ids.device)[:, None].expand_as(page_ids)
    keys, values = gather_pairs(pages, heads.flatten(), page_ids.flatten())
    return keys.unflatten(0, page_ids.shape), values.unflatten(0, page_ids.shape)


def gather_pairs(pages: Pages, heads: torch.Tensor, page_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one head of each given page, coded ones decoded.

    Args:
        pages: The layer's pages.
        heads: [m] int64 KV heads.
        page_ids: [m] int64 physical pages.

    Returns:
        [m, S, D] and [m, S, Dv], copies: float32 if any segment is coded, else the pages' dtype.
    """
    if len(pages.segments) == 1:
        return _pick(pages.segments[0], heads, page_ids)
    dtype = pages.dtype if pages.coded is None else torch.float32
    keys, values = (
        torch.empty((len(page_ids), pages.page_size, dim), dtype=dtype, device=pages.device)
        for dim in (pages.head_dim, pages.value_dim)
    )
    for segment, start in zip(pages.segments, pages.starts, strict=False):
        here = ((page_ids >= start) & (page_ids < start + segment.keys.shape[1])).nonzero().squeeze(1)
        if len(here):
            part_keys, part_values = _pick(segment, heads[here], page_ids[here] - start)
            keys[here], values[here] = part_keys.to(dtype), part_values.to(dtype)
    return keys, values


def _pick(segment: PageSegment, heads: torch.Tensor, page_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [m, S, D] and values [m, S, Dv] of one head of each page, by its place in the segment."""

    def take(tensor: torch.Tensor) -> torch.Tensor:
        # Boxes and scales may have more rows a head than there are pages: those of spans.
        return tensor.flatten(0, 1).index_select(0, heads * tensor.shape[1] + page_ids)

    return _decoded(segment, take)


def _decoded(segment: PageSegment, take: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """What `take` picks of a segment's keys and values: as they are if it is plain, else decoded."""
    keys, values = take(segment.keys), take(segment.values)
    if not segment.coded:
        return keys, values
    assert segment.scales is not None
    assert segment.value_scales is not None
    keys = decode_keys(keys, take(segment.boxes), take(segment.scales))
    return keys, decode_values(values, take(segment.value_scales))


def _join(pieces: list[torch.Tensor]) -> torch.Tensor:
    """[Hkv, n, ...] in one; decoded pieces are float32, which holds what the others hold."""
    if len(pieces) == 1:
        return pieces[0]
    if any(piece.dtype != pieces[0].dtype for piece in pieces):
        pieces = [piece.float() for piece in pieces]
    return torch.cat(pieces, dim=1)


def runs_of(sizes: Sequence[int], page_ids: torch.Tensor) -> list[tuple[int, slice]]:
    """(segment, its pages) of the longest runs of consecutive pages that lie in one segment, in the given order.

    Args:
        sizes: Pages of every segment.
        page_ids: [n] int64 physical pages; none gives one empty run of the first segment.
    """
    starts = list(itertools.accumulate(sizes, initial=0))
    breaks = page_ids[1:] != page_ids[:-1] + 1
    for start in starts[1:-1]:
        breaks = breaks | (page_ids[1:] == start)
    cuts = [0, *(breaks.nonzero().flatten() + 1).tolist(), len(page_ids)]
    firsts = page_ids[torch.tensor(cuts[:-1], device=page_ids.device)].tolist() if len(page_ids) else [0]
    runs = []
    for first, (cut, after) in zip(firsts, itertools.pairwise(cuts), strict=True):
        part = next((i for i, start in enumerate(starts[1:]) if first < start), None)
        if part is None:
            raise IndexError("a physical page lies in no segment")
        runs.append((part, slice(first - starts[part], first - starts[part] + after - cut)))
    return runs
