"""Models that run fewer layers than their config promises: a forward is complete without them, or an error says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MllamaForCausalLM
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

from hf.tiny_models import build, tokens
from questkv import QuestCache, QuestConfig, attach
from questkv.errors import CacheMismatchError

FULL = QuestConfig(token_budget=1.0)


def greedy(model: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    out: torch.Tensor = model.generate(ids, max_new_tokens=5, do_sample=False, **kwargs)
    return out


def pruned(attention: str, kept: slice) -> Any:
    model = build("llama", attention)
    model.model.layers = model.model.layers[kept]
    return model


def skipping(attention: str, layer: int) -> Any:
    """A model whose forward passes a layer by, as no config says."""
    model = build("llama", attention)
    model.model.layers[layer].forward = lambda hidden_states, *args, **kwargs: hidden_states
    return model


def tiny_mllama(attention: str) -> Any:
    config = MllamaTextConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        cross_attention_layers=[1, 3],
        max_position_embeddings=512,
        initializer_range=0.25,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    config._attn_implementation = attention
    torch.manual_seed(0)
    model = MllamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("kept", [slice(0, 1), slice(0, 2), slice(1, None), slice(1, 2)])
def test_a_pruned_model_gives_sdpas_tokens(kept: slice) -> None:
    ids = tokens(2, 40)
    expected = greedy(pruned("sdpa", kept), ids)
    attached_model = pruned("sdpa", kept)
    with attach(attached_model, FULL) as attached:
        assert torch.equal(greedy(attached_model, ids), expected)
        assert attached.cache is not None
        assert attached.cache.report().tokens == (44, 44)
    model = pruned("questkv", kept)
    cache = QuestCache(model.config, FULL)
    assert torch.equal(greedy(model, ids, cache=cache), expected)
    assert cache.report().tokens == (44, 44)


def test_a_pruned_model_that_is_called_without_a_mask_keeps_every_token() -> None:
    ids = tokens(2, 40)
    model, cache = pruned("questkv", slice(0, 2)), None
    whole = pruned("sdpa", slice(0, 2))(ids).logits
    cache = QuestCache(model.config, FULL)
    with torch.no_grad():
        logits = torch.cat([model(part, cache=cache).logits for part in ids.split([30, 1, 9], dim=1)], dim=1)
    assert torch.allclose(logits, whole, atol=1e-4)
    assert cache.report().tokens == (40, 40)


def test_llama_vision_without_an_image_gives_sdpas_tokens() -> None:
    ids = tokens(2, 40)
    expected = greedy(tiny_mllama("sdpa"), ids)
    model = tiny_mllama("sdpa")
    with attach(model, FULL) as attached:
        assert torch.equal(greedy(model, ids), expected)
        assert attached.cache is not None
        assert attached.cache.report().tokens == (44, 44)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_model_that_passes_a_layer_by_gives_sdpas_tokens_when_attached(layer: int) -> None:
    ids = tokens(2, 40)
    expected = greedy(skipping("sdpa", layer), ids)
    model = skipping("sdpa", layer)
    with attach(model, FULL) as attached:
        assert torch.equal(greedy(model, ids), expected)
        assert attached.cache is not None
        assert attached.cache.report().tokens == (44, 44)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_without_attach_a_layer_that_is_passed_by_is_an_error_before_a_wrong_logit(layer: int) -> None:
    model = skipping("questkv", layer)
    cache, ids = QuestCache(model.config, FULL), tokens(1, 20)
    with torch.no_grad():
        model(ids, cache=cache)
        with pytest.raises(CacheMismatchError, match=rf"expected the layers {layer} .* inside questkv.attach\(model\)"):
            model(ids[:, :1], cache=cache)


def test_a_second_cache_of_a_model_that_passes_a_layer_by_is_right_without_attach() -> None:
    """The first forward had the model watched, so the second cache's first forward is known to have returned."""
    model, whole, ids = skipping("questkv", 1), skipping("sdpa", 1), tokens(1, 40)
    with torch.no_grad():
        model(ids, cache=QuestCache(model.config, FULL))
        cache = QuestCache(model.config, FULL)
        logits = torch.cat([model(part, cache=cache).logits for part in ids.split([30, 1, 9], dim=1)], dim=1)
        assert torch.allclose(logits, whole(ids).logits, atol=1e-4)


def test_calls_of_forward_itself_are_an_error_when_two_end_alike() -> None:
    """Hooks don't run there, so nothing tells a skipped layer from an exception."""
    model = skipping("questkv", 2)
    cache, ids = QuestCache(model.config, FULL), tokens(1, 20)
    with torch.no_grad():
        model.forward(ids, cache=cache)
        model.forward(ids[:, :1], cache=cache)
        with pytest.raises(CacheMismatchError, match="expected the layers 2 of the model's config to attend"):
            model.forward(ids[:, :1], cache=cache)
    assert cache.report().tokens in ((), (0,))


@pytest.mark.parametrize("first", [True, False])
def test_a_layer_that_lacks_tokens_is_refused(first: bool) -> None:
    """It was left out of the first forward, or of a later one."""
    model, ids = build("llama", "sdpa"), tokens(1, 20)
    layer = model.model.layers[1]
    run = layer.forward
    with attach(model, FULL) as attached, torch.no_grad():
        cache = attached.new_cache()
        if not first:
            model(ids, cache=cache)
        layer.forward = lambda hidden_states, *args, **kwargs: hidden_states
        model(ids, cache=cache)
        layer.forward = run
        with pytest.raises(CacheMismatchError, match="layer 1: expected it in every forward"):
            model(ids, cache=cache)
        if not first:
            with pytest.raises(CacheMismatchError, match="expected a paged layer that holds tokens, got 1"):
                cache.keys_values(1)


def test_a_forward_that_writes_nothing_is_an_error() -> None:
    model = build("llama", "sdpa")
    for layer in model.model.layers:
        layer.forward = lambda hidden_states, *args, **kwargs: hidden_states
    with attach(model, FULL), torch.no_grad(), pytest.raises(CacheMismatchError, match="returned without writing any"):
        model(tokens(1, 20))


def test_a_layer_that_runs_twice_in_a_forward_is_refused() -> None:
    model = build("llama", "sdpa")
    run = model.model.layers[0].forward
    model.model.layers[0].forward = lambda hidden, *args, **kwargs: run(run(hidden, *args, **kwargs), *args, **kwargs)
    with attach(model, FULL), torch.no_grad(), pytest.raises(CacheMismatchError, match="every layer once in a forward"):
        model(tokens(1, 20))


def test_a_mask_longer_than_what_is_known_is_refused_not_cut() -> None:
    model, ids = build("llama", "questkv"), tokens(1, 20)
    cache = QuestCache(model.config, FULL)
    with torch.no_grad():
        model(ids, cache=cache)
        with pytest.raises(CacheMismatchError, match="attention_mask: expected 21 columns"):
            model(ids[:, :1], attention_mask=torch.ones(1, 30, dtype=torch.long), cache=cache)
