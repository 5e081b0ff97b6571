"""Random decode steps of one layer, and their attention worked out token by token in float64."""

from __future__ import annotations

import math

import torch

from questkv.evaluate.recall_steps import LayerSteps
from questkv.kernels import Softmax


def layer_steps(
    tokens: int = 77,
    rows: int = 5,
    *,
    kv_heads: int = 2,
    group: int = 3,
    softcap: float | None = None,
    sinks: bool = False,
    dtype: torch.dtype = torch.float32,
) -> LayerSteps:
    """The last `rows` of `tokens` tokens decoded one by one; attention is peaked, as in a real model."""
    gen = torch.Generator().manual_seed(tokens)
    dim = 16
    keys = torch.randn(kv_heads, tokens, dim, generator=gen) * 2
    values = torch.randn(kv_heads, tokens, dim, generator=gen)
    queries = torch.randn(rows, kv_heads * group, dim, generator=gen) * 2
    sink = torch.randn(kv_heads * group, generator=gen) * 3 if sinks else None
    lengths = torch.arange(tokens - rows + 1, tokens + 1)
    softmax = Softmax(dim**-0.5, softcap, sink)
    return LayerSteps(4, queries.to(dtype), keys.to(dtype), values.to(dtype), lengths, softmax)


def weights_of(steps: LayerSteps, row: int, head: int) -> tuple[torch.Tensor, float]:
    """float64 softmax weights [length] of one row and query head, and the sink's."""
    length = int(steps.lengths[row])
    keys = steps.keys[head // steps.group, :length].double()
    logits = keys @ steps.queries[row, head].double() * steps.softmax.scale
    if steps.softmax.softcap is not None:
        logits = steps.softmax.softcap * torch.tanh(logits / steps.softmax.softcap)
    powers = logits.exp()
    sink = math.exp(float(steps.softmax.sinks[head])) if steps.softmax.sinks is not None else 0.0
    total = float(powers.sum()) + sink
    return powers / total, sink / total


def output_over(steps: LayerSteps, row: int, head: int, tokens: list[int]) -> torch.Tensor:
    """float64 attention output [D] of one row and query head that sees nothing but the given tokens (and the sink)."""
    weights, sink = weights_of(steps, row, head)
    values = steps.values[head // steps.group, : len(weights)].double()
    kept = weights[tokens]
    return kept @ values[tokens] / (kept.sum() + sink)
