"""What the caches of a decode benchmark hold: a real model's keys and values, made in less time than a real prefill."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from questkv.errors import UnsupportedError
from questkv.hf.prefill import cache_argument, chunks
from questkv.hf.rotary import read_as

# Contexts up to this length are prefilled as they are.
BLOCK_TOKENS = 2048


@dataclass(frozen=True)
class Contents:
    """Keys and values of every layer at the longest context.

    A prefill's time grows with the square of its length. So the tokens are prefilled in blocks, each alone, as if
    nothing came before it, but at its own positions: keys and values have the model's own distribution and the rotary
    embedding of their place. What is missing is what a token would have learnt from earlier blocks, which changes what
    the model says and not the work of a step.

    Attributes:
        block: Tokens a block.
        layers: Keys and values [1, Hkv, longest, D] of each layer.
    """

    block: int
    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    def at(self, context: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views [1, Hkv, context, D] of the first tokens, one pair a layer."""
        return [(keys[:, :, :context], values[:, :, :context]) for keys, values in self.layers]


def make_contents(
    model: Any, ids: Sequence[int], block: int = BLOCK_TOKENS, on_progress: Callable[[int], None] | None = None
) -> Contents:
    """Prefill `ids` in blocks.

    Args:
        model: A causal language model of transformers whose layers all attend to everything; its attention
            implementation is ``sdpa`` from then on.
        ids: Tokens of the longest context.
        block: Tokens a block.
        on_progress: Called with the tokens done so far.

    Raises:
        UnsupportedError: The model has layers of another kind.
    """
    model.set_attn_implementation("sdpa")
    layers: list[tuple[torch.Tensor, torch.Tensor]] = []
    tokens = torch.tensor([list(ids)], device=model.device)
    forward = functools.partial(model, use_cache=True, logits_to_keep=1)
    for first in range(0, len(ids), block):
        end = min(first + block, len(ids))
        cache = DynamicCache(config=model.config)
        refuse_other_layers(cache)
        for start, stop in chunks(end - first):
            here = slice(first + start, first + stop)
            positions = torch.arange(here.start, here.stop, device=model.device)[None]
            with read_as(model, len(ids)):
                forward(input_ids=tokens[:, here], position_ids=positions, **{cache_argument(model): cache})
            if on_progress is not None:
                on_progress(here.stop)
        if not layers:
            layers = [(_room(layer.keys, len(ids)), _room(layer.values, len(ids))) for layer in cache.layers]
        for (keys, values), layer in zip(layers, cache.layers, strict=True):
            keys[:, :, first:end], values[:, :, first:end] = layer.keys, layer.values
    return Contents(block, tuple(layers))


def refuse_other_layers(cache: Any) -> None:
    """Raise for a model with sliding windows or other layers whose cache can't be filled from outside.

    Raises:
        UnsupportedError: It has such layers.
    """
    other = [layer for layer in cache.layers if getattr(layer, "is_sliding", False) or not hasattr(layer, "keys")]
    if other:
        raise UnsupportedError(
            f"[bench] --model: expected full-attention layers only, got {len(other)} of {len(cache.layers)} of another "
            "kind; bench decode fills caches from outside, which such layers don't allow"
        )


def default_text() -> str:
    """A long English text that every Python has: its own language reference."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def text_tokens(tokenizer: Any, text: str, count: int) -> list[int]:
    """`count` tokens of a text, from its start again where it ends."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return (ids * (count // len(ids) + 1))[:count]


def _room(like: torch.Tensor, tokens: int) -> torch.Tensor:
    return like.new_empty((*like.shape[:2], tokens, like.shape[3]))
