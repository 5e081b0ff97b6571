"""A tiny model of any causal language model class of transformers, with weights under which attention matters."""

from __future__ import annotations

import copy
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionAndFullAttentionLayer

from sweep.tiny_configs import tiny_config

_NO_CONFIG = (ImportError, AttributeError, TypeError, ValueError, StrictDataclassError)


class NotBuilt(Exception):
    """A class of which no small model can be made, or that transformers itself can't run; the message says why."""


def tiny_model(model_type: str, auto: Any = AutoModelForCausalLM) -> tuple[Any, bool]:
    """A small model in eval mode, and whether it is one without the sliding window that its class has by default.

    A class all of whose layers have a window by default, but that takes None for it too (Mistral), is built so.

    Args:
        model_type: As in transformers' mappings.
        auto: Which of the mappings: one of transformers' auto classes.

    Raises:
        NotBuilt: The class can't be built.
    """
    try:
        model = draw(tiny_config(model_type), auto)
        if _has_full_layer(model.config) or (bare := _windowless(model_type)) is None:
            return model, False
        return draw(bare, auto), True
    except _NO_CONFIG as error:
        raise NotBuilt(f"{type(error).__name__}: {error}") from error


def draw(config: Any, auto: Any = AutoModelForCausalLM, seed: int = 0) -> Any:
    """A model of a configuration: SDPA's where the class has that, and weights of the same size in every layer.

    With the classes' own deviations every token of so small a model would look like every other.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            model = auto.from_config(copy.deepcopy(config), attn_implementation="sdpa")
        except ValueError:
            model = auto.from_config(copy.deepcopy(config), attn_implementation="eager")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim >= 2 and parameter.is_floating_point():
                    parameter.normal_(0.0, 1.0 if "emb" in name else 1.5 * parameter.shape[-1] ** -0.5)
    settings = model.generation_config
    settings.eos_token_id = settings.bos_token_id = None
    settings.pad_token_id = 0
    return model.eval()


def in_float64(model: Any) -> Any:
    """The same model in float64."""
    exact = copy.deepcopy(model)
    if exact._can_set_experts_implementation():
        # The grouped matrix product that is the default knows no float64.
        exact.set_experts_implementation("eager")
    return exact.double()


def _windowless(model_type: str) -> Any:
    """The configuration without a sliding window, None if the class always has one."""
    try:
        config = tiny_config(model_type, sliding_window=None)
        return config if _has_full_layer(config) else None
    except _NO_CONFIG:
        return None


def _has_full_layer(config: Any) -> bool:
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    return not kinds.isdisjoint((DynamicLayer, LinearAttentionAndFullAttentionLayer))
