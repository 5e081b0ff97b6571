"""seal and estimate: the boxes, written and read."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from questkv.kernels.gather import gather_run
from questkv.kernels.reference.coding import encode_keys, encode_values
from questkv.kernels.types import Pages, PageSegment

# 127 * scale must reach the largest value although the division rounds; and a scale is never subnormal, which a CPU
# may flush to zero.
_SCALE_MARGIN = 1.0 + 2.0**-22
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def seal(pages: Pages, page_ids: torch.Tensor, into: torch.Tensor | None) -> None:
    """boxes[h, p] = (min over the page's keys, max over the page's keys), per channel; with `into`, codes as well."""
    for segment, local, places in _by_segment(pages, page_ids):
        keys = segment.keys[:, local]
        lo, hi = keys.amin(dim=2), keys.amax(dim=2)
        hidden = ~(lo.isfinite() & hi.isfinite()).all(dim=-1)
        if segment.scales is None:
            lo, hi = lo.masked_fill(hidden[..., None], -torch.inf), hi.masked_fill(hidden[..., None], torch.inf)
            segment.boxes[:, local] = torch.stack([lo, hi], dim=2)
            continue
        boxes, scales = round_outward(lo, hi, hidden)
        if into is None:
            segment.boxes[:, local], segment.scales[:, local] = boxes, scales
            continue
        key_codes = encode_keys(keys, boxes, scales)
        value_codes, value_scales = encode_values(segment.values[:, local])
        for target, to, chosen in _by_segment(pages, into[places]):
            assert target.scales is not None
            assert target.value_scales is not None
            target.boxes[:, to], target.scales[:, to] = boxes[:, chosen], scales[:, chosen]
            # Codes may be kept in host memory.
            to = to.to(target.keys.device)
            target.keys[:, to] = key_codes[:, chosen].to(target.keys.device)
            target.values[:, to] = value_codes[:, chosen].to(target.keys.device)
            target.value_scales[:, to] = value_scales[:, chosen].to(target.keys.device)


def _by_segment(pages: Pages, page_ids: torch.Tensor) -> Iterator[tuple[PageSegment, torch.Tensor, torch.Tensor]]:
    """Segments that hold any of the pages: the segment, the pages' places in it, and where they stand in the list."""
    for segment, start in zip(pages.segments, pages.starts, strict=False):
        chosen = ((page_ids >= start) & (page_ids < start + segment.keys.shape[1])).nonzero().squeeze(1)
        if len(chosen):
            yield segment, page_ids[chosen] - start, chosen


def round_outward(lo: torch.Tensor, hi: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Code boxes in int8 so that ``code_lo * scale <= lo`` and ``hi <= code_hi * scale`` hold exactly.

    Args:
        lo: [..., D] lowest values.
        hi: [..., D] highest values.
        hidden: [...] bool, pages that must score +inf.

    Returns:
        [..., 2, D] int8 codes and [...] float32 scales, +inf (codes 0) where `hidden`.
    """
    # float64 holds code * scale exactly (8 and 24 bits), so the comparisons below are exact.
    lo, hi = (bound.double().masked_fill(hidden[..., None], 0.0) for bound in (lo, hi))
    largest = torch.maximum(lo.abs(), hi.abs()).amax(dim=-1)
    scale = (largest / 127 * _SCALE_MARGIN).float().clamp(min=_SMALLEST_SCALE)
    step = scale.double()[..., None]
    code_lo, code_hi = (lo / step).floor(), (hi / step).ceil()
    code_lo -= (code_lo * step > lo).double()
    code_hi += (code_hi * step < hi).double()
    codes = torch.stack([code_lo, code_hi], dim=-2).to(torch.int8)
    return codes, scale.masked_fill(hidden, torch.inf)


def estimate(
    q: torch.Tensor,
    pages: Pages,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    optimism: float,
    group: str,
) -> torch.Tensor:
    """scores[r, h, p] = U . hi[h, p] + V . lo[h, p] with U = (M + aA) / 2, V = (M - aA) / 2 (docs/method.md)."""
    heads = q.shape[1] if group == "per_head" else pages.num_kv_heads
    scores = q.new_full((q.shape[0], heads, page_table.shape[1]), -torch.inf, dtype=torch.float32)
    for row, length in enumerate(lengths.tolist()):
        sealed = (length - 1) // pages.page_size
        if sealed:
            scores[row, :, :sealed] = _score(q[row], pages, page_table[row, :sealed], scale, optimism, group)
    return scores


def _score(
    q: torch.Tensor, pages: Pages, page_ids: torch.Tensor, scale: float, optimism: float, group: str
) -> torch.Tensor:
    """[H, n] scores of the given pages for one query [Hq, D]."""
    grouped = q.float().view(pages.num_kv_heads, -1, pages.head_dim) * scale
    mean, size = grouped, grouped.abs()
    if group == "mean":
        mean, size = mean.mean(dim=1, keepdim=True), size.mean(dim=1, keepdim=True)
    # The box is stored lo first, so its weights are V, then U.
    weights = torch.cat([(mean - optimism * size) / 2, (mean + optimism * size) / 2], dim=-1)
    boxes = gather_run([segment.boxes for segment in pages.segments], page_ids)
    scores = weights @ boxes.flatten(2).float().transpose(1, 2)  # [Hkv, 1 or G, n]
    scales = [segment.scales for segment in pages.segments if segment.scales is not None]
    if scales:
        scores = scores * gather_run(scales, page_ids)[:, None]
    # A page with a NaN or infinite key gives NaN (0 * inf, inf - inf) or +inf here: it must be read.
    scores = scores.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if group == "softmax_mean":
        must_read = (scores == torch.inf).any(dim=1)
        shares = scores.masked_fill(must_read[:, None], -torch.inf).softmax(dim=-1)
        # Where all scores are -inf (overflow, or no page left) there is nothing to share out.
        return shares.nan_to_num(nan=0.0).mean(dim=1).masked_fill(must_read, torch.inf)
    return scores.flatten(0, 1)
