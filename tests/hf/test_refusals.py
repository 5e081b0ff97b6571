"""What questkv doesn't do is refused with an error that says what to do, never answered wrongly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, StaticCache

from hf.tiny_models import build, pair, teacher_forced, tokens
from questkv import QuestCache, QuestConfig
from questkv.errors import CacheMismatchError, PoolFullError, UnsupportedError
from questkv.hf.attention import questkv_attention

SMALL = QuestConfig(token_budget=16, page_size=4, sink_tokens=4, recent_tokens=4, dense_layers=0)


def forward(model: Any, ids: torch.Tensor, **kwargs: Any) -> Any:
    with torch.no_grad():
        return model(ids, **kwargs)


@pytest.mark.parametrize("name", ["llama", "llama-mha", "gemma3", "gemma2"])
@pytest.mark.parametrize("kind", ["dynamic", "static", "none", "default"])
def test_the_attention_function_refuses_another_cache(name: str, kind: str) -> None:
    model = pair(name).quest
    kwargs = {
        "dynamic": lambda: {"cache": DynamicCache(config=model.config)},
        "static": lambda: {"cache": StaticCache(config=model.config, max_cache_len=64)},
        "none": lambda: {"use_cache": False},
        "default": dict,
    }[kind]()
    with pytest.raises(CacheMismatchError, match=r"expected a QuestCache.*cache=QuestCache.*attach"):
        forward(model, tokens(1, 9), **kwargs)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "llama-mha", "gemma3"])
def test_the_cache_refuses_another_attention_function(name: str, attention: str) -> None:
    model = build(name, "sdpa")
    model.set_attn_implementation(attention)
    cache = QuestCache(model.config, SMALL)
    with pytest.raises(CacheMismatchError, match=r"set_attn_implementation\('questkv'\).*attach"):
        forward(model, tokens(1, 9), cache=cache)


def test_a_mask_of_numbers_is_refused() -> None:
    models = pair("llama")
    mask = torch.zeros(1, 1, 9, 9)
    with pytest.raises(UnsupportedError, match=r"2-D padding mask, or bool.*got torch.float32 \[1, 1, 9, 9\]"):
        forward(models.quest, tokens(1, 9), attention_mask=mask, cache=models.cache(SMALL))


def test_a_mask_that_is_no_mask_of_all_columns_is_refused() -> None:
    models, cache = pair("llama"), pair("llama").cache(SMALL)
    forward(models.quest, tokens(2, 9), cache=cache)
    with pytest.raises(CacheMismatchError, match=r"expected 10 columns \(cached and new tokens\), got 4"):
        forward(models.quest, tokens(2, 1), attention_mask=torch.ones(2, 4, dtype=torch.long), cache=cache)
    assert cache.report().tokens == (9, 9)


@pytest.mark.parametrize("was", ["padded", "full"])
def test_a_changed_mask_of_cached_tokens_is_refused(was: str) -> None:
    models, cache = pair("llama"), pair("llama").cache(SMALL)
    mask = torch.ones(2, 9, dtype=torch.long)
    if was == "padded":
        mask[0, :3] = 0
    forward(models.quest, tokens(2, 9), attention_mask=mask, cache=cache)
    before = cache.report()
    mask[0, :3] = 1 - mask[0, :3]
    mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
    with pytest.raises(UnsupportedError, match="cached tokens' mask unchanged"):
        forward(models.quest, tokens(2, 1), attention_mask=mask, cache=cache)
    assert cache.report() == before


def test_a_model_in_training_is_refused() -> None:
    model = build("llama", "questkv").train()
    with pytest.raises(UnsupportedError, match=r"eval mode.*model.eval\(\)"):
        forward(model, tokens(1, 9), cache=QuestCache(model.config, SMALL))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_attention_weights_are_refused(name: str) -> None:
    models = pair(name)
    with pytest.raises((UnsupportedError, ValueError), match="output_attentions"):
        forward(models.quest, tokens(1, 9), output_attentions=True, cache=models.cache(SMALL))


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "causal"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
    ],
)
def test_options_that_would_change_the_result_are_refused(kwargs: dict[str, Any], said: str) -> None:
    cache = QuestCache(LlamaConfig(num_hidden_layers=1), SMALL)
    states = torch.zeros(1, 2, 3, 4)
    keys, values = cache.update(states, states, 0)
    with pytest.raises(UnsupportedError, match=said):
        questkv_attention(torch.nn.Module().eval(), states, keys, values, None, **kwargs)


def test_another_batch_size_is_refused() -> None:
    models, cache = pair("llama"), pair("llama").cache(SMALL)
    forward(models.quest, tokens(2, 9), cache=cache)
    with pytest.raises(CacheMismatchError, match=r"expected 2 sequences.*got 3.*cache.reset\(\)"):
        forward(models.quest, tokens(3, 1), cache=cache)
    assert cache.report().tokens == (9, 9)


def test_another_dtype_is_refused() -> None:
    models, cache = pair("llama"), pair("llama").cache(SMALL)
    forward(models.quest, tokens(2, 9), cache=cache)
    with pytest.raises(CacheMismatchError, match=r"dtype.*use a new cache"):
        forward(build("llama", "questkv").half(), tokens(2, 1), cache=cache)


@pytest.mark.parametrize("config", [{"token_budget": 16}, 2048, "int8"])
def test_a_configuration_of_another_type_is_refused(config: Any) -> None:
    with pytest.raises(TypeError, match=f"expected a QuestConfig, got {type(config).__name__}"):
        QuestCache(LlamaConfig(), config)


def test_a_limit_below_one_page_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_tokens: expected at least one page \(4\), got 3"):
        QuestCache(LlamaConfig(), SMALL, max_tokens=3)


def test_a_model_without_full_attention_is_refused() -> None:
    model = build("mistral-window", "sdpa")
    with pytest.raises(UnsupportedError, match="got mistral, whose layers have sliding windows only"):
        QuestCache(model.config, SMALL)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("crop", (-1,)),
        ("reset", ()),
        ("reorder_cache", (torch.tensor([0]),)),
        ("batch_repeat_interleave", (2,)),
        ("batch_select_indices", (torch.tensor([0]),)),
    ],
)
def test_a_layer_refuses_what_concerns_the_whole_cache(call: str, arguments: tuple[Any, ...]) -> None:
    cache = pair("llama").cache(SMALL)
    with pytest.raises(UnsupportedError, match=f"layer 1: expected the call on the cache: cache.{call}"):
        getattr(cache.layers[1], call)(*arguments)


def test_offloading_is_refused() -> None:
    cache = pair("llama").cache(SMALL)
    for call in (lambda: cache.offload(0), cache.layers[0].offload, cache.layers[0].prefetch):
        with pytest.raises(UnsupportedError, match="offloading"):
            call()


def test_values_of_another_width_are_refused() -> None:
    cache = QuestCache(LlamaConfig(num_hidden_layers=1), SMALL)
    states = torch.zeros(1, 2, 3, 4)
    keys, values = cache.update(states, states[..., :2], 0)
    with pytest.raises(UnsupportedError, match="head dim 4, got 2"):
        questkv_attention(torch.nn.Module().eval(), states, keys, values, None)


def test_a_handle_answers_its_shape_and_refuses_to_compute() -> None:
    cache = QuestCache(LlamaConfig(num_hidden_layers=1), SMALL)
    states = torch.zeros(1, 2, 3, 4, dtype=torch.bfloat16)
    handle, _ = cache.update(states, states, 0)
    assert (handle.shape, handle.dtype, handle.device) == ((1, 2, 3, 4), torch.bfloat16, states.device)
    for compute in (lambda: handle + 1, lambda: handle[0] * 2, lambda: handle.sum(), lambda: states @ handle):
        with pytest.raises(CacheMismatchError, match="'questkv' attention function"):
            compute()


@pytest.mark.parametrize("name", ["llama", "llama-mixed"])
def test_a_full_pool_leaves_the_cache_as_it_was_in_the_middle_of_generation(name: str) -> None:
    models, ids = pair(name), tokens(1, 30)
    cache = models.cache(SMALL, max_tokens=40)
    with pytest.raises(PoolFullError, match="limited to 40 tokens"):
        models.quest.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, cache=cache)
    report = cache.report()
    assert (cache.get_seq_length(), report.tokens) == (40, (40,))
    with pytest.raises(PoolFullError):
        forward(models.quest, tokens(1, 1), cache=cache)
    assert cache.report() == report
    # Still usable: cropped back to the prompt it continues as a fresh one does.
    cache.crop(-10)
    fresh = models.cache(SMALL)
    forward(models.quest, ids, cache=fresh)
    after = tokens(1, 10, seed=3)
    got = teacher_forced(models.quest, after, cache, [1] * 10)
    expected = teacher_forced(models.quest, after, fresh, [1] * 10)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", ["llama", "llama-mixed"])
def test_a_prompt_that_does_not_fit_leaves_the_cache_empty_and_usable(name: str) -> None:
    models = pair(name)
    cache = models.cache(SMALL, max_tokens=40)
    with pytest.raises(PoolFullError, match="40 more fit"):
        forward(models.quest, tokens(2, 30), cache=cache)
    assert cache.get_seq_length() == 0
    assert sum(cache.report().tokens) == 0
    forward(models.quest, tokens(1, 30), cache=cache)
    assert cache.report().tokens == (30,)
