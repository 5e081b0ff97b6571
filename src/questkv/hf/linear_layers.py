"""A model's linear layers at the memory's speed for the few rows of a decode step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from questkv import kernels

# Rows up to which reading the weights takes longer than the arithmetic; longer runs are PyTorch's.
MOST_ROWS = 8
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make_linear_fast(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Let plain linear layers on the CPU run `kernels.linear` where they get few rows, else PyTorch's as before.

    On the CPU PyTorch reads the weights of a single token's matrix products several times slower than the memory gives
    them (docs/decode.md). Sums are float32 in both; only their order differs. Left alone are quantised layers, other
    classes, layers with a forward of their own or elsewhere than on the CPU, and all of them where the compiled module
    is missing.

    Args:
        model: Any module; it may itself be a linear layer.

    Returns:
        The layers that do so.
    """
    chosen = [module for module in model.modules() if _is_plain(module)] if _has_native() else []
    # Another class, and not another forward: torch.compile knows a class again when the block is entered once more.
    for module in chosen:
        module.__class__ = _FastLinear
    return chosen


@contextmanager
def fast_linear_layers(model: torch.nn.Module) -> Iterator[int]:
    """`make_linear_fast` until the block ends.

    Yields:
        How many layers it chose.
    """
    chosen = make_linear_fast(model)
    try:
        yield len(chosen)
    finally:
        for module in chosen:
            module.__class__ = torch.nn.Linear


def _has_native() -> bool:
    return "native" in kernels.available_backends()


def _is_plain(module: torch.nn.Module) -> bool:
    if type(module) is not torch.nn.Linear or "forward" in module.__dict__:
        return False
    weight = module.weight.data
    return type(weight) is torch.Tensor and weight.device.type == "cpu" and weight.dtype in _DTYPES


class _FastLinear(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        few = input.numel() <= MOST_ROWS * weight.shape[1] and input.is_contiguous() and weight.is_contiguous()
        wants_gradient = torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad)
        if not few or wants_gradient or input.dtype != weight.dtype:
            return F.linear(input, weight, self.bias)
        return kernels.linear(input, weight, self.bias, backend="native")
