"""Feeding a long prompt to a model in chunks, so that memory stays bounded and progress can be shown."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from questkv.errors import CacheMismatchError
from questkv.hf.cache import QuestCache
from questkv.hf.rotary import read_as, reads_alike

# Half as many were read 6 % slower on a CPU: PyTorch's causal attention computes whole squares of 512 tokens.
CHUNK_TOKENS = 1024


def cache_argument(model: Any) -> str:
    """The name under which this version of transformers takes a cache: ``cache``, before 5.2x ``past_key_values``."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def chunks(length: int, *, chunk_tokens: int = CHUNK_TOKENS, longer_than: int = 0) -> Iterator[tuple[int, int]]:
    """Split `length` tokens into runs (first token, one past the last) of `chunk_tokens`.

    A rest of `longer_than` tokens or fewer joins the run before it: alone it would count as a short run of new tokens
    and be decoded sparsely, where it is part of a prompt that is to be prefilled densely.
    """
    start = 0
    while start < length:
        end = min(start + chunk_tokens, length)
        if length - end <= longer_than:
            end = length
        yield start, end
        start = end


def prefill(
    model: Any,
    cache: Any,
    input_ids: torch.Tensor,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    total_tokens: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> torch.Tensor:
    """Run tokens through a model for what they leave in its cache, whatever its config says of ``use_cache``.

    The result is that of one forward over all of `input_ids`, but for rounding. No chunk is so short that a
    `QuestCache` would decode it sparsely (`QuestConfig.sparse_prefill`), unless `input_ids` as a whole is.

    Args:
        model: A causal language model of transformers.
        cache: Its cache; what it holds already comes before `input_ids`.
        input_ids: [B, tokens] int64, the new tokens, without padding.
        chunk_tokens: Tokens a run. Larger runs are faster and hold more activations at once.
        total_tokens: Length of the whole sequence, where it is known that more tokens follow. Rotary embeddings of the
            types `longrope` and `dynamic` choose their frequencies by it. None: the tokens that the cache holds and
            `input_ids`, or what an earlier call said, where that is more.
        on_progress: Called after each run with the tokens done so far.

    Returns:
        [B, vocabulary] logits of the last token; [B, 0] where there are no tokens.

    Raises:
        CacheMismatchError: The rotary embedding would take other frequencies than the cached keys have; the cache is as
            it was.
    """
    logits: torch.Tensor = torch.empty(len(input_ids), 0)
    name = cache_argument(model)
    # one row of logits is made instead of [chunk, vocabulary], where the model can be told so
    few_logits = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    length, past = input_ids.shape[1], cache.get_seq_length()
    sparse = cache.config.sparse_prefill if isinstance(cache, QuestCache) else 0
    read = cache.read_as if past and isinstance(cache, QuestCache) else 0
    if read or total_tokens is None:
        total = max(past + length, read) if total_tokens is None else total_tokens
        if past and length and not reads_alike(model, read or past, total):
            raise CacheMismatchError(
                f"[prefill] input_ids: expected no more tokens than leave the rotary frequencies as they were for the "
                f"{past} cached ones, read as a part of {read or past}, got {length}, as a part of {total}; feed all "
                "at once into a new cache, or give the length of the whole sequence as total_tokens each time"
            )
        total_tokens = total
    if length and isinstance(cache, QuestCache):
        cache.read_as = total_tokens
    with read_as(model, total_tokens):
        for start, end in chunks(length, chunk_tokens=chunk_tokens, longer_than=sparse):
            with torch.no_grad():
                out = model(input_ids=input_ids[:, start:end], use_cache=True, **{name: cache}, **few_logits)
            logits = out.logits[:, -1]
            if on_progress is not None:
                on_progress(end)
    return logits
