"""Rotary embeddings whose frequencies depend on how long the sequence is (`longrope`, `dynamic`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


@contextmanager
def read_as(model: torch.nn.Module, tokens: int) -> Iterator[None]:
    """Inside, every forward rotates with the frequencies of a sequence of `tokens` tokens, whatever part it is fed.

    transformers takes the frequencies from the highest position that a forward is fed. A prompt that is read in chunks
    would get those of a short sequence first and others later. Of nested blocks the outer one counts. Embeddings whose
    frequencies are always the same are left alone.

    Args:
        model: A model of transformers.
        tokens: Length of the whole sequence.
    """
    fixed: list[tuple[Any, Any]] = [(part, part.rope_type) for part in model.modules() if _kinds(part)]
    for module, _ in fixed:
        _take_frequencies(module, tokens)
    with ExitStack() as stack:
        for module, kind in fixed:
            # transformers' wrapper updates the frequencies of certain types only, and nothing else asks for the type.
            stack.callback(setattr, module, "rope_type", kind)
            module.rope_type = "default" if isinstance(kind, str) else dict.fromkeys(kind, "default")
            stack.enter_context(_fed_last_position(module, tokens))
        yield


def reads_alike(model: torch.nn.Module, tokens: int, others: int) -> bool:
    """Whether sequences of these two lengths are rotated with the same frequencies."""
    return all(
        _sequence_kind(module, name, layers, tokens) == _sequence_kind(module, name, layers, others)
        for module in model.modules()
        for layers, name in _kinds(module).items()
    )


def original_length(module: Any, layers: str | None) -> int:
    """Tokens up to which a rotary embedding keeps the frequencies that it was trained with."""
    parameters = module.config.rope_parameters
    own = parameters if layers is None else parameters[layers]
    return int(own.get("original_max_position_embeddings") or module.original_max_seq_len)


def _kinds(module: torch.nn.Module) -> dict[str | None, str]:
    """The types of a rotary embedding that depend on the length, by the kind of layers that they serve."""
    kind = getattr(module, "rope_type", None)
    kinds: dict[str | None, str] = {None: kind} if isinstance(kind, str) else kind if isinstance(kind, dict) else {}
    return {layers: name for layers, name in kinds.items() if "dynamic" in name or name == "longrope"}


def _sequence_kind(module: Any, name: str, layers: str | None, tokens: int) -> int:
    """A number that is equal for two lengths just where their frequencies are."""
    if name == "longrope":
        return int(tokens > original_length(module, layers))
    return max(tokens, int(module.original_max_seq_len))


@contextmanager
def _fed_last_position(module: torch.nn.Module, tokens: int) -> Iterator[None]:
    """Feed an embedding the sequence's last position too: PhiMoE's looks at them itself, beside the wrapper."""

    def add(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        last = positions.new_full((*positions.shape[:-1], 1), tokens - 1)
        longer = torch.cat([positions, last], dim=-1)
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": longer}
        return (args[0], longer, *args[2:]), kwargs

    def cut(module: Any, args: Any, out: Any) -> Any:
        return out[..., :-1, :] if isinstance(out, torch.Tensor) else tuple(part[..., :-1, :] for part in out)

    hooks = module.register_forward_pre_hook(add, with_kwargs=True), module.register_forward_hook(cut)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def _take_frequencies(module: Any, tokens: int) -> None:
    device = next(module.buffers()).device
    for layers in _kinds(module):
        arguments = {} if layers is None else {"layer_type": layers}
        # Of a single token first: `dynamic` keeps those of the longest sequence since the last short one.
        for position in (0, max(tokens, 1) - 1):
            module(torch.empty(0, device=device), torch.tensor([[position]], device=device), **arguments)
