"""A prompt, prefilled once and shared by every method and budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from questkv.config import QuestConfig
from questkv.errors import UnsupportedError
from questkv.hf.cache import QuestCache
from questkv.hf.prefill import CHUNK_TOKENS, prefill
from questkv.policies.statistics import Statistics, StatisticsCollector


@dataclass(frozen=True, eq=False)
class Context:
    """A prompt after dense prefill.

    Attributes:
        cache: The prompt's tokens, read densely. `Policy.decode_cache` continues it without changing it.
        model_config: The model's config.
        ids: [1, n] int64, the prompt.
        statistics: What the prompt's attention looked like, by paged layer; empty if it wasn't observed.
    """

    cache: QuestCache
    model_config: PreTrainedConfig
    ids: torch.Tensor
    statistics: Mapping[int, Statistics]

    @property
    def length(self) -> int:
        """n, tokens of the prompt."""
        return self.ids.shape[1]

    @property
    def paged_layers(self) -> tuple[int, ...]:
        """The model's full-attention layers: those that a method acts on, unless they are dense."""
        return tuple(self.cache.state.paged_layers)


def prefill_context(
    model: Any,
    ids: torch.Tensor,
    config: QuestConfig,
    *,
    observe: bool = True,
    chunk_tokens: int = CHUNK_TOKENS,
    on_progress: Callable[[int], None] | None = None,
) -> Context:
    """Prefill a prompt densely, with the attention statistics that the eviction methods start from.

    Args:
        model: A causal language model of transformers whose attention is ``questkv``.
        ids: [1, n] int64, n >= 1, without padding.
        config: Its page size, box and KV dtype are the context's, and so those of every `quest` policy on it; its
            budget plays no part.
        observe: Gather `Context.statistics`; needed by the policies that say `observes`.
        chunk_tokens: Tokens a forward; the result doesn't depend on it, but for rounding.
        on_progress: Called after each forward with the tokens done so far.

    Raises:
        UnsupportedError: More than one sequence.
        ValueError: No token.
    """
    if ids.ndim != 2 or ids.shape[0] != 1:
        raise UnsupportedError(f"[prefill_context] ids: expected one sequence [1, n], got {list(ids.shape)}")
    if not ids.shape[1]:
        raise ValueError("[prefill_context] ids: expected at least one token, got none")
    # A whole budget and no sparse runs: dense whatever the length of a chunk.
    cache = QuestCache(model.config, replace(config, token_budget=1.0, sparse_prefill=0))
    collector = StatisticsCollector(cache, ids.shape[1])
    with cache.observe(collector) if observe else nullcontext():
        prefill(model, cache, ids.to(model.device), chunk_tokens=chunk_tokens, on_progress=on_progress)
    return Context(cache, model.config, ids, collector.statistics)
