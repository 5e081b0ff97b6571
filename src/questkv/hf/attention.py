"""The attention function and mask function that transformers knows as ``questkv``."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from questkv.errors import CacheMismatchError, UnsupportedError
from questkv.hf.gradients import refuse_backward
from questkv.hf.group import Softmax
from questkv.hf.latents import NewStates
from questkv.hf.layer import PagedKeys
from questkv.hf.step_operator import HANDLE

NAME = "questkv"
_OWN_LAYER = "_questkv_own_layer"


def register() -> None:
    """Add ``questkv`` to transformers' registries of attention and mask functions; nothing that is there changes."""
    AttentionInterface.register(NAME, questkv_attention)
    AttentionMaskInterface.register(NAME, questkv_mask)


def mark_own_layer(keys: torch.Tensor) -> None:
    """Mark keys that a `QuestCache` took from one of transformers' own layers (a sliding window)."""
    setattr(keys, _OWN_LAYER, True)


def holds_whole_context(window: int, model_config: PreTrainedConfig) -> bool:
    """Whether all layers of a model have sliding windows that are no shorter than its context, so that they see it all.

    Phi-3 and Phi-4 of 128K have windows of 256K.
    """
    text = model_config.get_text_config(decoder=True)
    context = getattr(text, "max_position_embeddings", None)
    has_others = "full_attention" in (getattr(text, "layer_types", None) or ())
    return context is not None and window >= context and not has_others


def questkv_mask(**kwargs: Any) -> torch.Tensor | None:
    """Mask function: the padding mask [B, 1, 1, columns] (or None) for paged layers, SDPA's own for local ones."""
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
        raise UnsupportedError(
            "[questkv] mask: expected plain causal attention, got a custom, packed or bidirectional pattern; use "
            "another attention implementation for this input"
        )
    padding: torch.Tensor | None = kwargs.get("attention_mask")
    # The cache compares the whole of it with what it knows of the tokens that it holds. It gets two more dimensions: a
    # model may cut the queries of its masks (Gemma 4).
    return None if padding is None else padding[:, None, None]


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
        key: What the cache's `update` returned, a handle of a paged layer or a local layer's keys; or what the model
            has expanded it to (see `questkv.hf.latents`).
        value: Like `key`.
        attention_mask: What `questkv_mask` returned.
        scaling: Softmax scale, D ** -0.5 if None.
        dropout: Must be 0.
        softcap: Logit soft-capping (Gemma 2).
        s_aux: [Hq] attention sinks (gpt-oss).
        **kwargs: Refused where they would change the result. A compiled step's handle is among them.

    Returns:
        [B, n, Hq, Dv] and None for the weights.

    Raises:
        CacheMismatchError: The keys don't come from a `QuestCache`.
        UnsupportedError: Training, dropout, attention weights, a bias, or a mask that isn't plain padding.
    """
    _refuse(module, dropout, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    handle = kwargs.get(HANDLE)
    if handle is not None:
        return torch.ops.questkv.step(handle, module.layer_idx, query, key, value, scale, softcap, s_aux), None
    if isinstance(key, PagedKeys):
        padding = None if attention_mask is None else _padding(attention_mask)
        out = key.layer.attend(query, padding, Softmax(scale, softcap, s_aux))
        return refuse_backward(out, query, *key.sources), None
    if isinstance(key, NewStates) and isinstance(value, NewStates):
        padding = None if attention_mask is None else _padding(attention_mask)
        keys, values = key.plain(), value.plain()
        out = key.layer.attend_expanded(query, keys, values, padding, Softmax(scale, softcap, s_aux))
        return refuse_backward(out, query, keys, values), None
    if not getattr(key, _OWN_LAYER, False):
        raise CacheMismatchError(
            f"[questkv] cache: expected a QuestCache, got another cache or none; {_advice(module, query)}"
        )
    n = query.shape[2]
    if attention_mask is not None and n == key.shape[2] and (attention_mask.ndim == 2 or attention_mask.shape[2] != n):
        # A full-attention layer without a cache; a padding query sees itself, so that no row is empty.
        causal = torch.ones(n, n, dtype=torch.bool, device=query.device).tril()
        diagonal = torch.eye(n, dtype=torch.bool, device=query.device)
        attention_mask = _padding(attention_mask).bool()[:, None, None] & causal | diagonal
    return local_attention(module, query, key, value, attention_mask, Softmax(scale, softcap, s_aux), **kwargs), None


def local_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    softmax: Softmax,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention of a local layer: transformers' SDPA, or the formula where SDPA lacks something.

    Args:
        module: The attention layer; SDPA reads its `num_key_value_groups` and `is_causal`.
        query: [B, Hq, n, D].
        key: [B, Hkv, T, D].
        value: [B, Hkv, T, Dv].
        mask: [B, 1, n, T] bool, or None for plain causal attention.
        softmax: Scale, soft cap and sinks.
        **kwargs: Handed on to SDPA.

    Returns:
        [B, n, Hq, Dv].
    """
    if softmax.softcap is not None or softmax.sinks is not None:
        return capped_attention(query, key, value, mask, softmax)
    out: torch.Tensor = sdpa_attention_forward(module, query, key, value, mask, scaling=softmax.scale, **kwargs)[0]
    return out


def capped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    softmax: Softmax,
) -> torch.Tensor:
    """Attention of a local layer with what SDPA lacks: soft-capped logits and sinks, in float32.

    Args:
        query: [B, Hq, n, D].
        key: [B, Hkv, T, D].
        value: [B, Hkv, T, Dv].
        mask: [B, 1, n, T] bool, or None for plain causal attention.
        softmax: Scale, soft cap and sinks.

    Returns:
        [B, n, Hq, Dv].
    """
    n, tokens = query.shape[2], key.shape[2]
    grouped = query.float().unflatten(1, (key.shape[1], -1)) * softmax.scale  # [B, Hkv, G, n, D]
    logits = grouped @ key.float().unsqueeze(2).transpose(-1, -2)
    if softmax.softcap is not None:
        logits = softmax.softcap * torch.tanh(logits / softmax.softcap)
    if mask is None:
        mask = torch.ones(n, tokens, dtype=torch.bool, device=query.device).tril(tokens - n)[None, None]
    logits = logits.masked_fill(~mask[:, :, None], -torch.inf)
    if softmax.sinks is not None:
        column = softmax.sinks.float().view(1, key.shape[1], -1, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, column], dim=-1)
    # A padding query sees nothing; its row is NaN after the softmax and ignored by everyone, so make it zero.
    weights = logits.softmax(dim=-1)[..., :tokens].nan_to_num(nan=0.0)
    out: torch.Tensor = weights @ value.float().unsqueeze(2)
    return out.flatten(1, 2).transpose(1, 2).to(query.dtype)


def _padding(mask: torch.Tensor) -> torch.Tensor:
    """[B, columns] of the padding mask that `questkv_mask` made, or that a caller gave as such."""
    if mask.ndim == 2:
        return mask
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1:3] != (1, 1):
        raise UnsupportedError(
            f"[questkv] attention_mask: expected a 2-D padding mask, got {mask.ndim} dimensions; custom masks are not "
            "supported"
        )
    return mask[:, 0, 0]


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
