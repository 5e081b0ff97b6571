"""A layer that attends and keeps a recurrent state besides (Falcon-H1, Zamba2): the attention's part lies in pages."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from questkv.hf.layer import PagedLayer
from questkv.hf.state import PagedState


class PagedHybridLayer(PagedLayer, LinearAttentionCacheLayerMixin):
    """A `PagedLayer` beside transformers' own layer for convolution and recurrent states.

    What concerns whole sequences (crop, reorder, reset) the cache does for pages and for `linear`, one after the other.

    Args:
        state: What the cache's paged layers share.
        index: The model's layer.
        model_config: The model's config, for what an error says.
        linear: What keeps the convolution and recurrent states.

    Attributes:
        linear: The layer's other half.
    """

    def __init__(
        self, state: PagedState, index: int, model_config: PreTrainedConfig, linear: LinearAttentionLayer
    ) -> None:
        PagedLayer.__init__(self, state, index, model_config)
        self.linear = linear

    def over(self, state: PagedState) -> PagedHybridLayer:
        """The same layer over another state, with a copy of its recurrent states."""
        return PagedHybridLayer(state, self.index, self.model_config, copy.deepcopy(self.linear))

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether a crop leaves no trace: a recurrent state can't be taken back."""
        return bool(self.linear.is_croppable)

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """By number of state, whether it holds any token."""
        states: dict[int, bool] = self.linear.has_previous_state
        return states

    @property
    def conv_states(self) -> dict[int, torch.Tensor | None]:
        """By number, [B, channels, kernel]."""
        states: dict[int, torch.Tensor | None] = self.linear.conv_states
        return states

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor | None]:
        """By number, in the model's own shape."""
        states: dict[int, torch.Tensor | None] = self.linear.recurrent_states
        return states

    @property
    def record_past(self) -> bool:
        """Whether convolution states are kept for a crop."""
        return bool(self.linear.record_past)

    def activate_past_recording(self) -> None:
        """Keep convolution states for a crop from now on."""
        self.linear.activate_past_recording()

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """See transformers' `LinearAttentionLayer`."""
        states: torch.Tensor = self.linear.update_conv_state(conv_states, state_idx, **kwargs)
        return states

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """See transformers' `LinearAttentionLayer`."""
        states: torch.Tensor = self.linear.update_recurrent_state(recurrent_states, state_idx, **kwargs)
        return states
