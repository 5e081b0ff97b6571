"""The kernels' formulas in float64 (docs/method.md), each with a bound on what float32 arithmetic may differ from it.

Unit roundoff is taken as 2**-23: tensor cores chop sums where the processor rounds them. First order bounds, times 1.01
for the rest. They are wide enough for any order of the sums, and three times narrower than a token that is left out of
a few thousand.
"""

from __future__ import annotations

import math

import torch

U = 2.0**-23
_TINY = 2.0**-120  # underflow in float32
# Decoded keys go into the product in parts of the model's type, which hold this many bits (one bit for their rounding).
_DECODED = {torch.float32: 2.0**-21, torch.float16: 2.0**-20, torch.bfloat16: 2.0**-16}


def attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, scale: float, *, coded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of one row over the tokens that each query head sees, and the bound on its error.

    A logit is a sum of D products, scaled: (D + 3) u scale sum |q k|, and for decoded keys the parts' bits of scale
    sum |q| times the largest key. An error e of every logit changes weights by at most exp(2 e) - 1 relatively. T
    weights and weighted values are summed in tiles of 128 tokens at most, the tiles and the parts of the row one after
    another: no sum is more than 128 + T / 16 deep. exp costs u times its argument, and a few. The weights' parts in
    the model's type hold 22 bits, and of a coded value step and offset are summed apart, so sizes are those of the
    token's largest value, three times. Rounding to the query's type comes on top.

    Args:
        q: [Hq, D] in the model's type.
        keys: [Hkv, L, D] in the model's type, or float64 decoded ones.
        values: Like `keys`.
        seen: [Hq, L] bool.
        scale: Softmax scale.
        coded: Whether pages are coded.

    Returns:
        [Hq, D] float64 twice: the output, and the bound; both NaN where a head sees a NaN key.
    """
    query, keys, values = q.double().unflatten(0, (len(keys), -1)), keys.double(), values.double()
    mask = seen.unflatten(0, (len(keys), -1))  # [Hkv, G, L]
    logits = (query @ keys.transpose(1, 2) * scale).masked_fill(~mask, -math.inf)
    size = (query.abs() @ keys.abs().transpose(1, 2) * scale).masked_fill(~mask, 0.0)
    error = (q.shape[1] + 3) * U * size.amax(dim=2, keepdim=True)
    if coded:
        largest = keys.nan_to_num().abs().amax(dim=(1, 2))[:, None, None] * (1 + 2 / 127)
        error = error + _DECODED[q.dtype] * scale * query.abs().sum(dim=2, keepdim=True) * largest
    weights = logits.softmax(dim=2)
    lowest = logits.masked_fill(~mask, math.inf).amin(dim=2, keepdim=True)
    spread = logits.amax(dim=2, keepdim=True) - lowest
    tokens = mask.sum(dim=2, keepdim=True)
    depth = torch.minimum(tokens, 128 + tokens // 16)
    relative = torch.expm1(2 * error) + (2 * depth + 2 * spread + 32) * U
    sizes = 3 * values.abs().amax(dim=2, keepdim=True).expand_as(values) if coded else values.abs()
    out, bound = (weights @ values).flatten(0, 1), (1.01 * relative * (weights @ sizes)).flatten(0, 1) + _TINY
    # Float16 weights are held to 2**-39 at least.
    bound = bound + tokens.flatten(0, 1) * 2.0**-38 * float(values.abs().max())
    info = torch.finfo(q.dtype)
    return out, bound + (out.abs() + bound) * info.eps / 2 + info.smallest_normal * info.eps


def scores(
    q: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, scale: float, optimism: float, rule: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of one row's sealed pages, and the bound on their error; a page without a finite box scores +inf.

    Scaling, the mean over the group and U, V cost at most max(G, 8) + 6 u of the weights' size, (1 + a) / 2 |q| scale
    for each bound of the box; the product over 2 D terms and the box's scale (2 D + 2) u. Shares: an error e of every
    score changes them by exp(2 e) - 1, and their softmax over n pages adds n + spread + 20 u.

    Args:
        q: [Hq, D].
        lo: [Hkv, n, D] float64.
        hi: [Hkv, n, D] float64.
        scale: Softmax scale.
        optimism: a.
        rule: Group rule.

    Returns:
        [Hkv or Hq, n] float64 twice.
    """
    heads = len(lo)
    query = q.double().unflatten(0, (heads, -1))
    bad = ~(lo.isfinite() & hi.isfinite()).all(dim=2)[:, None]  # [Hkv, 1, n]
    lo, hi = (bound.masked_fill(bad.transpose(1, 2), 0.0) for bound in (lo, hi))
    centre, half = ((hi + lo) / 2).transpose(1, 2), ((hi - lo) / 2).transpose(1, 2)
    score = scale * (query @ centre + optimism * (query.abs() @ half))  # [Hkv, G, n]
    size = scale * (1 + optimism) / 2 * (query.abs() @ (lo.abs() + hi.abs()).transpose(1, 2))
    bound = 1.01 * (2 * q.shape[1] + max(query.shape[1], 8) + 8) * U * size + _TINY
    if rule == "per_head":
        return score.masked_fill(bad, math.inf).flatten(0, 1), bound.flatten(0, 1)
    if rule == "softmax_mean":
        score = score.masked_fill(bad, -math.inf)
        lowest = score.masked_fill(bad, math.inf).amin(dim=2, keepdim=True)
        spread = score.amax(dim=2, keepdim=True) - lowest
        shares = score.softmax(dim=2)
        relative = torch.expm1(2 * bound.amax(dim=2, keepdim=True)) + (score.shape[2] + spread + 20) * U
        score, bound = shares, 1.01 * relative * shares + _TINY
    return score.mean(dim=1).masked_fill(bad[:, 0], math.inf), bound.mean(dim=1)


def chosen(scores: torch.Tensor, count: int, sink_pages: int, recent_pages: int) -> torch.Tensor:
    """The pages that `select` must choose: forced ones, then by score, the lower page first where scores are equal.

    Args:
        scores: [H, n] as they are in float32, of the row's sealed pages; NaN counts as +inf.
        count: Pages to choose, not more than n and not fewer than the forced ones.
        sink_pages: First pages that are forced.
        recent_pages: Last pages that are forced.

    Returns:
        [H, count] int64, ascending.
    """
    pages = torch.arange(scores.shape[1], device=scores.device)
    forced = (pages < sink_pages) | (pages >= scores.shape[1] - recent_pages)
    by_score = scores.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf).sort(descending=True, stable=True)
    forced_first = forced[by_score.indices].to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
    return by_score.indices.gather(1, forced_first)[:, :count].sort(dim=1).values


def decoded_keys(codes: torch.Tensor, boxes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[Hkv, n, S, D] float64: s (a + c (b - a) / 255); codes [Hkv, n, S, D], boxes [Hkv, n, 2, D], scales [Hkv, n]."""
    lo, hi = boxes.double()[:, :, None].unbind(dim=3)
    return scales.double()[..., None, None] * (lo + codes.double() * (hi - lo) / 255)


def decoded_values(codes: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """[Hkv, n, S, D] float64: offset + step c; codes [Hkv, n, S, D], steps [Hkv, n, S, 2]."""
    step, offset = steps.double()[..., None].unbind(dim=3)
    return offset + step * codes.double()
