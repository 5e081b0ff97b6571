"""Models that can't decode from pages are refused when they are attached, by their true reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from hf.tiny_models import build, tokens
from questkv import QuestCache, QuestConfig, attach
from questkv.errors import UnsupportedError

_SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def model_of(config_class: str, **fields: Any) -> Any:
    fields |= {"d_head": 8} if config_class == "XLNetConfig" else {}
    return AutoModelForCausalLM.from_config(getattr(transformers, config_class)(**_SIZES, **fields)).eval()


@pytest.mark.parametrize(
    "config_class", ["BloomConfig", "FalconConfig", "MptConfig", "XGLMConfig", "MegatronBertConfig", "RemBertConfig"]
)
def test_a_class_that_attends_by_itself_is_refused_when_it_is_attached(config_class: str) -> None:
    model = model_of(config_class)
    before = model.config._attn_implementation
    said = f"through transformers' attention interface, got {type(model).__name__}, which computes attention by itself"
    with pytest.raises(UnsupportedError, match=said), attach(model):
        pass
    assert model.config._attn_implementation == before
    assert "generate" not in vars(model)


@pytest.mark.parametrize("config_class", ["RwkvConfig", "XLNetConfig", "OpenAIGPTConfig"])
def test_a_class_without_transformers_cache_is_refused_when_it_is_attached(config_class: str) -> None:
    model = model_of(config_class)
    with (
        pytest.raises(UnsupportedError, match=r"keys and values in transformers' cache, got \w+, which keeps"),
        attach(model),
    ):
        pass


def test_a_class_that_attends_by_itself_says_so_without_attach_too() -> None:
    config = transformers.BloomConfig(**_SIZES)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="questkv").eval()
    with pytest.raises(UnsupportedError, match=r"got the model's own computation \(baddbmm\)"), torch.no_grad():
        model(torch.ones(1, 5, dtype=torch.long), cache=QuestCache(model.config))


@pytest.mark.parametrize(
    ("config_class", "fields", "said"),
    [
        (
            "RecurrentGemmaConfig",
            {"num_hidden_layers": 3},
            "recurrent_gemma, whose layers have linear attention and",
        ),
        ("MambaConfig", {}, "mamba, whose layers have linear attention only"),
        ("MistralConfig", {"sliding_window": 8}, "mistral, whose layers have sliding windows only"),
        ("DeepseekV32Config", {}, "deepseek_v32, whose layers have an indexer's sparse attention only"),
    ],
)
def test_a_model_with_nothing_to_page_is_told_what_it_has(config_class: str, fields: dict[str, Any], said: str) -> None:
    config = getattr(transformers, config_class)(**_SIZES | fields)
    with pytest.raises(UnsupportedError, match=f"full-attention layers, got {said}"):
        QuestCache(config)


def test_another_cache_by_name_is_refused_as_what_was_asked_for() -> None:
    model, ids = build("llama", "sdpa"), tokens(1, 9)
    with attach(model, QuestConfig()):
        with pytest.raises(UnsupportedError, match=r"\[attach\] cache_implementation: expected None.*got 'static'"):
            model.generate(ids, cache_implementation="static", max_new_tokens=2)
        with pytest.raises(
            UnsupportedError, match=r"generation_config.cache_implementation: expected None.*'offloaded'"
        ):
            model.generate(ids, generation_config=GenerationConfig(cache_implementation="offloaded"), max_new_tokens=2)
