"""The attention function and mask function that transformers knows as ``questkv``."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from questkv.errors import CacheMismatchError, UnsupportedError
from questkv.hf.compile.operator import HANDLE
from questkv.hf.gradients import refuse_backward
from questkv.hf.layer import NAME as NAME
from questkv.hf.layer import PagedKeys
from questkv.hf.local_attention import local_attention
from questkv.hf.patterns import attend_by_pattern, is_padding, mark_padding
from questkv.hf.support import holds_whole_context
from questkv.hf.transformed import TransformedStates
from questkv.kernels import Softmax

_OWN_LAYER = "_questkv_own_layer"


def register() -> None:
    """Add ``questkv`` to transformers' registries of attention and mask functions; nothing that is there changes."""
    AttentionInterface.register(NAME, questkv_attention)
    AttentionMaskInterface.register(NAME, questkv_mask)


def mark_own_layer(keys: torch.Tensor) -> None:
    """Mark keys that a `QuestCache` took from one of transformers' own layers (a sliding window)."""
    setattr(keys, _OWN_LAYER, True)


def questkv_mask(**kwargs: Any) -> torch.Tensor | None:
    """Mask function: what a paged layer takes as a mask, or SDPA's own mask for a local one.

    Returns:
        For plain causal attention the padding mask [B, 1, 1, columns], or None. For any other pattern (an image whose
        tokens see one another) SDPA's [B, 1, n, columns].
    """
    # transformers names the window's size for sliding and chunked layers only.
    window = kwargs.get("local_size")
    if window is not None and not holds_whole_context(window, kwargs["config"]):
        mask: torch.Tensor | None = sdpa_mask(**kwargs)
        return mask
    if window is not None and kwargs["kv_length"] > window:
        raise UnsupportedError(
            f"[questkv] mask: expected at most {window} tokens, the sliding window of layers that are paged because it "
            f"holds the model's whole context, got {kwargs['kv_length']}"
        )
    if window is None and kwargs.get("mask_function", causal_mask_function) is not causal_mask_function:
        own = _whole_mask(kwargs)
        if not torch.equal(own, _whole_mask({**kwargs, "mask_function": causal_mask_function, "use_vmap": False})):
            return own
    padding: torch.Tensor | None = kwargs.get("attention_mask")
    if padding is None:
        return None
    # The cache compares the whole of it with what it knows of the tokens that it holds. It gets two more dimensions: a
    # model may cut the queries of its masks (Gemma 4).
    return mark_padding(padding[:, None, None])


def _whole_mask(kwargs: dict[str, Any]) -> torch.Tensor:
    """[B, 1, n, columns] bool: SDPA's mask, made also where SDPA would need none."""
    mask: torch.Tensor = sdpa_mask(**kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    return mask


def questkv_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function: paged layers attend through their cache, local layers through SDPA.

    Args:
        module: The attention layer.
        query: [B, Hq, n, D].
        key: What the cache's `update` returned: a handle of a paged layer, or a local layer's keys.
        value: Like `key`.
        attention_mask: What `questkv_mask` returned.
        scaling: Softmax scale, D ** -0.5 if None.
        dropout: Must be 0.
        softcap: Logit soft-capping (Gemma 2).
        s_aux: [Hq] attention sinks (gpt-oss).
        **kwargs: Refused where they would change the result. A compiled step's handle is among them.

    Returns:
        [B, n, Hq, D] and None for the weights.

    Raises:
        CacheMismatchError: The keys don't come from a `QuestCache`.
        UnsupportedError: Training, dropout, attention weights, a bias, or a mask that isn't plain padding.
    """
    _refuse(module, dropout, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    handle = kwargs.get(HANDLE)
    if handle is not None:
        return torch.ops.questkv.step(handle, module.layer_idx, query, key, value, scale, softcap, s_aux), None
    if isinstance(key, PagedKeys | TransformedStates):
        key = _handle_of(key, value)
        softmax = Softmax(scale, softcap, s_aux)
        if attention_mask is None or is_padding(attention_mask, query):
            padding = None if attention_mask is None else attention_mask.flatten(1)
            out = key.layer.attend(query, padding, softmax)
        else:
            out = attend_by_pattern(key.layer, query, attention_mask, softmax)
        return refuse_backward(out, query, *key.sources), None
    if not getattr(key, _OWN_LAYER, False):
        raise CacheMismatchError(
            f"[questkv] cache: expected a QuestCache, got another cache or none; {_advice(module, query)}"
        )
    n = query.shape[2]
    if attention_mask is not None and n == key.shape[2] and is_padding(attention_mask, query):
        # A full-attention layer without a cache; a padding query sees itself, so that no row is empty.
        causal = torch.ones(n, n, dtype=torch.bool, device=query.device).tril()
        diagonal = torch.eye(n, dtype=torch.bool, device=query.device)
        attention_mask = attention_mask.flatten(1).bool()[:, None, None] & causal | diagonal
    return local_attention(module, query, key, value, attention_mask, Softmax(scale, softcap, s_aux), **kwargs), None


def _handle_of(key: torch.Tensor, value: torch.Tensor) -> PagedKeys:
    """The handle of new keys and values, as the cache gave it or as the model has changed them."""
    if isinstance(key, PagedKeys) and isinstance(value, PagedKeys) and key.layer is value.layer:
        return key
    if isinstance(key, TransformedStates) and isinstance(value, TransformedStates) and key.layer is value.layer:
        handle: PagedKeys = key.layer.replace(key.as_subclass(torch.Tensor), value.as_subclass(torch.Tensor))
        return handle
    raise UnsupportedError(
        "[questkv] values: expected those that were cached with the keys, got others; models that attend one set of "
        "keys with several sets of values are not supported"
    )


def _advice(module: Any, query: torch.Tensor) -> str:
    original = getattr(getattr(module, "config", None), "original_max_position_embeddings", None)
    if original is not None and query.shape[2] > original:
        return (
            f"this model's generate leaves out the cache that it is given where a sequence gets longer than {original} "
            "tokens (original_max_position_embeddings), to read it all with other rotary frequencies; call it inside "
            "questkv.attach(model), which puts the cache back"
        )
    return (
        "pass cache=QuestCache(model.config, QuestConfig()) (older transformers: past_key_values=), or use "
        "questkv.attach(model)"
    )


def _refuse(module: torch.nn.Module, dropout: float, kwargs: dict[str, Any]) -> None:
    if module.training or dropout:
        raise UnsupportedError("[questkv] training: expected a model in eval mode without dropout; call model.eval()")
    if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise UnsupportedError("[questkv] attention: expected causal attention, got a bidirectional or cross layer")
    if kwargs.get("output_attentions"):
        raise UnsupportedError("[questkv] output_attentions: expected False, got True; use 'eager' to see the weights")
    if kwargs.get("position_bias") is not None:
        raise UnsupportedError("[questkv] position_bias: expected None, got one; biased attention is not supported")
