"""Pages in eight bits, read back: what a code stands for (docs/method.md, "Pages in eight bits")."""

from __future__ import annotations

import torch

LEVELS = 255  # steps between the lowest and the highest code, which are 0 and 255


def decode_keys(codes: torch.Tensor, boxes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Keys: k' = s (a + c (b - a) / 255), a and b the box's codes and s its scale: NaN where s is +inf.

    Args:
        codes: [..., S, D] uint8.
        boxes: [..., 2, D] int8.
        scales: [...] float32.

    Returns:
        [..., S, D] float32, worked out in float64 and rounded once.
    """
    lo, hi = boxes.double().unsqueeze(-3).unbind(dim=-2)  # [..., 1, D] each
    place = lo + codes.double() * (hi - lo) / LEVELS
    return (scales.double()[..., None, None] * place).float()


def decode_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values: v' = offset + step c.

    Args:
        codes: [..., D] uint8.
        scales: [..., 2] float32, step and offset.

    Returns:
        [..., D] float32, worked out in float64 and rounded once.
    """
    step, offset = scales.double()[..., None].unbind(dim=-2)
    return (offset + step * codes.double()).float()
