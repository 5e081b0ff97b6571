"""Attention over plain keys and values: layers that aren't paged, and what pages can't mask."""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from questkv.kernels import Softmax


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
        value: [B, Hkv, T, D].
        mask: [B, 1, n, T] bool, or None for plain causal attention.
        softmax: Scale, soft cap and sinks.
        **kwargs: Handed on to SDPA.

    Returns:
        [B, n, Hq, D].
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
        value: [B, Hkv, T, D].
        mask: [B, 1, n, T] bool, or None for plain causal attention.
        softmax: Scale, soft cap and sinks.

    Returns:
        [B, n, Hq, D].
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
