"""linear: the formula in float32."""

from __future__ import annotations

import torch


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scales: torch.Tensor | None
) -> torch.Tensor:
    """out[n] = x . weight[n] * scales[n] + bias[n]."""
    out = x.float() @ weight.float().T
    out = out if scales is None else out * scales.float()
    return (out if bias is None else out + bias.float()).to(x.dtype)
