"""Telling a cache when a forward of its model begins and when it has returned.

A cache sees the layers' calls only, so by itself it can't tell a forward that an exception ended from one of a model
that leaves layers out. The model's own forward can: it returns, or it doesn't.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakSet

import torch
from transformers import Cache, PreTrainedModel

_watched: WeakSet[PreTrainedModel] = WeakSet()


class Watcher(Protocol):
    """A cache that wants to know of its model's forwards."""

    def forward_begins(self, model: PreTrainedModel) -> None:
        """A forward that was given this cache begins."""

    def forward_returned(self) -> None:
        """It has returned: every layer that it runs has run."""


@contextmanager
def watching(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block, a model's forward tells the cache that it is given."""
    hooks = _add_hooks(model)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def watch(model: PreTrainedModel) -> None:
    """`watching` for as long as the model lives, for those who give a cache to a model and attach nothing."""
    if model not in _watched:
        _add_hooks(model)
        _watched.add(model)


def running_model() -> PreTrainedModel | None:
    """The model whose forward is running: the outermost one among the callers, None if there is none.

    For the first forward of a model that nobody watches yet.
    """
    found = None
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(owner, PreTrainedModel):
            found = owner
        elif found is not None and frame.f_code.co_name == "generate":
            break  # what lies above is another model's, which this one drafts for
        frame = frame.f_back  # type: ignore[assignment]
    return found


def is_running(model: PreTrainedModel) -> bool:
    """Whether a call of the model is among the callers, its hooks included."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is model:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def attention_layers(model: torch.nn.Module) -> set[int]:
    """The numbers of the layers that a model has, fewer than its config says in a pruned one; empty if not known."""
    layers = ((type(module), getattr(module, "layer_idx", None)) for module in model.modules())
    times = Counter((kind, number) for kind, number in layers if isinstance(number, int))
    # Stacks that share numbers run several times in a forward and give the cache others (HRM).
    return set() if max(times.values(), default=0) > 1 else {number for _, number in times}


def _add_hooks(model: PreTrainedModel) -> list[Any]:
    return [
        model.register_forward_pre_hook(_begins, with_kwargs=True),
        model.register_forward_hook(_returned, with_kwargs=True),
    ]


def _begins(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for cache in _watchers(args, kwargs):
        cache.forward_begins(model)


def _returned(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    for cache in _watchers(args, kwargs):
        cache.forward_returned()


def _watchers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Watcher]:
    given = (*args, *kwargs.values())
    return (value for value in given if isinstance(value, Cache) and hasattr(value, "forward_returned"))
