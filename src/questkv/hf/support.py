"""Which models can't decode from pages, and why: what is known before a forward."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from questkv.errors import UnsupportedError

# How a reader knows what transformers' cache layers belong to.
_KINDS: Mapping[type, str] = {
    DynamicLayer: "full attention",
    DynamicSlidingWindowLayer: "sliding windows",
    DynamicIndexedLayer: "an indexer's sparse attention",
    LinearAttentionLayer: "linear attention",
    LinearAttentionAndFullAttentionLayer: "full attention beside linear attention",
    LinearAttentionAndSlidingWindowAttentionLayer: "sliding windows beside linear attention",
    DummyLayer: "none",
}
_PAGED = (DynamicLayer, LinearAttentionAndFullAttentionLayer)
# Kinds that stay transformers' own beside paged ones.
_OWN = (DynamicSlidingWindowLayer, LinearAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer, DummyLayer)


def check_model(model: PreTrainedModel) -> None:
    """Refuse a model whose class can't decode from pages, as far as that can be told before a forward.

    Args:
        model: Any model of transformers.

    Raises:
        UnsupportedError: It can't; the message says why.
    """
    name, config = type(model).__name__, model.config
    if config.is_encoder_decoder:
        raise UnsupportedError(
            f"[attach] model: expected a decoder-only language model, got {name}, an encoder-decoder model; run it "
            "without questkv"
        )
    names = inspect.signature(type(model).forward).parameters
    if not {"cache", "past_key_values"} & names.keys() or not model._supports_default_dynamic_cache():
        raise UnsupportedError(
            f"[attach] model: expected a class that keeps its keys and values in transformers' cache, got {name}, "
            "which keeps none or a state of its own; run it without questkv"
        )
    text = config.get_text_config(decoder=True)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.config is text and not module._can_set_attn_implementation():
            raise UnsupportedError(
                f"[attach] model: expected a class whose attention goes through transformers' attention interface, got "
                f"{type(module).__name__}, which computes attention by itself; run it without questkv"
            )


def check_cache_implementation(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> None:
    """Refuse a call of `generate` that asks for a cache of transformers' by name.

    Args:
        model: The model.
        kwargs: The call's keyword arguments.

    Raises:
        UnsupportedError: It does; the message says where.
    """
    config = kwargs.get("generation_config") or model.generation_config
    for where, name in (
        ("cache_implementation", kwargs.get("cache_implementation")),
        ("generation_config.cache_implementation", getattr(config, "cache_implementation", None)),
    ):
        # "hybrid" is an old default that transformers drops.
        if name not in (None, "hybrid"):
            raise UnsupportedError(
                f"[attach] {where}: expected None, since inside `attach` the cache is a QuestCache, got {name!r}; "
                "leave it out, or call generate outside"
            )


def holds_whole_context(window: int, model_config: PreTrainedConfig) -> bool:
    """Whether all layers of a model have sliding windows that are no shorter than its context, so that they see it all.

    Phi-3 and Phi-4 of 128K have windows of 256K.
    """
    text = model_config.get_text_config(decoder=True)
    context = getattr(text, "max_position_embeddings", None)
    has_others = "full_attention" in (getattr(text, "layer_types", None) or ())
    return context is not None and window >= context and not has_others


def paged_layers(model_config: PreTrainedConfig, layers: Sequence[Any]) -> list[int]:
    """The layers to page: those of transformers' that hold every token's keys and values and attend to them all.

    Args:
        model_config: The model's config.
        layers: A cache's layers, as transformers makes them for a model.

    Raises:
        UnsupportedError: There are none; or some select tokens by a rule of their own, which no mask here is made for.
    """
    model_type, kinds = model_config.model_type, dict.fromkeys(type(layer) for layer in layers)
    paged = [number for number, layer in enumerate(layers) if _sees_everything(layer, model_config)]
    if not paged:
        names = " and ".join(_KINDS.get(kind, kind.__name__) for kind in kinds) or "no attention"
        raise UnsupportedError(
            f"[QuestCache] model_config: expected a model with full-attention layers, got {model_type}, whose layers "
            f"have {names} only; run it without questkv"
        )
    others = [_KINDS.get(kind, kind.__name__) for kind in kinds if kind not in _PAGED and kind not in _OWN]
    if others:
        raise UnsupportedError(
            f"[QuestCache] model_config: expected full attention, sliding windows and linear attention, got "
            f"{model_type}, some of whose layers have {' and '.join(others)}; run it without questkv"
        )
    return paged


def _sees_everything(layer: Any, model_config: PreTrainedConfig) -> bool:
    if type(layer) is DynamicSlidingWindowLayer:
        return holds_whole_context(layer.sliding_window, model_config)
    return type(layer) in _PAGED
