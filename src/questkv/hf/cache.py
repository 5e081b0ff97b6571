"""`QuestCache`: a transformers cache whose full-attention layers lie in pages."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from questkv.config import QuestConfig
from questkv.errors import CacheMismatchError, UnsupportedError
from questkv.hf.attention import mark_own_layer
from questkv.hf.compile.operator import new_handle
from questkv.hf.hybrid_layer import PagedHybridLayer
from questkv.hf.layer import PagedLayer
from questkv.hf.local_attention import local_attention
from questkv.hf.own_layers import OwnLayers
from questkv.hf.report import CacheReport, LayerReport
from questkv.hf.state import Observer, PagedState
from questkv.hf.support import paged_layers
from questkv.kernels import Softmax

# A model with no more than this share of full-attention layers has no slack for pages that a score missed.
_FEW_GLOBAL_LAYERS = 0.25


class QuestCache(Cache):
    """KV cache that decodes from the pages a token's query needs (Quest, arXiv 2406.10774).

    Full-attention layers are paged; sliding-window and other layers keep transformers' own. To be used with a model
    whose attention implementation is ``questkv``.

    Args:
        model_config: The model's config (`model.config`); a composite one's text config is used.
        config: The method's configuration; the default one if None.
        max_tokens: Most tokens that the pages may hold over all sequences; None leaves it to the memory.

    Raises:
        UnsupportedError: The model has no full-attention layer to page.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="questkv")
        >>> cache = QuestCache(model.config, QuestConfig(token_budget=2048))
        >>> model.generate(**inputs, cache=cache)
        >>> print(cache.report())
    """

    def __init__(
        self, model_config: PreTrainedConfig, config: QuestConfig | None = None, *, max_tokens: int | None = None
    ) -> None:
        self.config = config if config is not None else QuestConfig()
        if not isinstance(self.config, QuestConfig):
            raise TypeError(f"[QuestCache] config: expected a QuestConfig, got {type(self.config).__name__}")
        if max_tokens is not None and max_tokens < self.config.page_size:
            raise ValueError(
                f"[QuestCache] max_tokens: expected at least one page ({self.config.page_size}), got {max_tokens}"
            )
        layers = DynamicCache(config=model_config).layers
        # They hold an image's or another input's keys, and don't run where there is none.
        cross = getattr(model_config.get_text_config(decoder=True), "cross_attention_layers", None) or ()
        paged = [i for i in paged_layers(model_config, layers) if i not in cross]
        _warn_if_few(len(paged), len(layers))
        self.state = PagedState(self.config, paged, max_tokens)
        super().__init__(
            layers=[self._paged(i, own, model_config) if i in paged else own for i, own in enumerate(layers)]
        )
        self.state.own = OwnLayers(_own(self.layers))
        # The layer whose update begins a forward.
        self._first_layer = next(
            i for i, layer in enumerate(layers) if i in paged or getattr(layer, "is_sliding", False)
        )
        # Tokens of the sequence whose rotary frequencies the cached keys have, where `prefill` chose them; else 0.
        self.read_as = 0
        self._handle: torch.Tensor | None = None
        self._local_masks: dict[int, torch.Tensor | None] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand new keys and values to their layer; see `PagedLayer.update`."""
        layer = self.layers[layer_idx]
        if layer_idx == self._first_layer:
            self._check_own_layers()
        if not isinstance(layer, PagedLayer):
            # Such a layer can be put back only where its model's forwards are watched.
            self.state.attendance.find_model()
        keys, values = layer.update(key_states, value_states, *args, **kwargs)
        if not isinstance(layer, PagedLayer):
            mark_own_layer(keys)
        return keys, values

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Hand a new state to a linear-attention layer; see `Cache.update_conv_state`."""
        self.state.attendance.find_model()
        states: torch.Tensor = super().update_conv_state(conv_states, layer_idx, *args, **kwargs)
        return states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Hand a new state to a linear-attention layer; see `Cache.update_recurrent_state`."""
        self.state.attendance.find_model()
        states: torch.Tensor = super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)
        return states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of all complete forwards, padding included; the same in every layer."""
        return self.state.columns

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Columns that a forward of `query_length` new ones sees in a layer, and the first one's number."""
        if self.state.own.layers and self.state.is_interrupted:
            self.state.settle()
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        return sizes

    def forward_begins(self, model: PreTrainedModel) -> None:
        """A forward that was given this cache begins; see `questkv.hf.watch`."""
        self.state.forward_begins(model)

    def forward_returned(self) -> None:
        """It has returned."""
        self.state.forward_returned()

    @property
    def handle(self) -> torch.Tensor:
        """What leads ``torch.ops.questkv.step`` to this cache."""
        if self._handle is None:
            self._handle = new_handle(self)
        return self._handle

    def begin_step(
        self, batch: int, mask: torch.Tensor | None, local_masks: dict[int, torch.Tensor | None] | None = None
    ) -> None:
        """Begin a forward of one new token a sequence, whose layers then call `step`.

        Args:
            batch: B.
            mask: [B, columns] bool 2-D padding mask over all columns, the new one included, or None.
            local_masks: What SDPA takes as a mask, for every layer that isn't paged.

        Raises:
            CacheMismatchError: The batch or the mask isn't the cache's, or a sliding window was left by an interrupted
                forward.
            PoolFullError: The tokens don't fit; the cache is as it was.
        """
        self._check_own_layers()
        self.state.begin(batch, 1, mask)
        self._local_masks = local_masks or {}

    def step(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softmax: Softmax
    ) -> torch.Tensor:
        """A layer of the step that `begin_step` began; shapes as in ``torch.ops.questkv.step``, no gradients."""
        own = self.layers[layer]
        if isinstance(own, PagedLayer):
            return self.state.attend(layer, query, (key, value), None, softmax, begun=True)
        keys, values = own.update(key, value)
        module = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], is_causal=True)
        return local_attention(module, query, keys, values, self._local_masks[layer], softmax)

    def report(self) -> CacheReport:
        """What was read and what is held."""
        groups = self.state.groups.values()
        there, copied = self.state.counts.fetches
        layers = tuple(LayerReport(layer, *self.state.counts.of(layer)) for layer in self.state.paged_layers)
        return CacheReport(
            tokens=tuple(self.state.lengths),
            pages_read=sum(layer.pages_read for layer in layers),
            pages_held=sum(layer.pages_held for layer in layers),
            bytes_held=sum(group.pool.bytes_held for group in groups),
            box_bytes=sum(group.pool.box_bytes_held for group in groups),
            bytes_reserved=sum(group.pool.bytes_reserved for group in groups),
            layers=layers,
            host_bytes=sum(group.pool.host_bytes_held for group in groups),
            fetched_bytes=sum(group.pool.fetched_bytes for group in groups),
            pages_there=there,
            pages_fetched=copied,
        )

    def keys_values(self, layer: int, sequence: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values that a paged layer holds of one sequence, in token order, without padding.

        Args:
            layer: The model's layer.
            sequence: Which sequence of the batch.

        Returns:
            [Hkv, L, D] each: a copy, or a view of the pages where they lie in one run. Pages in eight bits are decoded
            and rounded to the model's type. While a forward is under way, its tokens are among them once the layer has
            attended.

        Raises:
            CacheMismatchError: The layer isn't paged, or holds no token.
            IndexError: No such sequence.
        """
        return self.state.keys_values(layer, sequence)

    def fill(self, keys_values: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Append tokens whose keys and values were computed elsewhere, to every layer at once; nothing is attended.

        Args:
            keys_values: For each of the model's layers, keys [B, Hkv, n, D] and values [B, Hkv, n, Dv] as attention
                sees them, after the rotary embedding and without padding. They are copied into pages.

        Raises:
            UnsupportedError: The model has layers that aren't paged, or the pairs are latents, which a model with
                multi-head latent attention expands to keys and values.
            ValueError: Not one pair a layer, or pairs of different B or n; the cache is as it was.

        Example:
            >>> cache = QuestCache(model.config)
            >>> cache.fill([(layer.keys, layer.values) for layer in dynamic_cache.layers])
        """
        if self.state.own.layers:
            raise UnsupportedError(
                f"[fill] keys_values: expected a model whose layers are all paged, got {len(self.state.own.layers)} of "
                "another kind"
            )
        if len(keys_values) != len(self.layers):
            raise ValueError(f"[fill] keys_values: expected {len(self.layers)} pairs, got {len(keys_values)}")
        shapes = {(part.shape[0], part.shape[2]) for pair in keys_values for part in pair}
        if len(shapes) != 1:
            raise ValueError(f"[fill] keys_values: expected one B and n in all layers, got {sorted(shapes)}")
        text = self.layers[0].model_config.get_text_config(decoder=True)
        latents = getattr(text, "kv_lora_rank", None), getattr(text, "qk_rope_head_dim", None)
        if any((keys.shape[-1], values.shape[-1]) == latents for keys, values in keys_values):
            raise UnsupportedError(
                f"[fill] keys_values: expected keys and values, got latents of {latents[0]} and {latents[1]} channels, "
                "which the model expands to them; feed the tokens to the model instead"
            )
        self.state.fill(dict(enumerate(keys_values)))

    @contextmanager
    def observe(self, observer: Observer) -> Iterator[None]:
        """Inside the block, call `observer(layer, query, softmax)` whenever a paged layer has attended.

        By then the layer's new tokens are written, so `keys_values(layer)` holds all that the queries saw; query is
        [B, Hq, n, D], padding included. Forks made inside are not observed. There is one observer at a time: of nested
        blocks, the inner one's.
        """
        before, self.state.observer = self.state.observer, observer
        try:
            yield
        finally:
            self.state.observer = before

    def fork(self, config: QuestConfig | None = None) -> QuestCache:
        """A second cache with the same tokens; pages are shared and copied only where one of the two writes.

        Args:
            config: Another configuration to decode with, of the same `page_size`, `box_dtype`, `kv_dtype`, `span_pages`
                and `offload`; None keeps this one.

        Raises:
            ConfigError: The other configuration's pages would differ from those that are shared.
        """
        if config is not None and not isinstance(config, QuestConfig):
            raise TypeError(f"[fork] config: expected a QuestConfig, got {type(config).__name__}")
        self.state.settle()
        other = QuestCache.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._handle, other._local_masks = None, {}
        other.config = self.config if config is None else config
        other.state = self.state.fork(other.config)
        try:
            other.layers = [
                layer.over(other.state) if isinstance(layer, PagedLayer) else copy.deepcopy(layer)
                for layer in self.layers
            ]
            other.state.own = OwnLayers(_own(other.layers))
            return other
        except BaseException:
            other.state.free()
            raise

    def __copy__(self) -> QuestCache:
        """A fork: nothing that one cache does is seen by the other."""
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> QuestCache:
        """A fork: nothing that one cache does is seen by the other."""
        return self.fork()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused, by pickle and torch.save."""
        return self.state.__reduce_ex__(protocol)

    def reset(self) -> None:
        """Forget every token; the cache can be used again."""

        def reset() -> None:
            self.state.reset()
            self.state.own.reset()

        self.state.change(reset)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -`tokens_to_remove` tokens (a number <= 0, as transformers has it).

        Raises:
            ValueError: A positive number, or more tokens than there are; the cache is as it was.
            RuntimeError: A sliding window that is full and keeps no past (`activate_past_recording`); likewise.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"[crop] tokens_to_remove: expected a number <= 0, got {tokens_to_remove}")
        self.state.settle()
        self.state.check_crop(-tokens_to_remove)

        def crop() -> None:
            self.state.own.crop(tokens_to_remove)
            self.state.crop(-tokens_to_remove)

        self.state.change(crop)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Sequence i becomes what sequence beam_idx[i] was (beam search)."""
        self._reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times, sharing its pages."""
        self._reorder(self._rows().repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences at `indices` (numbers, or a bool mask)."""
        self._reorder(self._rows()[indices.cpu()])

    def _rows(self) -> torch.Tensor:
        """[B] int64 the numbers of the sequences."""
        self.state.settle()
        return torch.arange(self.state.batch_size or 0)

    def _reorder(self, indices: torch.Tensor) -> None:
        def reorder() -> None:
            self.state.reorder(indices)
            self.state.own.reorder(indices)

        self.state.change(reorder)

    def _paged(self, index: int, own: CacheLayerMixin, model_config: PreTrainedConfig) -> PagedLayer:
        """What takes the place of a layer of transformers' that holds every token's keys and values."""
        if isinstance(own, LinearAttentionCacheLayerMixin):
            linear = LinearAttentionLayer(number_of_states=own.number_of_states)
            return PagedHybridLayer(self.state, index, model_config, linear)
        return PagedLayer(self.state, index, model_config)

    def _check_own_layers(self) -> None:
        """Between forwards every layer holds the same columns.

        A forward that was interrupted can be undone in pages, but not in a sliding window.
        """
        for layer in self.state.own.layers:
            if getattr(layer, "is_sliding", False) and layer.get_seq_length() != self.state.columns:
                raise CacheMismatchError(
                    f"[QuestCache] sliding-window layers: expected the {self.state.columns} tokens that the paged "
                    f"layers hold, got {layer.get_seq_length()}, left by a forward that was interrupted; call "
                    "cache.reset() and start again"
                )


def _own(layers: Sequence[Any]) -> list[Any]:
    """The layers that are transformers' own, and what a layer keeps besides its pages."""
    own = (layer.linear if isinstance(layer, PagedHybridLayer) else layer for layer in layers)
    return [layer for layer in own if not isinstance(layer, PagedLayer)]


def _warn_if_few(paged: int, layers: int) -> None:
    if paged < layers and paged <= _FEW_GLOBAL_LAYERS * layers:
        warnings.warn(
            f"only {paged} of this model's {layers} layers are global, so they have no slack for pages that a score "
            "misses: Gemma 3 270M, a model of this kind, found 3 of 10 keys in 6,000 tokens of a novel with a budget "
            "of 1024 and 4 with 2048, under every group rule, where the full cache found 5. Use a larger budget, and "
            "compare answers with the full cache (token_budget=1.0) on your own text",
            UserWarning,
            stacklevel=3,
        )
