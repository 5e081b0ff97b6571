"""seal, seal_spans and estimate: the boxes, written and read."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from questkv.config import SPAN_SHARE
from questkv.kernels.gather import gather_run
from questkv.kernels.reference.coding import encode_keys, encode_values
from questkv.kernels.rows import Rows
from questkv.kernels.scoring import Scoring
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
    return _codes_outward(lo, hi, scale), scale.masked_fill(hidden, torch.inf)


def _codes_outward(lo: torch.Tensor, hi: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[..., 2, D] int8: lo [..., D] float64 rounded down and hi up, in steps of `scale` [...]."""
    step = scale.double()[..., None]
    code_lo, code_hi = (lo / step).floor(), (hi / step).ceil()
    code_lo -= (code_lo * step > lo).double()
    code_hi += (code_hi * step < hi).double()
    return torch.stack([code_lo, code_hi], dim=-2).to(torch.int8)


def seal_spans(pages: Pages, page_ids: torch.Tensor) -> None:
    """boxes[h, N + i] = (min over the pages' lowest, max over their highest), per channel."""
    for segment, last, places in _by_segment(pages, page_ids[:, -1]):
        spans = segment.keys.shape[1] + torch.div(last, pages.span_pages, rounding_mode="floor")
        bounds, scales = _boxes_of(pages, page_ids[places].flatten())
        bounds = bounds.double() if scales is None else bounds.double() * scales.double()[..., None, None]
        hidden = ~bounds.isfinite().flatten(2).all(dim=-1)
        lo, hi = bounds.unflatten(1, (-1, pages.span_pages)).unbind(dim=3)  # [Hkv, n, C, D] each
        lo, hi, hidden = lo.amin(dim=2), hi.amax(dim=2), hidden.unflatten(1, (-1, pages.span_pages)).any(dim=2)
        if scales is None:
            segment.boxes[:, spans] = torch.stack([lo, hi], dim=2).to(segment.boxes.dtype)
            continue
        assert segment.scales is not None
        scale = scales.unflatten(1, (-1, pages.span_pages)).amax(dim=2)
        codes = _codes_outward(lo.masked_fill(hidden[..., None], 0.0), hi.masked_fill(hidden[..., None], 0.0), scale)
        segment.boxes[:, spans], segment.scales[:, spans] = codes, scale


def estimate(
    q: torch.Tensor,
    pages: Pages,
    rows: Rows,
    scale: float,
    scoring: Scoring,
) -> torch.Tensor:
    """scores[r, h, p] = U . hi[h, p] + V . lo[h, p] with U = (M + aA) / 2, V = (M - aA) / 2 (docs/method.md)."""
    heads = q.shape[1] if scoring.group == "per_head" else pages.num_kv_heads
    scores = q.new_full((q.shape[0], heads, rows.page_table.shape[1]), -torch.inf, dtype=torch.float32)
    for row, length in enumerate(rows.lengths.tolist()):
        sealed = (length - 1) // pages.page_size
        if not sealed:
            continue
        weights = _weights(q[row].float().view(pages.num_kv_heads, -1, pages.head_dim) * scale, scoring)
        table = rows.page_table[row, :sealed]
        shown = None
        if rows.num_selected is not None:
            shown = _in_best_spans(pages, table, weights, scoring.group, int(rows.num_selected[row]))
        scores[row, :, :sealed] = _scores(weights, *_boxes_of(pages, table), scoring.group, shown).flatten(0, 1)
    return scores


def _in_best_spans(
    pages: Pages, page_ids: torch.Tensor, weights: torch.Tensor, group: str, wanted: int
) -> torch.Tensor | None:
    """[Hkv, 1 or G, n] bool, the pages that are scored where a row wants so many; None for all of them."""
    size = pages.span_pages
    spans = len(page_ids) // size if size else 0
    kept = -(-SPAN_SHARE * wanted // size) if size else 0
    if kept >= spans:
        return None
    last = page_ids[size - 1 : spans * size : size]
    scores = _scores(weights, *_boxes_of(pages, last, spans=True), group, None)
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :kept]
    shown = torch.zeros_like(scores, dtype=torch.bool).scatter_(2, best, True).repeat_interleave(size, dim=2)
    return torch.nn.functional.pad(shown, (0, len(page_ids) - spans * size), value=True)


def _boxes_of(pages: Pages, page_ids: torch.Tensor, *, spans: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Boxes [Hkv, n, 2, D] and scales [Hkv, n] of pages, or of the spans that end with them."""
    places = page_ids
    if spans:
        places = torch.div(page_ids, pages.span_pages, rounding_mode="floor")

    def parts(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        sizes = [segment.keys.shape[1] for segment in pages.segments]
        return [t[:, size:] if spans else t[:, :size] for t, size in zip(tensors, sizes, strict=True)]

    boxes = gather_run(parts([segment.boxes for segment in pages.segments]), places)
    scales = [segment.scales for segment in pages.segments if segment.scales is not None]
    return boxes, gather_run(parts(scales), places) if scales else None


def _weights(grouped: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """[Hkv, 1 or G, 2 D] V, then U, since a box is stored lo first; `grouped` are scaled queries [Hkv, G, D]."""
    mean, size = grouped, grouped.abs()
    if scoring.group == "mean":
        mean, size = mean.mean(dim=1, keepdim=True), size.mean(dim=1, keepdim=True)
    return torch.cat([(mean - scoring.optimism * size) / 2, (mean + scoring.optimism * size) / 2], dim=-1)


def _scores(
    weights: torch.Tensor,
    boxes: torch.Tensor,
    scales: torch.Tensor | None,
    group: str,
    shown: torch.Tensor | None,
) -> torch.Tensor:
    """[Hkv, 1 or G, n] scores of boxes [Hkv, n, 2, D]; -inf where they aren't shown."""
    scores = weights @ boxes.flatten(2).float().transpose(1, 2)
    if scales is not None:
        scores = scores * scales[:, None]
    # A page with a NaN or infinite key gives NaN (0 * inf, inf - inf) or +inf here: it must be read.
    scores = scores.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    hidden = torch.zeros_like(scores[:, :1], dtype=torch.bool) if shown is None else ~shown
    if group == "softmax_mean":
        must_read = (scores == torch.inf).any(dim=1, keepdim=True)
        shares = scores.masked_fill(must_read | hidden, -torch.inf).softmax(dim=-1)
        # Where all scores are -inf (overflow, or no page left) there is nothing to share out.
        scores = shares.nan_to_num(nan=0.0).mean(dim=1, keepdim=True).masked_fill(must_read, torch.inf)
    return scores.masked_fill(hidden, -torch.inf)
