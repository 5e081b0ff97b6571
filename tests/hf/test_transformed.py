"""What a model makes of its cached tokens before it attends, token by token, is paged as it comes out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DiffLlamaConfig,
    DogeConfig,
    DynamicCache,
    Glm4MoeLiteConfig,
    JetMoeConfig,
)

from hf.tiny_models import VOCABULARY, pad_left, teacher_forced, tokens
from questkv import QuestCache, QuestConfig, attach
from questkv.errors import CacheMismatchError, UnsupportedError

EVERYTHING = QuestConfig(token_budget=1.0, page_size=4)
SPARSE = QuestConfig(token_budget=16, page_size=4, sink_tokens=4, recent_tokens=4, dense_layers=0)
_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def latent_config() -> Any:
    """Multi-head latent attention whose keys and values are of one width, as GLM-4.7-Flash has it."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    latents = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return Glm4MoeLiteConfig(**_SIZES, **heads, **latents, **experts)


def repeating_config() -> Any:
    """Heads that are repeated after the cache."""
    heads = {"num_key_value_heads": 2, "kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    return JetMoeConfig(**_SIZES, **heads)


def build(config: Any, attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((got - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize("config", [latent_config, repeating_config])
def test_it_generates_as_transformers_does(config: Any) -> None:
    model = build(config())
    ids, mask = pad_left([tokens(40), tokens(29, seed=1)])
    settings = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, **settings)
    with attach(model, EVERYTHING) as attached:
        assert torch.equal(model.generate(ids, **settings), expected)
        assert attached.cache.report().tokens == (47, 36)
    with attach(model, SPARSE) as attached:
        model.generate(ids, **settings)
        assert attached.cache.report().share_read < 0.6


@pytest.mark.parametrize("config", [latent_config, repeating_config])
def test_it_may_be_read_in_pieces(config: Any) -> None:
    model, ids = build(config()), tokens(2, 50)
    with torch.no_grad():
        expected = model(ids).logits
    with attach(model):
        got = teacher_forced(model, ids, QuestCache(model.config, EVERYTHING), [20, 1, 1, 7, 21])
    assert close(got, expected)


def test_pages_hold_latents_expanded() -> None:
    model, ids = build(latent_config()), tokens(1, 30)
    cache, latents = QuestCache(model.config, EVERYTHING), DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, cache=latents)
        with attach(model):
            model(ids, cache=cache)
        for number, layer in enumerate(latents.layers):
            expected = model.model.layers[number].self_attn.expand_kv(layer.keys, layer.values)
            for got, states in zip(cache.keys_values(number), expected, strict=True):
                assert close(got, states[0])


def test_several_values_a_key_are_refused() -> None:
    model = build(DiffLlamaConfig(**_SIZES, num_attention_heads=4, num_key_value_heads=2))
    with attach(model), pytest.raises(UnsupportedError, match=r"\[questkv\] values: expected those that were cached"):
        model(tokens(1, 9))


def test_a_model_that_computes_with_all_it_has_cached_is_refused() -> None:
    model = build(DogeConfig(**_SIZES, num_attention_heads=4, num_key_value_heads=2))
    with attach(model), pytest.raises(UnsupportedError, match=r"the model's own computation \(softplus\)"):
        model(tokens(1, 9))


def test_another_attention_function_is_told_so() -> None:
    model = build(latent_config())
    with pytest.raises(CacheMismatchError, match=r"set_attn_implementation\('questkv'\)"), torch.no_grad():
        model(tokens(1, 9), cache=QuestCache(model.config))
