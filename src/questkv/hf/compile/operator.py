"""``torch.ops.questkv.step``: a layer's part of a compiled decode step, which torch.compile doesn't look into.

The operator gets the cache by a number in a tensor. A graph holds no number of its own, so one graph serves every cache
of a model, and nothing that a cache holds (its length, its page table) can make torch compile again.
"""

from __future__ import annotations

import itertools
from typing import Protocol
from weakref import WeakValueDictionary

import torch

from questkv.errors import CacheMismatchError
from questkv.kernels import Softmax

# The keyword under which the handle goes from the model's forward to its attention layers.
HANDLE = "questkv_handle"


class SteppingCache(Protocol):
    """A cache whose layers attend when the operator is called."""

    def step(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softmax: Softmax
    ) -> torch.Tensor:
        """Take in a layer's new token and attend it; shapes as in `step`."""


_caches: WeakValueDictionary[int, SteppingCache] = WeakValueDictionary()
_numbers = itertools.count()


def new_handle(cache: SteppingCache) -> torch.Tensor:
    """A [] int64 tensor that leads the operator to a cache for as long as that lives."""
    number = next(_numbers)
    _caches[number] = cache
    # An inference tensor is of another kind to torch.compile, and would make it compile again.
    with torch.inference_mode(False):
        return torch.tensor(number)


def step(
    handle: torch.Tensor,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Write one new token of every sequence into a layer and attend it.

    Args:
        handle: [] int64 on the CPU, see `new_handle`.
        layer: The model's layer.
        query: [B, Hq, 1, D].
        key: [B, Hkv, 1, D].
        value: [B, Hkv, 1, Dv].
        scale: Softmax scale.
        softcap: As in `kernels.attend`.
        sinks: As in `kernels.attend`.

    Returns:
        [B, 1, Hq, Dv] contiguous.
    """
    cache = _caches.get(int(handle))
    if cache is None:
        raise CacheMismatchError(f"[step] handle: expected that of a living QuestCache, got {int(handle)}")
    # The graph expects the query's type, under autocast too.
    return cache.step(layer, query, key, value, Softmax(scale, softcap, sinks)).to(query.dtype).contiguous()


def _fake_step(
    handle: torch.Tensor,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    batch, heads, width, _ = query.shape
    return query.new_empty((batch, width, heads, value.shape[3]))


_library = torch.library.Library("questkv", "FRAGMENT")
_library.define(
    "step(Tensor handle, int layer, Tensor query, Tensor key, Tensor value, float scale, float? softcap, Tensor? sinks)"
    " -> Tensor"
)
_library.impl("step", step, "CompositeExplicitAutograd")
torch.library.register_fake("questkv::step", _fake_step, lib=_library)
