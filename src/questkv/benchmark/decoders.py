"""Decoding one token at a time, by a model of transformers on one of two caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers import DynamicCache

from questkv.config import QuestConfig
from questkv.hf import QuestCache
from questkv.hf.compile.graph import compiled_step
from questkv.hf.prefill import cache_argument


class Decoder(Protocol):
    """Something that decodes behind a context.

    Attributes:
        name: As in a row.
    """

    name: str

    def prepare(self) -> None:
        """What comes before a step and isn't part of it."""

    def step(self, token: int) -> torch.Tensor:
        """Take in a token; returns the next one's logits, [vocabulary]."""


class ModelDecoder:
    """A model of transformers and its cache.

    Args:
        name: As in a row.
        model: A causal language model; several decoders may share it.
        attention: Its attention implementation here.
        cache: Its cache here.
        compiled: Whether its steps run as one graph of torch.compile, as with ``attach(compile=True)``.
    """

    def __init__(self, name: str, model: Any, attention: str, cache: Any, *, compiled: bool = False) -> None:
        self.name = name
        self.model = model
        self.attention = attention
        self.cache = cache
        self._argument = cache_argument(model)
        self._run = compiled_step(model) if compiled else None

    def prepare(self) -> None:
        """Give the model the attention that reads this cache: another decoder may have changed it."""
        self.model.set_attn_implementation(self.attention)

    def step(self, token: int) -> torch.Tensor:
        """Take in a token; returns the next one's logits, [vocabulary]."""
        ids = torch.tensor([[token]], device=self.model.device)
        arguments = {"input_ids": ids, "use_cache": True, self._argument: self.cache}
        out = self.model(**arguments) if self._run is None else self._run(self.model, arguments)
        logits: torch.Tensor = out.logits
        return logits[0, -1]


def quest_cache(model: Any, config: QuestConfig, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> QuestCache:
    """A paged cache that holds given keys and values [1, Hkv, n, D], one pair a layer."""
    cache = QuestCache(model.config, config)
    cache.fill(layers)
    return cache


def dynamic_cache(model: Any, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Transformers' own cache with copies of given keys and values [1, Hkv, n, D], one pair a layer."""
    cache: Any = DynamicCache(config=model.config)
    for index, (keys, values) in enumerate(layers):
        cache.update(keys, values, index)
    return cache
