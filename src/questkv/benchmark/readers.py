"""Reading a whole prompt, by a model of transformers with one of two caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from transformers import DynamicCache

from questkv.config import QuestConfig
from questkv.hf import QuestCache
from questkv.hf.prefill import prefill


class Reader(Protocol):
    """Something that reads a prompt from its first token on.

    Attributes:
        name: As in a row.
    """

    name: str

    def read(self, ids: Sequence[int]) -> torch.Tensor:
        """Read a prompt and forget what was read before; returns the next token's logits, [vocabulary]."""


class ModelReader:
    """A model of transformers, with a fresh cache for every prompt.

    Args:
        name: As in a row.
        model: A causal language model; several readers may share it.
        attention: Its attention implementation here.
        new_cache: Makes its cache here.
        chunk: Tokens a forward; None for one forward over all.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        attention: str,
        new_cache: Callable[[], Any],
        *,
        chunk: int | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.attention = attention
        self.new_cache = new_cache
        self.chunk = chunk

    def read(self, ids: Sequence[int]) -> torch.Tensor:
        """Read a prompt and forget what was read before; returns the next token's logits, [vocabulary]."""
        self.model.set_attn_implementation(self.attention)  # another reader may have changed it
        tokens = torch.tensor([list(ids)], device=self.model.device)
        return prefill(self.model, self.new_cache(), tokens, chunk_tokens=self.chunk or len(ids))[0]


def quest_reader(name: str, model: Any, config: QuestConfig, chunk: int) -> ModelReader:
    """Ours, as `questkv ask` reads a document: in chunks, into pages."""
    return ModelReader(name, model, "questkv", lambda: QuestCache(model.config, config), chunk=chunk)


def sdpa_reader(name: str, model: Any) -> ModelReader:
    """Transformers' default: one forward with its own cache, as its `generate` reads a prompt."""
    return ModelReader(name, model, "sdpa", lambda: DynamicCache(config=model.config))
