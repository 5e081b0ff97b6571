"""Multi-head latent attention: keys and values that the model works out between the cache and attention.

Such a model (DeepSeek, Kimi, GLM, MiniCPM) hands its cache latents, one vector a token for all heads, and expands what
the cache gives back. Pages hold keys and values, so the cache gives back the new tokens' latents alone; the model
expands those, token by token, and the attention function finds the layer on what comes of it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import PreTrainedConfig


class ExpandingLayer(Protocol):
    """A cache layer that is given latents, and later the keys and values that they were expanded to."""

    def attend_expanded(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        softmax: Any,
    ) -> torch.Tensor:
        """As `AttendingLayer.attend`, of queries [B, Hq, n, D], keys [B, Hkv, n, D] and values [B, Hkv, n, Dv]."""


def latent_widths(config: PreTrainedConfig) -> tuple[int, int] | None:
    """Channels of the two latents that a model with multi-head latent attention hands its cache, None for another.

    The first is what keys and values are expanded from, the second the keys' part that carries the position.
    """
    text = config.get_text_config(decoder=True)
    ranks = getattr(text, "kv_lora_rank", None), getattr(text, "qk_rope_head_dim", None)
    return None if None in ranks else ranks  # type: ignore[return-value]


class NewStates(torch.Tensor):
    """New tokens' latents, and whatever is computed from them: a tensor like any other, with its layer's name on it."""

    layer: ExpandingLayer

    @staticmethod
    def of(layer: ExpandingLayer, states: torch.Tensor) -> NewStates:
        """A view of `states` that leads to a layer."""
        marked = states.as_subclass(NewStates)
        marked.layer = layer
        return marked

    def plain(self) -> torch.Tensor:
        """The same without the mark."""
        return self.as_subclass(torch.Tensor)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute, and mark what comes of it."""
        out = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        source = next((x for x in _flat((*args, *(kwargs or {}).values())) if isinstance(x, NewStates)), None)
        layer = getattr(source, "layer", None)
        for result in _flat((out,)):
            if isinstance(result, NewStates) and layer is not None:
                result.layer = layer
        return out


def _flat(values: Any) -> list[Any]:
    """The values, those in lists and tuples among them."""
    flat: list[Any] = []
    for value in values:
        flat.extend(_flat(value) if isinstance(value, list | tuple) else [value])
    return flat
