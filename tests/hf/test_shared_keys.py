"""Layers that read an earlier layer's keys (Gemma 4), asked for all new tokens or for the last ones only."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from hf.tiny_models import pad_left, tokens
from questkv import QuestCache, QuestConfig, attach

FULL = QuestConfig(token_budget=1.0)
SMALL = QuestConfig(token_budget=16, page_size=4, sink_tokens=4, recent_tokens=4, dense_layers=0)


@lru_cache
def gemma4(attention: str, shared: int) -> Any:
    config = Gemma4TextConfig(
        vocab_size=97,
        vocab_size_per_layer_input=97,
        hidden_size=48,
        hidden_size_per_layer_input=8,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=8,
        num_kv_shared_layers=shared,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"] * 3,
        max_position_embeddings=512,
        initializer_range=0.25,
        pad_token_id=0,
    )
    config._attn_implementation = attention
    torch.manual_seed(0)
    model = Gemma4ForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("shared", [0, 2, 4])
def test_generate_gives_sdpas_tokens(shared: int) -> None:
    """`generate` asks for the last token's logits only, so the shared layers get one query a sequence."""
    ids, mask = pad_left([tokens(40), tokens(23, seed=1)])
    arguments = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    expected = gemma4("sdpa", shared).generate(ids, **arguments)
    model = gemma4("questkv", shared)
    got = model.generate(ids, cache=QuestCache(model.config, FULL), **arguments)
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "config", [FULL, SMALL, QuestConfig(token_budget=16, page_size=4, sink_tokens=4, recent_tokens=4, kv_dtype="int8")]
)
@pytest.mark.parametrize("new", [1, 5, 70])
@pytest.mark.parametrize("kept", [1, 3])
def test_the_last_logits_are_those_of_all(config: QuestConfig, new: int, kept: int) -> None:
    """The same forward with all its queries: dense blocks and rows, behind an empty and a filled cache."""
    model, rows = gemma4("questkv", 4), [tokens(30 + new), tokens(17 + new, seed=1)]
    ids, mask = pad_left(rows)

    def logits(**kwargs: Any) -> torch.Tensor:
        cache, past = QuestCache(model.config, config), ids.shape[1] - new
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            model(ids[:, :past], attention_mask=mask[:, :past], position_ids=positions[:, :past], cache=cache)
            out = model(ids[:, past:], attention_mask=mask, position_ids=positions[:, past:], cache=cache, **kwargs)
        return out.logits[:, -kept:]

    whole, last = logits(), logits(logits_to_keep=kept)
    # The same sums in blocks of another size.
    assert torch.allclose(last, whole[:, -last.shape[1] :], rtol=1e-4, atol=1e-4)
    assert last.shape[1] == min(kept, new)


def test_attached_with_a_small_budget_it_skips_pages() -> None:
    model = gemma4("sdpa", 4)
    with attach(model, SMALL) as attached:
        model.generate(tokens(1, 80), max_new_tokens=6, do_sample=False)
        assert attached.cache is not None
        report = attached.cache.report()
    assert report.tokens == (85,)
    assert 0 < report.pages_read < report.pages_held
