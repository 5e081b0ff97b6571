"""`attach`: a model decodes with questkv inside the block and is as it was after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedTokenizerFast,
    pipeline,
)

from hf.tiny_models import NAMES, VOCABULARY, build, tokens
from questkv import QuestCache, QuestConfig, attach
from questkv.errors import CacheMismatchError

SPARSE = QuestConfig(token_budget=16, page_size=4, sink_tokens=4, recent_tokens=4, dense_layers=0)
EVERYTHING = QuestConfig(token_budget=1.0, page_size=4)


def greedy(model: Any, ids: torch.Tensor, **kwargs: Any) -> list[list[int]]:
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 8} | kwargs
    return model.generate(ids, **settings)[:, ids.shape[1] :].tolist()


def everything_about(model: Any) -> list[Any]:
    """Whatever `attach` could leave behind."""
    found: list[Any] = [model.generation_config.to_dict(), model.config.to_dict()]
    for module in model.modules():
        # Plain attributes, and the keys of hook tables; parameters and submodules stay the objects they are.
        plain = {key: value for key, value in module.__dict__.items() if not isinstance(value, dict)}
        tables = {
            key: {name: id(entry) for name, entry in value.items()}
            for key, value in module.__dict__.items()
            if isinstance(value, dict)
        }
        config = getattr(module, "config", None)
        attention = [getattr(config, f"_attn_implementation{end}", None) for end in ("", "_internal")]
        found.append((sorted(plain), tables, attention, module.training))
    return found


# Not the model whose first layer was replaced: its config is not the model's.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "llama-mixed"])
def test_generation_inside_uses_pages_and_outside_is_as_before(name: str) -> None:
    model = build(name, "sdpa" if name not in ("gemma2", "gpt-oss") else "eager")
    ids, before = tokens(2, 40), everything_about(model)
    expected = greedy(model, ids)
    with attach(model, EVERYTHING) as attached:
        assert model.config._attn_implementation == "questkv"
        assert greedy(model, ids) == expected
        assert attached.cache.report().tokens == (47, 47)
    with attach(model, SPARSE) as attached:
        greedy(model, ids)
        assert attached.cache.report().share_read < 0.5
        assert attached.cache.config == SPARSE
    assert everything_about(model) == before
    assert greedy(model, ids) == expected


def test_a_model_is_as_it_was_after_an_exception() -> None:
    model = build("llama", "sdpa")
    before = everything_about(model)
    with pytest.raises(KeyboardInterrupt), attach(model, SPARSE):
        raise KeyboardInterrupt
    assert everything_about(model) == before
    with pytest.raises(AttributeError), attach(model, SPARSE):
        model.generate("no tensor")
    assert everything_about(model) == before


def test_a_wrong_configuration_is_refused_before_anything_is_changed() -> None:
    model = build("llama", "sdpa")
    before = everything_about(model)
    with pytest.raises(TypeError, match="expected a QuestConfig, got dict"), attach(model, {"token_budget": 0.5}):
        pass
    assert everything_about(model) == before


def test_an_inner_attachment_counts_inside_and_the_outer_one_after() -> None:
    model, ids = build("llama", "sdpa"), tokens(1, 40)
    before = everything_about(model)
    with attach(model, SPARSE) as outer:
        greedy(model, ids)
        between, first = everything_about(model), outer.cache
        with attach(model, EVERYTHING) as inner:
            greedy(model, ids)
            assert inner.cache.report().share_read == 1.0
            used, inner.cache = inner.cache, None
            with torch.no_grad():
                model(ids)
            assert inner.cache is not None
            assert inner.cache is not used
            assert outer.cache is first
        assert everything_about(model) == between
        greedy(model, ids)
        assert outer.cache is not first
        assert outer.cache.report().share_read < 0.5
    assert everything_about(model) == before


def test_every_call_without_a_cache_gets_a_fresh_one() -> None:
    model, ids = build("llama", "sdpa"), tokens(1, 40)
    with torch.no_grad():
        expected = model(ids).logits
    with attach(model, EVERYTHING) as attached, torch.no_grad():
        first = model(ids)
        assert isinstance(first.cache, QuestCache)
        assert first.cache is attached.cache
        second = model(ids)
        assert attached.cache is not first.cache
        assert attached.cache.report().tokens == (40,)
    for out in (first, second):
        assert (out.logits - expected).abs().max() < 1e-4 * expected.abs().max()


def test_a_call_keeps_the_cache_it_brings() -> None:
    model, ids = build("llama", "sdpa"), tokens(1, 40)
    own = QuestCache(model.config, EVERYTHING)
    with attach(model, SPARSE) as attached:
        greedy(model, ids, cache=own)
        with torch.no_grad():
            assert model(tokens(1, 1), cache=own).cache is own
        assert attached.cache is None
    assert own.report().tokens == (48,)
    assert own.report().share_read == 1.0


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_a_cache_under_its_older_name_is_kept_too() -> None:
    model, ids = build("llama", "sdpa"), tokens(1, 40)
    own = QuestCache(model.config, EVERYTHING)
    with attach(model, SPARSE) as attached:
        greedy(model, ids, past_key_values=own)
        assert attached.cache is None
    assert own.report().tokens == (47,)


def test_a_call_that_brings_another_kind_of_cache_is_refused() -> None:
    model, ids = build("llama", "sdpa"), tokens(1, 40)
    with attach(model), pytest.raises(CacheMismatchError, match="expected a QuestCache"):
        greedy(model, ids, cache=DynamicCache(config=model.config))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 2, "top_k": 9},
        {"prefill_chunk_size": 7},
        {"prompt_lookup_num_tokens": 3},
    ],
)
def test_every_way_to_generate_works_inside(kwargs: dict[str, Any]) -> None:
    model, ids = build("llama", "sdpa"), tokens(1, 8).repeat(1, 4)
    torch.manual_seed(5)
    expected = greedy(model, ids, **kwargs)
    with attach(model, EVERYTHING):
        torch.manual_seed(5)
        assert greedy(model, ids, **kwargs) == expected


def test_a_text_generation_pipeline_works_inside() -> None:
    words = {f"w{i}": i for i in range(VOCABULARY)}
    raw = Tokenizer(models.WordLevel(words, unk_token="w1"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="w0", padding_side="left")
    model = build("llama", "sdpa")
    prompts = [" ".join(f"w{i}" for i in tokens(n, seed=n).tolist()) for n in (40, 17)]
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    settings = {"max_new_tokens": 6, "do_sample": False, "batch_size": 2}
    expected = pipe(prompts, **settings)
    with attach(model, EVERYTHING) as attached:
        assert pipe(prompts, **settings) == expected
        assert attached.cache.report().tokens == (45, 22)
    with attach(model, SPARSE) as attached:
        pipe(prompts, **settings)
        assert attached.cache.report().share_read < 0.9
    assert pipe(prompts, **settings) == expected


def test_an_own_generate_of_the_instance_comes_back() -> None:
    model, calls = build("llama", "sdpa"), []
    original = model.generate

    def mine(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return original(*args, **kwargs)

    model.generate = mine
    with attach(model, SPARSE) as attached:
        greedy(model, tokens(1, 20))
        assert isinstance(calls[-1]["cache"], QuestCache)
        assert attached.cache is calls[-1]["cache"]
    assert model.generate is mine


def test_a_vision_tower_keeps_its_own_attention() -> None:
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = small | {"num_key_value_heads": 1, "head_dim": 8, "vocab_size": 40, "layer_types": ["full_attention"] * 2}
    config = Gemma3Config(text_config=text, vision_config=small | {"image_size": 28, "patch_size": 14})
    config._attn_implementation = "sdpa"
    model = Gemma3ForConditionalGeneration(config).eval()
    before = everything_about(model)
    ids = torch.randint(1, 30, (1, 20))
    with torch.no_grad():
        expected = model(ids).logits
    with attach(model, EVERYTHING) as attached:
        assert model.config.vision_config._attn_implementation == "sdpa"
        assert model.config.get_text_config()._attn_implementation == "questkv"
        with torch.no_grad():
            got = model(ids).logits
        assert attached.cache.report().tokens == (20,)
    assert (got - expected).abs().max() < 1e-4 * expected.abs().max()
    assert everything_about(model) == before
