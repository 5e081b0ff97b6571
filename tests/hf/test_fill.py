"""Filling a cache with keys and values that were computed elsewhere: it is then as if it had been prefilled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf.tiny_models import build, tokens
from questkv import QuestCache, QuestConfig
from questkv.errors import UnsupportedError

CONFIG = QuestConfig(token_budget=48, page_size=8, sink_tokens=8, recent_tokens=8, dense_layers=1)


def prefilled(name: str, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of every layer, from transformers' own cache and attention."""
    model = build(name, "sdpa")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, cache=cache)
    return [(layer.keys, layer.values) for layer in cache.layers]


def decode(model: Any, cache: QuestCache, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack([model(ids[:, i : i + 1], cache=cache).logits[:, -1] for i in range(ids.shape[1])])


@pytest.mark.parametrize("name", ["llama", "llama-mixed"])
@pytest.mark.parametrize("kv_dtype", ["model", "int8"])
def test_a_filled_cache_holds_and_decodes_what_one_does_that_was_written_in_steps(name: str, kv_dtype: str) -> None:
    ids, more = tokens(2, 101), tokens(2, 20, seed=1)
    layers = prefilled(name, ids)
    config = QuestConfig(**{**CONFIG.to_dict(), "kv_dtype": kv_dtype})
    model = build(name, "questkv")
    at_once, in_two = QuestCache(model.config, config), QuestCache(model.config, config)
    at_once.fill(layers)
    in_two.fill([(keys[:, :, :43], values[:, :, :43]) for keys, values in layers])
    in_two.fill([(keys[:, :, 43:], values[:, :, 43:]) for keys, values in layers])
    assert at_once.get_seq_length() == in_two.get_seq_length() == 101
    if kv_dtype == "model":
        for layer, (keys, values) in enumerate(layers):
            held = at_once.keys_values(layer, 1)
            assert torch.equal(held[0], keys[1])
            assert torch.equal(held[1], values[1])
    first = decode(model, at_once, more)
    assert torch.equal(first, decode(model, in_two, more))
    report = at_once.report()
    assert report.pages_read < report.pages_held


def test_a_filled_cache_decodes_as_a_prefilled_one() -> None:
    ids, more = tokens(1, 90), tokens(1, 12, seed=1)
    model = build("llama", "questkv")
    own, filled = QuestCache(model.config, CONFIG), QuestCache(model.config, CONFIG)
    with torch.no_grad():
        model(ids, cache=own)
    filled.fill([own_layer(own, layer) for layer in range(3)])
    assert torch.equal(decode(model, own, more), decode(model, filled, more))


def own_layer(cache: QuestCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[1, Hkv, L, D] keys and values that a paged layer holds."""
    keys, values = cache.keys_values(layer)
    return keys[None].clone(), values[None].clone()


def test_what_does_not_fit_is_refused_and_leaves_the_cache_as_it_was() -> None:
    layers = prefilled("llama", tokens(1, 30))
    cache = QuestCache(build("llama", "questkv").config, CONFIG)
    cache.fill(layers)
    with pytest.raises(ValueError, match=r"\[fill\] keys_values: expected 3 pairs, got 2"):
        cache.fill(layers[:2])
    with pytest.raises(ValueError, match=r"\[fill\] keys_values: expected one B and n in all layers"):
        cache.fill([*layers[:2], (layers[2][0][:, :, :-1], layers[2][1][:, :, :-1])])
    assert cache.get_seq_length() == 30
    assert torch.equal(cache.keys_values(2)[0], layers[2][0][0])


def test_models_with_layers_of_another_kind_are_refused() -> None:
    cache = QuestCache(build("gemma3", "questkv").config, QuestConfig(token_budget=1.0))
    with pytest.raises(UnsupportedError, match="expected a model whose layers are all paged, got 4 of another kind"):
        cache.fill([])
