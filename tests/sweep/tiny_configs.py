"""A tiny configuration of any model class of transformers, made from the class's own defaults.

Every field of a configuration class whose name says that it is a size gets a small one that fits the others; the rest
keeps its default. What a class demands beyond that stands in `_OWN`, by model type.
"""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs

VOCABULARY = 128
# Ids that a prompt may hold; those above stand for images, turns and so on.
WORDS = 100
WINDOW = 16
_MOST_LAYERS = 8

_WIDTH, _HEADS, _KV_HEADS, _HEAD_DIM, _EXPERTS = 32, 4, 2, 8, 4
_SIZES: dict[str, int] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "word_embed_proj_dim", "embedding_dim")
        + ("input_embedding_size", "output_embedding_size", "lru_width", "input_size")
        + ("hidden_size_global", "backbone_hidden_size"),
        _WIDTH,
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "moe_intermediate_size", "d_inner")
        + ("shared_expert_intermediate_size", "shared_experts_intermediate_size", "ffn_hidden_size", "dim_ff", "dff")
        + ("expert_ffn_hidden_size", "shared_intermediate_size", "intermediate_size_mlp", "d_ff", "feed_forward_size")
        + ("dense_intermediate_size", "moe_shared_expert_intermediate_size", "mlp_dim", "n_inner", "mamba_d_ssm")
        + ("ff_expansion_factor_size",),
        2 * _WIDTH,
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "attention_heads")
        + ("encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads")
        + ("swa_num_attention_heads", "linear_num_heads", "index_n_heads", "n_mamba_heads"),
        _HEADS,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "linear_num_key_heads"), 2),
    "linear_num_value_heads": 4,
    **dict.fromkeys(
        ("head_dim", "swa_head_dim", "d_head", "d_kv", "dim_head", "global_head_dim", "attention_head_size")
        + ("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "v_head_dim", "qk_rope_head_dim")
        + ("qk_nope_head_dim", "index_head_dim", "rotary_dim", "kv_channels", "query_pre_attn_scalar"),
        _HEAD_DIM,
    ),
    **dict.fromkeys(
        ("kv_lora_rank", "q_lora_rank", "o_lora_rank", "laurel_rank", "adapter_rank", "gated_norm_rank", "hc_lowrank")
        + ("loop_gate_rank", "hidden_size_per_layer_input", "ple_embed_dim", "router_hidden_size", "d_rel")
        + ("mamba_dt_rank", "time_step_rank"),
        16,
    ),
    **dict.fromkeys(
        ("vocab_size", "unpadded_vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input"), VOCABULARY
    ),
    **dict.fromkeys(
        ("sliding_window", "sliding_window_size", "attention_chunk_size", "local_attention", "window_size")
        + ("attention_window_size", "local_attention_window_len", "keep_window_size"),
        WINDOW,
    ),
    **dict.fromkeys(
        ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "zero_expert_num"), _EXPERTS
    ),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions", "context_length")
        + ("model_max_length", "max_source_positions", "original_max_position_embeddings"),
        256,
    ),
    **dict.fromkeys(("index_topk", "index_block_size"), 8),
    "index_topk_blocks": 2,
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    "mamba_d_head": 8,
    "mamba_head_dim": 8,
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 16),
}
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers") + (
    "num_encoder_layers",
    "num_decoder_layers",
    "num_blocks",
)
_THREE_POSITIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "cohere_compass_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "dots1": {"n_shared_experts": 1},
    "dory": {"num_hidden_layers": 6, "n_input_layers": 1, "n_output_layers": 1},
    "dots3_note_text": {
        "num_key_value_heads": _HEADS,
        "head_dim": 2 * _HEAD_DIM,
        "swa_num_attention_heads": _HEADS,
        "swa_num_key_value_heads": _HEADS,
        "swa_head_dim": 2 * _HEAD_DIM,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_qk_nope_head_dim": _HEAD_DIM,
        "swa_qk_rope_head_dim": _HEAD_DIM,
        "swa_v_head_dim": _HEAD_DIM,
    },
    "dots3_note_vision_encoder": {"adapter_in_dim": _WIDTH, "adapter_out_dim": _WIDTH},
    "dots3_note_audio_encoder": {"adapter_input_size": _WIDTH, "adapter_out_dim": _WIDTH},
    "gemma3n_text": {"num_hidden_layers": 8, "num_kv_shared_layers": 3},
    "gemma4_text": {"num_hidden_layers": 6, "hidden_size_per_layer_input": 0},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]},
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "qwen2_vl_text": {"rope_parameters": _THREE_POSITIONS},
    "qwen2_5_vl_text": {"rope_parameters": _THREE_POSITIONS},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": _HEAD_DIM,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"attn_layers": ["local", "lsh"], "axial_pos_embds": False},
    "roc_bert": {"pronunciation_vocab_size": 32, "shape_vocab_size": 32},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 6, "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2},
    "zamba2": {"num_hidden_layers": 6, "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """A small configuration of a model type, for generation.

    Args:
        model_type: As in transformers' mappings.
        **overrides: Fields to set, over everything else.
    """
    config: PreTrainedConfig = _small(CONFIG_MAPPING[model_type], overrides)
    return config


def _small(config_class: type[PreTrainedConfig], overrides: dict[str, Any]) -> Any:
    own = _OWN.get(config_class.model_type, {}) | overrides
    default = _default(config_class, own)
    known = _fields(config_class)
    layers = own.get("num_hidden_layers", _layers(default))
    small: dict[str, Any] = {name: size for name, size in _SIZES.items() if name in known}
    unlimited = [name for name in ("sliding_window", "attention_chunk_size") if name in known]
    small |= {name: None for name in unlimited if vars(default).get(name, 0) is None}
    small |= {name: layers for name in _LAYERS if name in known}
    for name in known:
        value = vars(default).get(name)
        if isinstance(value, PreTrainedConfig):
            small[name] = _small(type(value), {})
        elif isinstance(value, list | tuple) and len(value) == _count(default) != layers and name not in small:
            small[name] = type(value)(value[:layers])
    if "kv_lora_rank" in known:  # multi-head latent attention has no groups, and values narrower than keys
        small |= {"num_key_value_heads": _HEADS} if "num_key_value_heads" in known else {}
        sizes = vars(default)
        if sizes.get("v_head_dim") == sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]:
            small["v_head_dim"] = 2 * _HEAD_DIM
    small |= {name: 0 for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in known}
    small |= {"is_decoder": True} if "is_decoder" in known else {}
    special = sorted(name for name in known if name.endswith(("_token_id", "_token_index")) and name not in small)
    small |= {name: WORDS + number for number, name in enumerate(special)}
    return config_class(**small | own)


def _default(config_class: type[PreTrainedConfig], own: dict[str, Any]) -> Any:
    try:
        return config_class()
    except (TypeError, ValueError):
        return config_class(**own)


def _fields(config_class: type[PreTrainedConfig]) -> set[str]:
    names = set(inspect.signature(config_class.__init__).parameters) - {"self", "kwargs", "args"}
    return names | ({field.name for field in fields(config_class)} if is_dataclass(config_class) else set())


def _count(default: Any) -> int:
    """Layers of a default configuration."""
    return next((vars(default)[name] for name in _LAYERS if name in vars(default)), 0)


def _layers(default: Any) -> int:
    """As few layers as show every kind that the class has by default, and two at least."""
    try:
        kinds, _ = get_layer_types_and_kwargs(default)
    except (AttributeError, TypeError):
        return 2
    last = max((kinds.index(kind) + 1 for kind in set(kinds)), default=2)
    return min(max(last, 2), _MOST_LAYERS)
