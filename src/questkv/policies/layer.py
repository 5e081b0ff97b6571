"""A layer that holds tokens as plain tensors and attends in PyTorch: all of them, or what a method leaves."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from questkv.errors import UnsupportedError
from questkv.hf.layer import PagedKeys
from questkv.kernels import Softmax
from questkv.policies.softmax import attention_logits, attention_weights
from questkv.policies.tokens import HeldTokens


class HeldLayer(CacheLayerMixin):
    """Holds and reads every token; the base of the layers that hold or read less.

    Batch 1. New tokens are attended one by one, so n in one forward give what n single steps give.

    Args:
        tokens: What the layer holds of the prompt; it may be changed.
        seen: Tokens of the sequence so far, dropped ones included.

    Attributes:
        tokens_read: Tokens that the latest query read per KV head, its own included; 0 before the first.
    """

    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, tokens: HeldTokens, seen: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.seen = seen
        self.tokens_read = 0
        self._new: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the prompt's tokens are there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep [1, Hkv, n, D or Dv] keys and values for the attention function and return a handle in their place."""
        self._keep(key_states, value_states)
        new = (key_states, value_states)
        return PagedKeys.of(self, *new, stands_for=key_states), PagedKeys.of(self, *new, stands_for=value_states)

    def replace(self, keys: torch.Tensor, values: torch.Tensor) -> PagedKeys:
        """See `PagedLayer.replace`."""
        if self._new is None or any(part.shape[2] != self._new[0].shape[1] for part in (keys, values)):
            raise self.refusal("mixing tokens")
        self._keep(keys, values)
        return PagedKeys.of(self, keys, values)

    def refusal(self, name: str) -> UnsupportedError:
        """The error for a model that computes with cached keys and values by itself, by the function's name."""
        return UnsupportedError(
            f"[policies] cached keys and values: expected the attention function to be the first to compute with all "
            f"of them, got the model's own computation ({name})"
        )

    def _keep(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if keys.shape[0] != 1:
            raise UnsupportedError(f"[policies] batch: expected one sequence, got {keys.shape[0]}")
        self._new = (keys[0], values[0])

    @torch.no_grad()
    def attend(self, query: torch.Tensor, mask: torch.Tensor | None, softmax: Softmax) -> torch.Tensor:
        """Attend [1, Hq, n, D] queries, each behind its own new token; returns [1, n, Hq, Dv]."""
        new, self._new = self._new, None
        if new is None:
            raise UnsupportedError("[policies] layer: expected keys and values of its own, got another layer's")
        if mask is not None and not bool(mask.all()):
            raise UnsupportedError("[policies] attention_mask: expected no padding, got some")
        out = query.new_empty((*query.shape[:3], new[1].shape[-1]))
        for i in range(query.shape[2]):
            keys, values = new[0][:, i], new[1][:, i]
            out[0, :, i] = self._step(query[0, :, i], keys, values, softmax).to(query.dtype)
            self.seen += 1
        return out.transpose(1, 2)

    def _step(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softmax: Softmax) -> torch.Tensor:
        """Add one token (key [Hkv, D], value [Hkv, Dv]) and attend its query [Hq, D]; returns [Hq, Dv] float32."""
        self.tokens.add(key, value, self.seen)
        grouped = query.unflatten(0, (len(key), -1))
        logits = attention_logits(grouped, self.tokens.keys, softmax)
        return self._read(logits, self.tokens.values, softmax)[0].flatten(0, 1)

    def _read(self, logits: torch.Tensor, values: torch.Tensor, softmax: Softmax) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over [Hkv, G, T] logits and [Hkv, T, Dv] values: output [Hkv, G, Dv], weights [Hkv, G, T]."""
        weights = attention_weights(logits, softmax)
        self.tokens_read = logits.shape[-1]
        return weights @ values.float(), weights

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Tokens that a forward of `query_length` new ones has seen, and the first one's number."""
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens seen, dropped ones included: the next token's position."""
        return self.seen

    def get_max_length(self) -> int:
        """-1: no maximum."""
        return -1

    def offload(self) -> None:
        """Not supported."""
        self._refuse("offload")

    def prefetch(self) -> None:
        """Not supported."""
        self._refuse("prefetch")

    def reset(self) -> None:
        """Not supported: ask the policy for a fresh cache."""
        self._refuse("reset")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Not supported: one sequence only."""
        self._refuse("reorder_cache")

    def crop(self, tokens_to_remove: int) -> None:
        """Not supported: what was dropped can't come back."""
        self._refuse("crop")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Not supported: one sequence only."""
        self._refuse("batch_repeat_interleave")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Not supported: one sequence only."""
        self._refuse("batch_select_indices")

    def _refuse(self, call: str) -> None:
        raise UnsupportedError(
            f"[policies] {call}: expected tokens to be added only; policy.decode_cache(context) gives a fresh cache"
        )
