"""A paged layer, and the handle it hands to the attention function in place of keys and values."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from questkv.errors import CacheMismatchError, UnsupportedError
from questkv.hf.state import PagedState
from questkv.hf.transformed import TransformedStates, is_token_wise, name_of, reads_form
from questkv.kernels import Softmax

# The attention implementation's name in transformers.
NAME = "questkv"


class AttendingLayer(Protocol):
    """A cache layer that attends by itself: what a `PagedKeys` handle leads the attention function to."""

    def attend(self, query: torch.Tensor, mask: torch.Tensor | None, softmax: Softmax) -> torch.Tensor:
        """Take in what `update` was given and attend.

        Args:
            query: [B, Hq, n, D].
            mask: [B, columns] bool 2-D padding mask over all columns, or None.
            softmax: Scale, soft cap and sinks.

        Returns:
            [B, n, Hq, D].
        """


class PagedKeys(torch.Tensor):
    """Stands for a layer's keys and values on their way to the attention function.

    It holds no data. Any other attention function that computes with it gets an error instead of a wrong answer.
    """

    layer: AttendingLayer
    sources: tuple[torch.Tensor, ...]
    stands_for: torch.Tensor | None

    @staticmethod
    def of(
        layer: AttendingLayer, keys: torch.Tensor, values: torch.Tensor, stands_for: torch.Tensor | None = None
    ) -> PagedKeys:
        """A handle of the new tokens' shape, dtype and device.

        Args:
            layer: What attends.
            keys: [B, Hkv, n, D] the new keys.
            values: Like `keys`.
            stands_for: The one of the two in whose place the handle goes, if the model may change it token by token
                before the attention function (see `TransformedStates`); None if it may not.
        """
        form = keys if stands_for is None else stands_for
        # One number stands in every place; the shape is what a model may read.
        handle = form.new_empty(()).expand(form.shape).as_subclass(PagedKeys)
        handle.layer = layer
        handle.stands_for = stands_for
        # What a gradient would have to get to; kept only where one could be asked for.
        handle.sources = (keys, values) if torch.is_grad_enabled() else ()
        return handle

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what the shape is; compute token by token with what it stands for; refuse all else."""
        # Reading shape, dtype or device is harmless, and some models do between cache and attention.
        if reads_form(func):
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if torch.compiler.is_compiling():
            raise UnsupportedError(
                "[questkv] torch.compile: expected a model whose forward isn't compiled, got one that torch.compile "
                "traces; leave that out, and use questkv.attach(model, compile=True) for compiled decode steps"
            )
        if is_token_wise(func):
            given = {key: _without_handles(value, name_of(func)) for key, value in (kwargs or {}).items()}
            return func(*(_without_handles(arg, name_of(func)) for arg in args), **given)
        raise _refusal_of((*args, *(kwargs or {}).values()), name_of(func))


def _without_handles(value: Any, name: str) -> Any:
    """An argument of a function, with the new tokens in the place of their handles."""
    if isinstance(value, PagedKeys):
        if value.stands_for is None:
            raise _refusal_of((value,), name)
        return TransformedStates.of(value.layer, value.stands_for)
    if isinstance(value, tuple | list):
        return type(value)(_without_handles(item, name) for item in value)
    return value


def _refusal_of(args: Any, name: str) -> Exception:
    """The error for a function that computes with a handle."""
    flat = [item for arg in args for item in (arg if isinstance(arg, tuple | list) else (arg,))]
    layer = next((item.layer for item in flat if isinstance(item, PagedKeys)), None)
    return layer.refusal(name) if isinstance(layer, PagedLayer) else _mismatch()


def _mismatch() -> CacheMismatchError:
    return CacheMismatchError(
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
        model_config: The model's config, for what an error says.
    """

    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, state: PagedState, index: int, model_config: PreTrainedConfig) -> None:
        super().__init__()
        self.state = state
        self.index = index
        self.model_config = model_config
        self._new: tuple[torch.Tensor, torch.Tensor] | None = None

    def over(self, state: PagedState) -> PagedLayer:
        """The same layer over another state (a fork's)."""
        return PagedLayer(state, self.index, self.model_config)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: storage is made when tokens are written."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep [B, Hkv, n, D] keys and values for the attention function and return handles in their place."""
        self._new = new = (key_states, value_states)
        return PagedKeys.of(self, *new, stands_for=key_states), PagedKeys.of(self, *new, stands_for=value_states)

    @property
    def new(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """[B, Hkv, n, D] keys and values that wait for the attention function; None if another layer's are shared."""
        return self._new

    def replace(self, keys: torch.Tensor, values: torch.Tensor) -> PagedKeys:
        """Keep what the model has made of the new keys and values instead; gives their handle.

        Raises:
            UnsupportedError: It isn't one key and value [B, Hkv, n, D] for every new token.
        """
        form = None if self._new is None else (self._new[0].shape[0], self._new[0].shape[2])
        if form is None or any((states.shape[0], states.shape[2]) != form for states in (keys, values)):
            raise self.refusal("mixing tokens")
        self._new = (keys, values)
        return PagedKeys.of(self, keys, values)

    def refusal(self, name: str) -> CacheMismatchError | UnsupportedError:
        """The error for a model that computes with cached keys and values by itself, by the function's name."""
        if self.model_config.get_text_config(decoder=True)._attn_implementation != NAME:
            return _mismatch()
        return UnsupportedError(
            "[questkv] cached keys and values: expected the attention function to be the first that computes with all "
            f"of them, got the model's own computation ({name}); run this model without questkv"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedLayer:
        """Refused: its pages belong to the whole cache. Models that run their layers several times do so."""
        raise UnsupportedError(
            f"[QuestCache] layer {self.index}: expected a model that runs each layer once in a forward, or a copy of "
            "the whole cache, got a copy of one layer; run this model without questkv"
        )

    @torch.no_grad()
    def attend(
        self,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        softmax: Softmax,
    ) -> torch.Tensor:
        """Write what `update` kept and attend [B, Hq, n, D] queries; returns [B, n, Hq, D]."""
        new, self._new = self._new, None
        return self.state.attend(self.index, query, new, mask, softmax)

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
