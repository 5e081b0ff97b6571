"""Tiny random models of many architectures, each beside transformers' own attention with the same weights.

Weights are drawn large enough that attention is peaked and tokens differ; with transformers' default of 0.02 every
token of so small a model would look like every other.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaAttention

from questkv import QuestCache, QuestConfig

VOCABULARY = 97
_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_FULL, _LOCAL = "full_attention", "sliding_attention"
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 150,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [2.0, 3.0, 5.0, 8.0],
}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-mha": ("LlamaConfig", {"num_key_value_heads": 6}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-window": ("MistralConfig", {"sliding_window": 8}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 6,
            "sliding_window": 9,
            "layer_types": [_LOCAL, _FULL, _LOCAL, _LOCAL, _FULL, _LOCAL],
            "query_pre_attn_scalar": 8,
        },
    ),
    "gemma2": (
        "Gemma2Config",
        {
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "layer_types": [_LOCAL, _FULL] * 2,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 20.0,
        },
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "layer_types": [_LOCAL, _FULL] * 2,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {
            "num_hidden_layers": 6,
            "layer_types": ["conv", _FULL, "conv", "conv", _FULL, "conv"],
            "block_auto_adjust_ff_dim": False,
        },
    ),
    # Other rotary frequencies where a sequence is longer than 150 tokens.
    "llama-dynamic": (
        "LlamaConfig",
        {
            "max_position_embeddings": 150,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "llama-longrope": ("LlamaConfig", {"rope_parameters": _LONGROPE}),
    # The same, and all layers have a window that holds the whole context, as in Phi-3 of 128K.
    "phi3-longrope": (
        "Phi3Config",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 150, "sliding_window": 1000},
    ),
    "phimoe-longrope": (
        "PhimoeConfig",
        {
            "rope_parameters": _LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.5},
            "original_max_position_embeddings": 150,
            "sliding_window": None,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
        },
    ),
    # Its first layer is replaced by one with other KV heads (see `build`).
    "llama-mixed": ("LlamaConfig", {}),
}
# What transformers has no SDPA for is compared with its eager attention.
_EAGER = ("gemma2", "gpt-oss")
# Models whose rotary frequencies depend on the sequence's length.
BY_LENGTH = ("llama-dynamic", "llama-longrope", "phi3-longrope", "phimoe-longrope")
# Every other model that can be paged, but for one with layers that hold a state in place of keys.
NAMES = tuple(name for name in _CONFIGS if name not in ("mistral-window", "lfm2", *BY_LENGTH))
HYBRID = ("gemma3", "gemma2", "gpt-oss")


class Pair(NamedTuple):
    """One model twice, with the same weights."""

    reference: Any
    quest: Any

    def cache(self, config: QuestConfig | None = None, **kwargs: Any) -> QuestCache:
        return QuestCache(self.quest.config, config, **kwargs)


def build(name: str, attention: str, seed: int = 0, **overrides: Any) -> Any:
    """A tiny model in eval mode; equal arguments give equal weights."""
    config_class, own = _CONFIGS[name]
    config = getattr(transformers, config_class)(**{**_SMALL, **own, **overrides})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        if name == "llama-mixed":
            first = transformers.LlamaConfig(**{**_SMALL, "num_key_value_heads": 3})
            first._attn_implementation = attention
            model.model.layers[0].self_attn = LlamaAttention(first, layer_idx=0)
            model.init_weights()
        if name == "phimoe-longrope":
            model.set_experts_implementation("eager")  # the others don't take float64
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith("sinks"):
                    parameter.normal_(1.0, 1.0)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


@lru_cache
def pair(name: str) -> Pair:
    """Transformers' own attention and questkv's; shared between tests, so leave them as they are."""
    return Pair(build(name, "eager" if name in _EAGER else "sdpa"), build(name, "questkv"))


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random token ids without the padding token."""
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def pad_left(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of a batch; `rows` are 1-D and of any lengths."""
    width = max(len(row) for row in rows)
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :] = row
        mask[i, width - len(row) :] = 1
    return ids, mask


def teacher_forced(model: Any, ids: torch.Tensor, cache: Any, steps: list[int]) -> torch.Tensor:
    """Logits [B, T, V] of ids fed in pieces of the given lengths."""
    out, at = [], 0
    for step in steps:
        with torch.no_grad():
            out.append(model(ids[:, at : at + step], cache=cache, use_cache=True).logits)
        at += step
    assert at == ids.shape[1]
    return torch.cat(out, dim=1)
