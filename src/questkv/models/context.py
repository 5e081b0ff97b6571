"""How many tokens a model was made for, and stretching that with YaRN."""

from __future__ import annotations

from typing import Any

from questkv.errors import ConfigError, UnsupportedError

LONGEST_CONTEXT = 2**31 - 1  # positions are 32-bit numbers in many models


def stretch_context(config: Any, factor: float) -> None:
    """Stretch a model config's context `factor` times with YaRN (Peng et al., 2023), in place.

    Where each kind of layer has its own rotary embedding, only the full-attention layers' is stretched: a sliding
    window never sees more than its window.

    Raises:
        ConfigError: `factor` is below 1, or the stretched context would be longer than `LONGEST_CONTEXT`.
        UnsupportedError: The model has no rotary embedding, or scales it already.
    """
    if factor == 1.0:
        return
    if not 1.0 < factor < float("inf"):
        raise ConfigError(f"[load_model] rope_factor: expected at least 1, got {factor}")
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None)
    length = getattr(text, "max_position_embeddings", None)
    if not parameters or not length:
        raise UnsupportedError(f"rope factor: {text.model_type} has no rotary position embedding to stretch")
    if length * factor > LONGEST_CONTEXT:
        raise ConfigError(
            f"[load_model] rope_factor: expected at most {LONGEST_CONTEXT // length} for a context of {length:,} "
            f"tokens, got {factor:g}"
        )
    nested = isinstance(parameters.get("full_attention"), dict)
    rope = parameters["full_attention"] if nested else parameters
    if rope.get("rope_type", "default") != "default":
        raise UnsupportedError(f"rope factor: this model scales its rotary embedding already ({rope['rope_type']})")
    stretched = {**rope, "rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": length}
    text.rope_parameters = {**parameters, "full_attention": stretched} if nested else stretched
    text.max_position_embeddings = int(length * factor)


def context_length(config: Any) -> int | None:
    """Tokens the model was made for, or None where its config doesn't say."""
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(length) if length else None
