"""Layers that attend and keep a recurrent state besides: the attention's part is paged, the state goes along."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, FalconH1Config, Zamba2Config

from hf.tiny_models import VOCABULARY, pad_left, teacher_forced, tokens
from questkv import QuestCache, QuestConfig, attach
from questkv.hf.hybrid_layer import PagedHybridLayer

EVERYTHING = QuestConfig(token_budget=1.0, page_size=4)
SPARSE = QuestConfig(token_budget=16, page_size=4, sink_tokens=4, recent_tokens=4, dense_layers=0)
_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
_CONFIGS = {
    "falcon-h1": FalconH1Config(
        **_SIZES,
        num_hidden_layers=2,
        num_key_value_heads=2,
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_chunk_size=16,
    ),
    "zamba2": Zamba2Config(
        **_SIZES,
        num_hidden_layers=4,
        layers_block_type=["linear_attention", "hybrid"] * 2,
        n_mamba_heads=4,
        mamba_d_state=8,
        chunk_size=16,
        adapter_rank=4,
    ),
}


def build(name: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(_CONFIGS[name]), attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((got - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize("name", _CONFIGS)
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}])
def test_it_generates_as_transformers_does(name: str, how: dict[str, Any]) -> None:
    model = build(name)
    ids, mask = pad_left([tokens(40), tokens(29, seed=1)])
    settings = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False} | how
    torch.manual_seed(1)
    expected = model.generate(ids, **settings)
    with attach(model, EVERYTHING) as attached:
        torch.manual_seed(1)
        assert torch.equal(model.generate(ids, **settings), expected)
        assert set(attached.cache.report().tokens) == {47, 36}
    with attach(model, SPARSE) as attached:
        model.generate(ids, **settings)
        assert attached.cache.report().share_read < 0.6


@pytest.mark.parametrize("name", _CONFIGS)
def test_every_layer_that_attends_is_paged(name: str) -> None:
    model = build(name)
    cache = QuestCache(model.config, EVERYTHING)
    paged = [layer for layer in cache.layers if isinstance(layer, PagedHybridLayer)]
    assert len(paged) == 2
    assert len(cache.report().layers) == 2
    with attach(model), torch.no_grad():
        model(tokens(1, 10), cache=cache)
    assert all(bool(layer.recurrent_states[0].any()) and bool(layer.conv_states[0].any()) for layer in paged)
    cache.reset()
    assert cache.report().tokens == ()
    assert not any(layer.has_previous_state[0] for layer in paged)


@pytest.mark.parametrize("name", _CONFIGS)
def test_a_fork_goes_its_own_way(name: str) -> None:
    model = build(name)
    ways = torch.cat([tokens(1, 30).expand(2, -1), tokens(2, 6, seed=3)], dim=1)
    # One step at a time in both: Zamba2's whole forward is another computation in transformers too.
    steps = [30, *[1] * 6]
    expected = [teacher_forced(model, way[None], DynamicCache(config=model.config), steps) for way in ways]
    with attach(model), torch.no_grad():
        cache = QuestCache(model.config, EVERYTHING)
        model(ways[:1, :30], cache=cache)
        caches = [cache, copy.deepcopy(cache)]
        got: list[list[torch.Tensor]] = [[], []]
        for step in range(30, 36):  # by turns, so that what one writes would show in the other
            for i in (0, 1):
                got[i].append(model(ways[i : i + 1, step : step + 1], cache=caches[i]).logits)
    for i in (0, 1):
        assert close(torch.cat(got[i], dim=1), expected[i][:, 30:])
