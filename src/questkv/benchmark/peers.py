"""Other implementations of one decode step, over the same keys and values."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from questkv.benchmark.layers import BYTES_IN_TURN, Layer

# query [B, Hq, D] and a layer -> [B, Hq, D]
Step = Callable[[torch.Tensor, Layer], torch.Tensor]


def sdpa(query: torch.Tensor, layer: Layer) -> torch.Tensor:
    """PyTorch's fused attention, heads of a group sharing keys by its own flag."""
    out: torch.Tensor = F.scaled_dot_product_attention(query[:, :, None], layer.keys, layer.values, enable_gqa=True)
    return out[:, :, 0]


def sdpa_grouped(query: torch.Tensor, layer: Layer) -> torch.Tensor:
    """The same with a group's heads as the queries of its KV head, so that no key is repeated."""
    grouped = query.unflatten(1, (layer.keys.shape[1], -1))
    out: torch.Tensor = F.scaled_dot_product_attention(grouped, layer.keys, layer.values).flatten(1, 2)
    return out


def matmul(query: torch.Tensor, layer: Layer) -> torch.Tensor:
    """Two batched products and a softmax."""
    grouped = query.unflatten(1, (layer.keys.shape[1], -1)) * query.shape[-1] ** -0.5
    weights = (grouped @ layer.keys.transpose(-1, -2)).softmax(dim=-1, dtype=torch.float32)
    out: torch.Tensor = (weights.to(query.dtype) @ layer.values).flatten(1, 2)
    return out


def flex() -> Step:
    """flex_attention, compiled; its first call takes long."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def step(query: torch.Tensor, layer: Layer) -> torch.Tensor:
        out: torch.Tensor = compiled(query[:, :, None], layer.keys, layer.values, enable_gqa=True)
        return out[:, :, 0]

    return step


def available(layers: list[Layer], *, with_flex: bool) -> dict[str, Step]:
    """The peers that can be timed here, by name."""
    peers: dict[str, Step] = {"torch-sdpa": sdpa, "torch-sdpa-grouped": sdpa_grouped, "torch-matmul": matmul}
    if layers[0].keys.dtype != torch.float32:
        peers["torch-sdpa-float32"] = in_float32(sdpa, layers)
    if with_flex:
        peers["flex_attention"] = flex()
    return peers


def in_float32(step: Step, layers: list[Layer]) -> Step:
    """A peer over float32 copies, made here and not under the clock; as many in turn as no cache can hold."""
    count = min(len(layers), max(1, -(-BYTES_IN_TURN // (8 * layers[0].keys.numel()))))
    copies = [Layer(layer.pages, layer.keys.float(), layer.values.float()) for layer in layers[:count]]
    turn = itertools.cycle(copies)

    def converted(query: torch.Tensor, layer: Layer) -> torch.Tensor:
        return step(query.float(), next(turn)).to(query.dtype)

    return converted
