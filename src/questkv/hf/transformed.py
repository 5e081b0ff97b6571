"""New keys and values that a model changes between its cache and its attention, token by token.

Multi-head latent attention caches a token's latent and expands what the cache returns into keys and values (DeepSeek,
Kimi, MiniCPM3); JetMoe repeats heads. Such a step makes each token from that token alone, so it's done for the new
tokens only, and their pages hold what comes out.
"""

from __future__ import annotations

from typing import Any

import torch

# Functions of torch that make each token from that token alone, as far as the attention function can't see that they
# didn't: it checks that as many tokens come back. Whatever else a model does with cached tokens is refused.
_TOKEN_WISE = frozenset(
    ("linear", "view", "reshape", "transpose", "permute", "split", "split_with_sizes", "chunk", "expand", "repeat")
    + ("contiguous", "new_empty", "copy_", "cat", "concat", "__getitem__", "flatten", "unflatten", "unbind")
)
# What reads a tensor's form and none of its numbers.
_FORM = frozenset(("__get__", "size", "dim", "__repr__", "__len__"))


def reads_form(func: Any) -> bool:
    """Whether a function of torch reads a tensor's shape, dtype or device only."""
    return name_of(func) in _FORM


def is_token_wise(func: Any) -> bool:
    """Whether a function of torch makes each token from that token alone."""
    return name_of(func) in _TOKEN_WISE


def name_of(func: Any) -> str:
    """What a function of torch is called."""
    return str(getattr(func, "__name__", func))


class TransformedStates(torch.Tensor):
    """[B, H, n, D] keys or values of new tokens on the way from the cache to the attention function.

    Attributes:
        layer: The cache's layer that they belong to.
    """

    layer: Any

    @staticmethod
    def of(layer: Any, states: torch.Tensor) -> TransformedStates:
        """Those that `update` was given."""
        marked = states.as_subclass(TransformedStates)
        marked.layer = layer
        return marked

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute token by token; refuse all else."""
        kwargs = kwargs or {}
        layer = next(state.layer for state in _states((*args, *kwargs.values())) if hasattr(state, "layer"))
        if not (reads_form(func) or is_token_wise(func)):
            raise layer.refusal(name_of(func))
        out = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        for state in _states((out,)):
            state.layer = layer
        return out


def _states(values: Any) -> list[TransformedStates]:
    """Those among arguments or results, which may be in lists."""
    found: list[TransformedStates] = []
    for value in values:
        if isinstance(value, TransformedStates):
            found.append(value)
        elif isinstance(value, tuple | list):
            found.extend(_states(value))
    return found
