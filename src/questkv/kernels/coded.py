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
        [..., S, D] float32, worked out in float32 and in this order: c (b - a) is a whole number below 2 ** 16 and each
        step after it rounds monotonically, so no key leaves s a ... s b by rounding.
    """
    lo, hi = boxes.float().unsqueeze(-3).unbind(dim=-2)  # [..., 1, D] each
    return codes.float().mul_(hi - lo).div_(LEVELS).add_(lo).mul_(scales[..., None, None])


def decode_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values: v' = offset + step c.

    Args:
        codes: [..., Dv] uint8.
        scales: [..., 2] float32, step and offset.

    Returns:
        [..., Dv] float32, worked out in float32.
    """
    step, offset = scales[..., None].unbind(dim=-2)
    return codes.float().mul_(step).add_(offset)
