"""Feeding a decode cache one token at a time, as the paper's evaluation feeds the question (section 4.2)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from questkv.hf.prefill import cache_argument


def decode(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """Feed tokens one by one behind what a cache holds.

    Args:
        model: A causal language model of transformers whose attention is ``questkv``.
        cache: What `Policy.decode_cache` gave; the tokens are added to it.
        ids: [1, n] int64, n >= 1.

    Returns:
        [n, vocabulary] float32: row i predicts the token after ids[0, i].
    """
    if ids.ndim != 2 or ids.shape[0] != 1 or not ids.shape[1]:
        raise ValueError(f"[decode] ids: expected [1, n] with n >= 1, got {list(ids.shape)}")
    name = cache_argument(model)
    with torch.no_grad():
        rows = [
            model(input_ids=token, use_cache=True, **{name: cache}).logits[0, -1].float()
            for token in ids.to(model.device).split(1, dim=1)
        ]
    return torch.stack(rows)


def greedy(model: Any, cache: Any, ids: torch.Tensor, max_new_tokens: int, stop_ids: Collection[int] = ()) -> list[int]:
    """Feed tokens one by one and then generate the likeliest ones.

    Args:
        model: As in `decode`.
        cache: As in `decode`.
        ids: [1, n] int64, n >= 1.
        max_new_tokens: Most tokens to generate.
        stop_ids: Tokens that end the answer.

    Returns:
        The generated tokens, without the one that ended them.
    """
    generated: list[int] = []
    if max_new_tokens < 1:
        return generated
    token = int(decode(model, cache, ids)[-1].argmax())
    while token not in stop_ids:
        generated.append(token)
        if len(generated) == max_new_tokens:
            break
        token = int(decode(model, cache, torch.tensor([[token]]))[-1].argmax())
    return generated
