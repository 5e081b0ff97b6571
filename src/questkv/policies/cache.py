"""`PolicyCache`: a decode cache whose full-attention layers belong to a policy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache

from questkv.hf.attention import mark_own_layer
from questkv.policies.context import Context
from questkv.policies.layer import HeldLayer
from questkv.policies.tokens import HeldTokens


class PolicyCache(Cache):
    """Continues a context with layers that attend in PyTorch; sliding windows are copies of the context's.

    Args:
        context: Where it starts; left as it is.
        make_layer: Makes the layer of a paged layer's number.
    """

    def __init__(self, context: Context, make_layer: Callable[[int], HeldLayer]) -> None:
        paged = context.paged_layers
        super().__init__(
            layers=[
                make_layer(index) if index in paged else copy.deepcopy(layer)
                for index, layer in enumerate(context.cache.layers)
            ]
        )

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand new keys and values to their layer."""
        layer = self.layers[layer_idx]
        keys, values = layer.update(key_states, value_states, *args, **kwargs)
        if not isinstance(layer, HeldLayer):
            mark_own_layer(keys)
        return keys, values

    @property
    def held_layers(self) -> dict[int, HeldLayer]:
        """The layers that attend in PyTorch, by the model's layer: what they hold and what they read."""
        return {index: layer for index, layer in enumerate(self.layers) if isinstance(layer, HeldLayer)}


def dense_layer(context: Context, index: int) -> HeldLayer:
    """A layer that goes on holding and reading everything."""
    keys, values = context.cache.keys_values(index)
    positions = torch.arange(context.length, device=keys.device).expand(len(keys), -1)
    return HeldLayer(HeldTokens(keys, values, positions), context.length)
