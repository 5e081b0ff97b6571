"""What a check found: how far a result is off, and how far it may be."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Finding:
    """One comparison.

    Attributes:
        kernel: The operator.
        what: What of its result was compared.
        error: The largest difference; NaN where one holds NaN and the other doesn't.
        allowed: What was allowed there.
        ok: Whether all of it was within what was allowed.
    """

    kernel: str
    what: str
    error: float
    allowed: float
    ok: bool


def finding(
    kernel: str, what: str, got: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor | float = 0.0
) -> Finding:
    """Compare two tensors of one shape; NaN and infinities must stand in the same places.

    Args:
        kernel: The operator.
        what: What is compared.
        got: Its result.
        expected: What it should be.
        allowed: Largest difference, for all elements or for each.
    """
    if got.shape != expected.shape:
        return Finding(kernel, f"{what}: shape {list(got.shape)}, not {list(expected.shape)}", float("nan"), 0.0, False)
    got, expected = got.double(), expected.double()
    if not got.numel():
        return Finding(kernel, what, 0.0, 0.0, True)
    bound = torch.as_tensor(allowed, dtype=torch.float64, device=got.device).expand_as(got)
    same = (got == expected) | (got.isnan() & expected.isnan())
    off = (got - expected).abs().masked_fill(same, 0.0)
    ok = same | (off <= bound)
    if bool(ok.all()):
        return Finding(kernel, what, float(off.max()), float(bound.nan_to_num(0.0).max()), True)
    # The worst of what is wrong; what isn't a number is worst of all.
    excess = (off - bound).nan_to_num(nan=torch.inf).masked_fill(ok, -torch.inf)
    worst = int(excess.argmax())
    return Finding(kernel, what, float(off.flatten()[worst]), float(bound.flatten()[worst]), False)
