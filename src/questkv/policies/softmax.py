"""Logits and softmax in float32, for the caches that attend in PyTorch and for the prompt's statistics."""

from __future__ import annotations

import torch

from questkv.kernels import Softmax


def attention_logits(query: torch.Tensor, keys: torch.Tensor, softmax: Softmax) -> torch.Tensor:
    """Scaled and soft-capped products.

    Args:
        query: [Hkv, m, D], the queries of each KV head.
        keys: [Hkv, T, D].
        softmax: Its scale and soft cap.

    Returns:
        [Hkv, m, T] float32.
    """
    logits = (query.float() * softmax.scale) @ keys.float().transpose(1, 2)
    if softmax.softcap is not None:
        logits.div_(softmax.softcap).tanh_().mul_(softmax.softcap)
    return logits


def attention_weights(logits: torch.Tensor, softmax: Softmax) -> torch.Tensor:
    """Softmax over the tokens; a sink takes its share of the mass, so a row may sum to less than 1.

    Args:
        logits: [Hkv, m, T] float32, m a multiple of G: the queries of a group's heads one after another.
        softmax: Its sinks.

    Returns:
        [Hkv, m, T] float32.
    """
    if softmax.sinks is None:
        return logits.softmax(dim=-1)
    per_head = softmax.sinks.float().view(len(logits), -1, 1)  # [Hkv, G, 1]
    column = per_head.repeat_interleave(logits.shape[1] // per_head.shape[1], dim=1)
    return torch.cat([logits, column], dim=-1).softmax(dim=-1)[..., :-1]
