"""Attention through pages has no gradients: a backward pass that needs them fails instead of finding zeros."""

from __future__ import annotations

from typing import Any

import torch

from questkv.errors import UnsupportedError


def refuse_backward(out: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """`out` itself, or a view of it through which no backward pass gets to the inputs that it was computed from.

    Raises:
        UnsupportedError: From `backward`, where one of the inputs wants a gradient.
    """
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in inputs):
        return out
    refused: torch.Tensor = _NoGradient.apply(out, *inputs)  # type: ignore[no-untyped-call]
    return refused


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise UnsupportedError(
            "[questkv] backward: expected no gradients through the paged attention, got a backward pass; compute them "
            "with another attention implementation and cache"
        )
