"""Synthetic caches: random keys and values of several layers, so that no figure is the last-level cache's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from questkv import kernels
from questkv.benchmark.shapes import Shape
from questkv.config import QuestConfig
from questkv.pages import PageGeometry

# Enough layers in turn that what one step reads is gone from any cache when its layer comes again.
BYTES_IN_TURN = 512 * 2**20
_MOST_LAYERS = 32


@dataclass(frozen=True)
class Layer:
    """One layer's cache, seen as pages and as plain tensors over the same memory.

    Attributes:
        pages: For our operators.
        keys: [B, Hkv, context, D] view for the others.
        values: Like `keys`.
    """

    pages: kernels.Pages
    keys: torch.Tensor
    values: torch.Tensor


def make_layers(shape: Shape, config: QuestConfig, context: int, read_bytes: int) -> list[Layer]:
    """Layers of random contents, as many as take 512 MiB of what a step reads; at least two."""
    count = min(max(2, -(-BYTES_IN_TURN // max(read_bytes, 1))), _MOST_LAYERS)
    fit = max(2, 6 * 2**30 // shape.kv_bytes(context))
    return [make_layer(shape, config, context) for _ in range(min(count, fit))]


def make_layer(shape: Shape, config: QuestConfig, context: int) -> Layer:
    """One layer; sequence b holds the physical pages from b * P on."""
    if context % config.page_size:
        raise ValueError(f"[bench] context: expected a multiple of the page size {config.page_size}, got {context}")
    pages = context // config.page_size
    geometry = PageGeometry(
        shape.kv_heads, shape.head_dim, config.page_size, shape.torch_dtype, torch.device("cpu"), config.box_dtype
    )
    segment = geometry.allocate(shape.batch * pages)
    for tensor in (segment.keys, segment.values):
        tensor.normal_()
    layer = kernels.Pages((segment,))
    kernels.seal(layer, torch.arange(shape.batch * pages), backend=config.backend)
    plain = (
        tensor.view(shape.kv_heads, shape.batch, context, shape.head_dim).transpose(0, 1)
        for tensor in (segment.keys, segment.values)
    )
    return Layer(layer, *plain)
