"""A forward without a cache under the ``questkv`` attention, as ``use_cache=False`` asks for."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from questkv.hf.attention import mark_own_layer


class NoCache(DynamicCache):
    """Goes through one forward in a cache's place, so that its attention is plain causal attention.

    Attention layers keep nothing in it; layers of other kinds keep what they need within the forward.

    Args:
        model_config: The model's config.
    """

    def __init__(self, model_config: PreTrainedConfig) -> None:
        super().__init__(config=model_config)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new keys and values themselves: in a forward without a cache they are all there are."""
        keys, values = key_states, value_states
        if type(self.layers[layer_idx]) not in (DynamicLayer, DynamicSlidingWindowLayer):
            keys, values = super().update(keys, values, layer_idx, *args, **kwargs)
        mark_own_layer(keys)
        return keys, values


def without_cache(out: Any, cache: NoCache) -> Any:
    """What a forward returns, without the cache that it was given for its duration."""
    if isinstance(out, tuple):
        return tuple(part for part in out if part is not cache)
    for name in [name for name, part in out.items() if part is cache]:
        out[name] = None
    return out
