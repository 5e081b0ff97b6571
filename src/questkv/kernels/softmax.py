"""`Softmax`: how logits become weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from questkv.kernels.checked import Bound


@dataclass(frozen=True)
class Softmax(Bound):
    """How an operator turns logits into weights.

    Attributes:
        scale: Softmax scale, usually D ** -0.5.
        softcap: Logits become ``softcap * tanh(logit / softcap)`` (Gemma 2); None leaves them as they are.
        sinks: [Hq] a float dtype on the queries' device: one more logit per query head that takes mass and adds nothing
            to the output (gpt-oss); None for none. Make another `Softmax` where it changes.

    Raises:
        ValueError: A number isn't positive and finite, or `sinks` isn't a list of numbers.
        TypeError: `sinks` has no float dtype.
    """

    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def __post_init__(self) -> None:
        check_scale("Softmax", self.scale)
        if self.softcap is not None and not (_is_finite(self.softcap) and self.softcap > 0):
            raise ValueError(f"[Softmax] softcap: expected None or a positive finite number, got {self.softcap!r}")
        sinks = self.sinks
        if sinks is None:
            return
        if sinks.ndim != 1:
            raise ValueError(f"[Softmax] sinks: expected None or [Hq], got {list(sinks.shape)}")
        if not sinks.is_floating_point():
            raise TypeError(f"[Softmax] sinks: expected a float dtype, got {sinks.dtype}")


def check_scale(op: str, scale: float) -> None:
    """The softmax scale is a positive finite number."""
    if not (_is_finite(scale) and scale > 0):
        raise ValueError(f"[{op}] scale: expected a positive finite number, got {scale!r}")


def _is_finite(value: object) -> bool:
    return isinstance(value, float | int) and math.isfinite(value)
