"""Coding a full page in eight bits: keys within the page's box, values within the token's own range."""

from __future__ import annotations

import torch

from questkv.kernels.coded import LEVELS


def encode_keys(keys: torch.Tensor, boxes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Keys: c = round(((k - s a) 255) / (s (b - a))), a and b the box's codes and s its scale; 0 where a = b.

    In float64, in this order; ties to even.

    Args:
        keys: [Hkv, n, S, D] a float dtype.
        boxes: [Hkv, n, 2, D] int8.
        scales: [Hkv, n] float32; +inf (the page holds a NaN or infinite key) gives codes of 0.

    Returns:
        [Hkv, n, S, D] uint8.
    """
    lo, hi = boxes.double().unsqueeze(-3).unbind(dim=-2)  # [Hkv, n, 1, D] each
    scale = scales.double()[..., None, None]
    codes = ((keys.double() - scale * lo) * LEVELS / (scale * (hi - lo))).round().clamp(0, LEVELS)
    return codes.masked_fill((lo == hi) | scale.isinf(), 0).to(torch.uint8)


def encode_values(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values: c = round((v - offset) / step), offset = min v, step = (max v - min v) / 255; 0 where step = 0.

    Step and offset in float32, the codes in float64; ties to even.

    Args:
        values: [Hkv, n, S, Dv] a float dtype.

    Returns:
        [Hkv, n, S, Dv] uint8 codes and [Hkv, n, S, 2] float32 step and offset, both NaN (codes 0) for a token that
        holds a NaN or infinite value.
    """
    lo, hi = values.amin(dim=-1).float(), values.amax(dim=-1).float()
    hidden = ~(lo.isfinite() & hi.isfinite())
    step = ((hi - lo) / LEVELS).masked_fill(hidden, torch.nan)
    offset = lo.masked_fill(hidden, torch.nan)
    codes = ((values.double() - offset.double()[..., None]) / step.double()[..., None]).round().clamp(0, LEVELS)
    codes = codes.masked_fill((hidden | (step == 0))[..., None], 0).to(torch.uint8)
    return codes, torch.stack([step, offset], dim=-1)
