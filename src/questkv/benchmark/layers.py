"""Synthetic caches: random keys and values of several layers, so that no figure is the last-level cache's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from questkv import kernels
from questkv.benchmark.shapes import Shape
from questkv.config import QuestConfig
from questkv.kernels.coded import decode_keys, decode_values
from questkv.pages import PageGeometry

# Enough layers in turn that what one step reads is gone from any cache when its layer comes again.
BYTES_IN_TURN = 512 * 2**20
_MOST_LAYERS = 32


@dataclass(frozen=True)
class Layer:
    """One layer's cache, seen as pages and as plain tensors over the same memory.

    Attributes:
        pages: For our operators.
        plain: The same without coded pages, as a cache in the model's type has them.
        keys: [B, Hkv, context, D] view for the others.
        values: Like `keys`.
        coded: With ``kv_dtype="int8"`` what `pages` holds too: a coded page for every plain one, behind the plain ones.
    """

    pages: kernels.Pages
    plain: kernels.Pages
    keys: torch.Tensor
    values: torch.Tensor
    coded: bool = False

    def decoded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, Hkv, context, D] keys and values as our operators read them with all but the last page coded."""
        if not self.coded:
            return self.keys, self.values
        plain, codes = self.pages.segments
        assert codes.scales is not None
        assert codes.value_scales is not None
        every = codes.keys.shape[1]
        keys = decode_keys(codes.keys, codes.boxes[:, :every], codes.scales[:, :every])
        parts = (keys, decode_values(codes.values, codes.value_scales))
        size = self.pages.page_size
        decoded = []
        for part, own in zip(parts, (self.keys, self.values), strict=True):
            tokens = part.view(plain.keys.shape[0], *own.shape[:1], *own.shape[2:]).transpose(0, 1)
            decoded.append(torch.cat([tokens[:, :, :-size], own[:, :, -size:].float()], dim=2))
        return decoded[0], decoded[1]


def layers_out_of_cache(shape: Shape, config: QuestConfig, context: int, read_bytes: int) -> int:
    """Layers as many as take 512 MiB of what a step reads, and 6 GiB at most; at least two."""
    count = min(max(2, -(-BYTES_IN_TURN // max(read_bytes, 1))), _MOST_LAYERS)
    held = shape.kv_bytes(context) + (shape.coded_bytes(context) if config.kv_dtype == "int8" else 0)
    return min(count, max(2, 6 * 2**30 // held))


def make_layer(shape: Shape, config: QuestConfig, context: int, device: torch.device) -> Layer:
    """One layer of random contents; sequence b holds the physical pages from b * P on."""
    unit = config.page_size * max(config.span_pages, 1)
    if context % unit:
        raise ValueError(f"[bench] context: expected a multiple of {unit} tokens, whole pages or spans, got {context}")
    pages = context // config.page_size
    geometry = PageGeometry(
        shape.kv_heads,
        shape.head_dim,
        config.page_size,
        shape.torch_dtype,
        device,
        config.box_dtype,
        config.kv_dtype,
        span_pages=config.span_pages,
    )
    segment = geometry.allocate(shape.batch * pages)
    for tensor in (segment.keys, segment.values):
        tensor.normal_()
    coded = config.kv_dtype == "int8"
    layer = kernels.Pages((segment, geometry.allocate(shape.batch * pages, closed=True)) if coded else (segment,))
    every = torch.arange(shape.batch * pages, device=device)
    kernels.seal(layer, every, backend=config.backend)
    if coded:
        kernels.seal(layer, every, every + len(every), backend=config.backend)
    for first in (0, len(every)) if config.span_pages else ():
        if first < layer.num_pages:
            kernels.seal_spans(layer, (first + every).view(-1, config.span_pages), backend=config.backend)
    keys, values = (
        tensor.view(shape.kv_heads, shape.batch, context, shape.head_dim).transpose(0, 1)
        for tensor in (segment.keys, segment.values)
    )
    return Layer(layer, kernels.Pages((segment,)) if coded else layer, keys, values, coded)
