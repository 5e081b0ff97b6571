"""A paged layer, and the handle it hands to the attention function in place of keys and values."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers.cache_utils import CacheLayerMixin

from questkv.errors import CacheMismatchError, UnsupportedError
from questkv.hf.group import Softmax
from questkv.hf.latents import NewStates
from questkv.hf.state import PagedState


class AttendingLayer(Protocol):
    """A cache layer that attends by itself: what a `PagedKeys` handle leads the attention function to."""

    def attend(self, query: torch.Tensor, mask: torch.Tensor | None, softmax: Softmax) -> torch.Tensor:
        """Take in what `update` was given and attend.

        Args:
            query: [B, Hq, n, D].
            mask: [B, columns] bool 2-D padding mask over all columns, or None.
            softmax: Scale, soft cap and sinks.

        Returns:
            [B, n, Hq, Dv].
        """


class PagedKeys(torch.Tensor):
    """Stands for a layer's keys and values on their way to the attention function.

    It holds no data. Any other attention function that computes with it gets an error instead of a wrong answer.
    """

    layer: AttendingLayer
    sources: tuple[torch.Tensor, ...]

    @staticmethod
    def of(layer: AttendingLayer, keys: torch.Tensor, values: torch.Tensor) -> PagedKeys:
        """A handle of the keys' dtype and device, with no tokens.

        Args:
            layer: What attends.
            keys: [B, Hkv, n, D] the new keys.
            values: Like `keys`.
        """
        empty = torch.empty((*keys.shape[:2], 0, keys.shape[3]), dtype=keys.dtype, device=keys.device)
        handle = empty.as_subclass(PagedKeys)
        handle.layer = layer
        # What a gradient would have to get to; kept only where one could be asked for.
        handle.sources = (keys, values) if torch.is_grad_enabled() else ()
        return handle

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what the shape is; refuse to compute."""
        # Reading shape, dtype or device is harmless, and some models do between cache and attention.
        if getattr(func, "__name__", "") in ("__get__", "size", "dim", "__repr__", "__len__"):
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if torch.compiler.is_compiling():
            raise UnsupportedError(
                "[questkv] torch.compile: expected a model whose forward isn't compiled, got one that torch.compile "
                "traces; leave that out, and use questkv.attach(model, compile=True) for compiled decode steps"
            )
        raise CacheMismatchError(
            "[questkv] attention: expected a QuestCache to be read by the 'questkv' attention function, got another; "
            "call model.set_attn_implementation('questkv') or use questkv.attach(model)"
        )


class PagedLayer(CacheLayerMixin):
    """A full-attention layer whose keys and values lie in pages.

    `update` keeps the new keys and values until the attention function, which knows the padding, writes them. What
    concerns all layers at once (crop, reorder, reset) is done by the cache, since they share a page table.

    Args:
        state: What the cache's paged layers share.
        index: The model's layer.
        latents: Widths of what `update` gets from a model with multi-head latent attention (see `questkv.hf.latents`).
    """

    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, state: PagedState, index: int, latents: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.state = state
        self.index = index
        self.latents = latents
        self._new: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: storage is made when tokens are written."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep keys [B, Hkv, n, D] and values [B, Hkv, n, Dv] for the attention function; a handle takes their place.

        Latents [B, 1, n, ...] are given back as they are, for the model to expand.
        """
        if self.latents == (key_states.shape[-1], value_states.shape[-1]):
            return NewStates.of(self, key_states), NewStates.of(self, value_states)
        self._new = (key_states, value_states)
        handle = PagedKeys.of(self, key_states, value_states)
        return handle, handle

    @torch.no_grad()
    def attend(
        self,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        softmax: Softmax,
    ) -> torch.Tensor:
        """Write what `update` kept and attend [B, Hq, n, D] queries; returns [B, n, Hq, Dv]."""
        new, self._new = self._new, None
        return self.state.attend(self.index, query, new, mask, softmax)

    @torch.no_grad()
    def attend_expanded(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        softmax: Softmax,
    ) -> torch.Tensor:
        """See `questkv.hf.latents.ExpandingLayer`."""
        return self.state.attend(self.index, query, (keys, values), mask, softmax)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns (padding included) that a forward of `query_length` new ones sees, and the first one's number."""
        return self.state.columns + query_length, 0

    def get_seq_length(self) -> int:
        """Columns of all complete forwards, padding included."""
        return self.state.columns

    def get_max_length(self) -> int:
        """-1: no maximum that is known in columns."""
        return -1

    def offload(self) -> None:
        """Not supported: a layer's pages don't come and go as a whole."""
        raise UnsupportedError(
            "[QuestCache] offloading: expected pages to stay where they are; QuestConfig(offload='host') keeps them in "
            "host memory and fetches those that are read"
        )

    def prefetch(self) -> None:
        """Not supported: see `offload`."""
        self.offload()

    def reset(self) -> None:
        """Done by the cache for all layers at once."""
        self._whole_cache("reset()")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Done by the cache for all layers at once."""
        self._whole_cache("reorder_cache(beam_idx)")

    def crop(self, tokens_to_remove: int) -> None:
        """Done by the cache for all layers at once."""
        self._whole_cache("crop(n)")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Done by the cache for all layers at once."""
        self._whole_cache("batch_repeat_interleave(n)")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Done by the cache for all layers at once."""
        self._whole_cache("batch_select_indices(indices)")

    def _whole_cache(self, call: str) -> None:
        raise UnsupportedError(f"[QuestCache] layer {self.index}: expected the call on the cache: cache.{call}")
