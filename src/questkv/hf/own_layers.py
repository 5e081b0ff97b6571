"""The layers of a cache that are transformers' own: what they hold, kept and put back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# What one layer held: its attributes.
Held = dict[str, Any]


class OwnLayers:
    """Sliding-window, linear-attention and other layers that aren't paged.

    Args:
        layers: The layers.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = list(layers)

    def held(self) -> list[Held]:
        """What the layers hold, for `put_back`."""
        return [{name: _kept(value) for name, value in vars(layer).items()} for layer in self.layers]

    def put_back(self, held: list[Held]) -> None:
        """Have the layers hold what they held."""
        for layer, attributes in zip(self.layers, held, strict=True):
            layer.__dict__ = attributes

    def reset(self) -> None:
        """Forget every token."""
        for layer in self.layers:
            layer.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; see `QuestCache.crop`."""
        for layer in self.layers:
            layer.crop(tokens_to_remove)

    def reorder(self, indices: torch.Tensor) -> None:
        """Sequence i becomes what sequence indices[i] was; there may be more or fewer of them.

        Every kind of layer can do this, where repeating and selecting is missing in linear-attention layers, or leaves
        out a part of those that attend besides.
        """
        for layer in self.layers:
            layer.reorder_cache(indices)


def _kept(value: Any) -> Any:
    """A value that stays what it is: keys and values are replaced by each update, states in a dict written in place."""
    if isinstance(value, dict):
        return {key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in value.items()}
    return value
