"""`prefill`: a prompt in chunks leaves what one forward leaves, whatever the cache's configuration."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from hf.tiny_models import build, tokens
from questkv import QuestCache, QuestConfig
from questkv.hf.prefill import prefill


@pytest.mark.parametrize("length", [64, 65, 70, 79, 80, 128, 140])
def test_no_chunk_of_a_prompt_is_decoded_sparsely(length: int) -> None:
    model, ids = build("llama", "questkv"), tokens(1, length)
    sparse = QuestConfig(
        token_budget=12, page_size=4, sink_tokens=4, recent_tokens=4, dense_layers=0, sparse_prefill=16
    )
    cache = QuestCache(model.config, sparse)
    got = prefill(model, cache, ids, chunk_tokens=64)
    assert cache.report().pages_held == 0  # what decode steps would have counted
    assert cache.report().tokens == (length,)
    with torch.no_grad():
        single = build("llama", "sdpa")(ids).logits[:, -1].double()
        expected = build("llama", "sdpa").double()(ids).logits[:, -1]
    assert (got - expected).abs().max() <= 4 * (single - expected).abs().max()
    # A question behind it, as short as that, is.
    prefill(model, cache, tokens(1, 16, seed=1), chunk_tokens=64)
    assert cache.report().share_read < 1


def test_another_cache_is_filled_whatever_the_config_says_of_use_cache() -> None:
    model, ids = build("llama", "sdpa", use_cache=False), tokens(1, 70)
    model.generation_config.use_cache = False
    cache = DynamicCache(config=model.config)
    prefill(model, cache, ids, chunk_tokens=32)
    assert cache.get_seq_length() == 70
