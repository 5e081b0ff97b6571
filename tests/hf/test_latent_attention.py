"""Multi-head latent attention: values narrower than keys, and latents that the model expands behind the cache."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

from hf.tiny_models import Pair, pad_left, teacher_forced, tokens
from questkv import QuestConfig, attach
from questkv.errors import UnsupportedError
from questkv.hf.compile import graph
from questkv.pages import geometry
from questkv.policies import METHODS, decode, make_policy, policy_class, prefill_context

HEADS, KEYS, VALUES, LATENTS = 4, 24, 16, (20, 8)
_SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "q_lora_rank": 12,
    "kv_lora_rank": LATENTS[0],
    "qk_rope_head_dim": LATENTS[1],
    "qk_nope_head_dim": KEYS - LATENTS[1],
    "v_head_dim": VALUES,
}
_EXPERTS = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2": ("DeepseekV2Config", _EXPERTS),
    "deepseek-v3": ("DeepseekV3Config", _EXPERTS),
    "glm4-moe-lite": ("Glm4MoeLiteConfig", _EXPERTS),
    "minicpm3": ("MiniCPM3Config", {}),
}
_PAGES: dict[str, Any] = {"page_size": 3, "sink_tokens": 3, "recent_tokens": 3}
EVERYTHING = QuestConfig(token_budget=1.0, **_PAGES)
FEW = QuestConfig(token_budget=12, dense_layers=0, **_PAGES)


def _build(name: str, attention: str) -> Any:
    config_class, own = _CONFIGS[name]
    config = getattr(transformers, config_class)(**{**_SMALL, **own})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


@lru_cache
def _pair(name: str) -> Pair:
    return Pair(_build(name, "sdpa"), _build(name, "questkv"))


def _generate(model: Any, ids: torch.Tensor, **kwargs: Any) -> list[list[int]]:
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 12} | kwargs
    return model.generate(ids, **settings).tolist()


@pytest.mark.parametrize("name", _CONFIGS)
def test_a_full_budget_gives_the_tokens_of_sdpa(name: str) -> None:
    models = _pair(name)
    ids, mask = pad_left([tokens(23), tokens(9, seed=1)])
    expected = _generate(models.reference, ids, attention_mask=mask)
    cache = models.cache(EVERYTHING)
    assert _generate(models.quest, ids, attention_mask=mask, cache=cache) == expected
    assert cache.report().tokens == (23 + 11, 9 + 11)
    keys, values = cache.keys_values(0, 1)
    assert (keys.shape, values.shape) == ((HEADS, 20, KEYS), (HEADS, 20, VALUES))


@pytest.mark.parametrize("name", _CONFIGS)
def test_logits_are_as_close_to_float64_as_those_of_sdpa(name: str) -> None:
    models, ids, steps = _pair(name), tokens(2, 40), [17, 1, 1, 6, 1, 1, 1, 12]
    exact_model = _build(name, "sdpa")
    if hasattr(exact_model, "set_experts_implementation"):
        exact_model.set_experts_implementation("eager")  # grouped matrix products know no float64
    exact_model = exact_model.double()
    exact = teacher_forced(exact_model, ids, DynamicCache(config=exact_model.config), [40])
    reference = teacher_forced(models.reference, ids, DynamicCache(config=models.reference.config), steps)
    got = teacher_forced(models.quest, ids, models.cache(EVERYTHING), steps)
    own_error = (reference - exact).abs().max()
    # Both compute in float32 in another order: errors of one size.
    assert (got - exact).abs().max() <= 4 * own_error
    assert own_error < 1e-3


@pytest.mark.parametrize("name", _CONFIGS)
def test_attach_gives_the_tokens_of_sdpa_and_leaves_the_model_as_it_was(name: str) -> None:
    model, ids = _pair(name).reference, tokens(1, 23)
    expected = _generate(model, ids)
    with attach(model, EVERYTHING):
        assert _generate(model, ids) == expected
    assert _generate(model, ids) == expected


@pytest.mark.parametrize("name", _CONFIGS)
def test_a_small_budget_skips_pages(name: str) -> None:
    models, ids = _pair(name), tokens(1, 60)
    cache = models.cache(FEW)
    answer = _generate(models.quest, ids, cache=cache)
    assert len(answer[0]) == 72
    report = cache.report()
    # 11 steps of 3 layers, each of 4 pages a head: 12 tokens.
    assert report.pages_read == 11 * 3 * 4 * HEADS
    assert report.pages_read < report.pages_held
    # A token more is a page more only where it fills one up; keys and values of their own widths, and boxes of keys.
    pages = -(-report.tokens[0] // 3)
    assert report.bytes_held == 3 * pages * HEADS * (3 * (KEYS + VALUES) * 4 + 2 * KEYS + 4)


@pytest.mark.parametrize("name", _CONFIGS)
def test_pages_in_eight_bits_are_off_by_half_a_code_and_are_what_attention_reads(name: str) -> None:
    models, ids, steps = _pair(name), tokens(1, 40), [30, *[1] * 10]
    caches = models.cache(EVERYTHING), models.cache(QuestConfig(token_budget=1.0, kv_dtype="int8", **_PAGES))
    plain, coded = (teacher_forced(models.quest, ids, cache, steps) for cache in caches)
    # What the first layer is given depends on no attention. Of the 40 tokens, 39 lie in sealed pages.
    (keys, values), (their_keys, their_values) = (
        tuple(part[:, :39].double().unflatten(1, (13, 3)) for part in cache.keys_values(0)) for cache in caches
    )
    # A box is rounded outward by up to a step of its scale (1 / 127 of the largest key) on either side.
    width = keys.amax(dim=2) - keys.amin(dim=2) + 2 * keys.abs().amax(dim=(2, 3), keepdim=True)[:, :, 0] / 127
    assert bool(((their_keys - keys).abs() <= 1.001 * width[:, :, None] / 510).all())
    spread = values.amax(dim=3, keepdim=True) - values.amin(dim=3, keepdim=True)
    assert bool(((their_values - values).abs() <= 1.001 * spread / 510).all())
    assert not torch.equal(their_values, values)
    # A prompt at the start reads itself as it was; the tokens behind it read codes.
    assert torch.equal(coded[:, :30], plain[:, :30])
    assert not torch.equal(coded[:, 30:], plain[:, 30:])
    assert (coded - plain).norm() < 0.1 * plain.norm()


def test_a_cache_is_filled_with_keys_and_values_and_not_with_latents() -> None:
    models, ids = _pair("minicpm3"), tokens(1, 30)
    filled, theirs = models.cache(EVERYTHING), DynamicCache(config=models.reference.config)
    teacher_forced(models.reference, ids, theirs, [30])
    with pytest.raises(UnsupportedError, match=r"^\[fill\] keys_values: .*, got latents of 20 and 8"):
        filled.fill([(layer.keys, layer.values) for layer in theirs.layers])
    other = models.cache(EVERYTHING)
    whole = teacher_forced(models.quest, ids, other, [29, 1])
    other.crop(-1)
    filled.fill([tuple(part[None] for part in other.keys_values(layer)) for layer in range(3)])
    assert torch.equal(teacher_forced(models.quest, ids[:, 29:], filled, [1]), whole[:, 29:])


@pytest.mark.parametrize("name", ["deepseek-v2", "minicpm3"])
def test_the_compiled_step_gives_the_uncompiled_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    graph._steps.clear()
    models, ids = _pair(name), tokens(1, 30)
    config = QuestConfig(token_budget=1.0, **_PAGES)
    expected = _generate(models.quest, ids, cache=models.cache(config))
    with attach(models.quest, compile=True):
        assert _generate(models.quest, ids, cache=models.cache(config)) == expected
    assert graph._steps
    graph._steps.clear()
    torch._dynamo.reset()


@pytest.mark.parametrize("kv_dtype", ["model", "int8"])
def test_pages_in_host_memory_give_what_pages_on_the_device_give(
    kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(geometry, "_host_without_gpu", True)
    models, ids, steps = _pair("minicpm3"), tokens(1, 50), [40, *[1] * 10]
    config = replace(FEW, kv_dtype=kv_dtype, backend="reference")
    expected = teacher_forced(models.quest, ids, models.cache(config), steps)
    cache = models.cache(replace(config, offload="host"))
    assert torch.equal(teacher_forced(models.quest, ids, cache, steps), expected)
    assert cache.report().pages_fetched > 0


def test_a_crop_and_a_fork_keep_the_layers_width_of_latents() -> None:
    models, ids = _pair("minicpm3"), tokens(1, 30)
    cache = models.cache(EVERYTHING)
    whole = teacher_forced(models.quest, ids, cache, [30])
    for other in (cache, cache.fork(), copy.deepcopy(cache)):
        other.crop(-6)
        again = teacher_forced(models.quest, ids[:, 24:], other, [6])
        assert torch.allclose(again, whole[:, 24:], rtol=0, atol=1e-4 * float(whole.abs().max()))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_with_a_budget_of_everything_gives_the_full_cache(method: str) -> None:
    models, ids = _pair("deepseek-v3"), tokens(1, 40)
    context = prefill_context(models.quest, ids[:, :35], EVERYTHING)
    expected = teacher_forced(models.reference, ids, None, [40])[0, 35:]
    for budget in (40, 12):
        policy = make_policy(method, budget if policy_class(method).uses_budget else None, EVERYTHING)
        logits = decode(models.quest, policy.decode_cache(context), ids[:, 35:])
        # Logits of order 10; see tests/hf/test_dense_generation.py.
        assert torch.allclose(logits, expected, atol=2e-4, rtol=2e-4) == (budget == 40 or method == "full")
