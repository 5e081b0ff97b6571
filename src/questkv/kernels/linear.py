"""linear: a linear layer for a few rows, bound by reading its weights."""

from __future__ import annotations

import torch

from questkv.errors import UnsupportedError
from questkv.kernels import checks, dispatch


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scales: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """``x @ weight.T + bias``, summed in float32, for the few rows of a decode step.

    The ``native`` backend reads every weight once, at the memory's speed. PyTorch's own product is faster for many.

    Args:
        x: [..., K] float32, bfloat16 or float16, contiguous; K are input channels here, not pages.
        weight: [N, K] x's dtype and device, contiguous, a row for each of N outputs.
        bias: [N] likewise, or None.
        scales: [N] likewise; the weight holds int8 codes then, and row n stands for ``scales[n] * weight[n]``.
        backend: ``auto`` or a backend's name.

    Returns:
        [..., N] x's dtype.

    Raises:
        ValueError: A shape or a device is wrong, or a tensor isn't contiguous.
        TypeError: A dtype is wrong.
        UnsupportedError: The backend has no linear layers; PyTorch's own are fast on a GPU.

    Example:
        >>> out = linear(torch.randn(1, 64), torch.randn(128, 64))
    """
    if torch.compiler.is_compiling():
        out: torch.Tensor = torch.ops.questkv.linear(x, weight, bias, scales, backend)
        return out
    if weight.ndim != 2 or x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"[linear] x: expected [..., K] for a weight [N, K], got {list(x.shape)}, {list(weight.shape)}"
        )
    for name, tensor in (("bias", bias), ("scales", scales)):
        if tensor is not None and list(tensor.shape) != [weight.shape[0]]:
            raise ValueError(f"[linear] {name}: expected None or [N={weight.shape[0]}], got {list(tensor.shape)}")
    checks.check_linear_dtype(x)
    if scales is not None and weight.dtype != torch.int8:
        raise TypeError(f"[linear] weight: expected torch.int8 where there are scales, got {weight.dtype}")
    for name, tensor in (("weight", weight), ("bias", bias), ("scales", scales)):
        if tensor is not None and tensor.dtype != x.dtype and (tensor is not weight or scales is None):
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
    result: torch.Tensor = module.linear(x, weight, bias, scales)
    return result


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scales: torch.Tensor | None, backend: str
) -> torch.Tensor:
    """A model calls it hundreds of times a token, so only the backend looks at its arguments."""
    out: torch.Tensor = dispatch.resolve(backend, x.device).linear(x.contiguous(), weight.contiguous(), bias, scales)
    return out


def _fake_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scales: torch.Tensor | None, backend: str
) -> torch.Tensor:
    checks.check_linear_dtype(x)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


# What torch.compile sees in its place.
_library = torch.library.Library("questkv", "FRAGMENT")
_library.define("linear(Tensor x, Tensor weight, Tensor? bias, Tensor? scales, str backend) -> Tensor")
_library.impl("linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake("questkv::linear", _fake_linear, lib=_library)
