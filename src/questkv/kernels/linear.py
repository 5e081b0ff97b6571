"""linear: a linear layer for a few rows, bound by reading its weights."""

from __future__ import annotations

import torch

from questkv.errors import UnsupportedError
from questkv.kernels import checks, dispatch


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, backend: str = "auto"
) -> torch.Tensor:
    """``x @ weight.T + bias``, summed in float32, for the few rows of a decode step.

    The ``native`` backend reads every weight once, at the memory's speed. PyTorch's own product is faster for many.

    Args:
        x: [..., K] float32, bfloat16 or float16, contiguous; K are input channels here, not pages.
        weight: [N, K] x's dtype and device, contiguous, a row for each of N outputs.
        bias: [N] likewise, or None.
        backend: ``auto`` or a backend's name.

    Returns:
        [..., N] x's dtype.

    Raises:
        ValueError: A shape or a device is wrong, or a tensor isn't contiguous.
        TypeError: A dtype is wrong.
        UnsupportedError: The backend has no linear layers; PyTorch's own are fast on a GPU.
    """
    if torch.compiler.is_compiling():
        out: torch.Tensor = torch.ops.questkv.linear(x, weight, bias, backend)
        return out
    if weight.ndim != 2 or x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"[linear] x: expected [..., K] for a weight [N, K], got {list(x.shape)}, {list(weight.shape)}"
        )
    if bias is not None and list(bias.shape) != [weight.shape[0]]:
        raise ValueError(f"[linear] bias: expected None or [N={weight.shape[0]}], got {list(bias.shape)}")
    checks.check_linear_dtype(x)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != x.dtype:
            raise TypeError(f"[linear] {name}: expected {x.dtype} like x, got {tensor.dtype}")
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"[linear] {name}: expected device {x.device}, got {tensor.device}")
    if not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError(
            f"[linear] x, weight: expected contiguous tensors, got strides {x.stride()}, {weight.stride()}"
        )
    module = dispatch.resolve(backend, x.device)
    if not hasattr(module, "linear"):
        raise UnsupportedError(f"[linear] backend: expected 'native' or 'reference', got {backend!r} on {x.device}")
    result: torch.Tensor = module.linear(x, weight, bias)
    return result
