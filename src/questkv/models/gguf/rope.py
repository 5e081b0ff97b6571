"""The rotary embedding that a GGUF file describes, as a transformers config.

transformers reads the base frequency of most architectures and nothing else, so a scaled model would be loaded with the
positions of an unscaled one: right at first and wrong behind its original context. What the keys and tensors mean is
what llama.cpp does with them:

- ``rope.freq_base`` is theta: the frequencies are theta ** (-2 i / d), d being ``rope.dimension_count``;
- ``rope.scaling.type`` is none, linear (also where only a factor is given), yarn or longrope, with
  ``rope.scaling.factor`` (older: ``rope.scale_linear``), ``.original_context_length`` and, for the length of cosine and
  sine, ``.attn_factor``;
- the tensor ``rope_freqs`` holds a divisor for each frequency: Llama 3.1's scaling, computed by the converter;
- the tensors ``rope_factors_short`` and ``rope_factors_long`` hold divisors up to the original context and behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from questkv.errors import UnsupportedError
from questkv.models.context import LONGEST_CONTEXT
from questkv.models.gguf.header import Header, damaged

Floats = np.ndarray[Any, np.dtype[np.float64]]

# Keys of other scalings, and the value that means none of it.
_UNKNOWN = {"alpha": 0.0, "yarn_log_multiplier": 0.0, "yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0}
_LEAST, _LEAST_THETA = 1e-6, 1.001
_FULL = "full_attention"
# Llama 3.1's and later ones' numbers: all that were published.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# float32 carries a frequency to 1e-7; its powers and divisions lose a digit of that.
_SAME = 1e-5


@dataclass(frozen=True)
class Rope:
    """What a file says of its rotary embedding.

    Attributes:
        theta: Base of the frequencies; None where the file doesn't say.
        theta_sliding: Likewise, of layers with a sliding window.
        dimensions: Channels of a head that are rotated; None where the file doesn't say.
        kind: ``none``, ``linear``, ``yarn`` or ``longrope``.
        factor: Of linear and yarn.
        context: Tokens that the file says the model was made for.
        original: Tokens it was made for before it was scaled.
        attention: Factor of cosine and sine, yarn's own not counted.
        beta_fast: Of yarn: rotations within `original` from which on a frequency stays.
        beta_slow: Of yarn: rotations up to which it is divided by the whole factor.
        divisors: Of the frequencies, ``(dimensions / 2,)``, or None.
        short: Of the frequencies up to `original` tokens, for longrope.
        long: Of the frequencies behind them.
    """

    theta: float | None
    theta_sliding: float | None
    dimensions: int | None
    kind: str
    factor: float
    context: int
    original: int
    attention: float
    beta_fast: float
    beta_slow: float
    divisors: Floats | None
    short: Floats | None
    long: Floats | None

    @property
    def is_scaled(self) -> bool:
        """Whether frequencies are other than theta's."""
        return self.kind != "none" or self.divisors is not None

    @property
    def whole_context(self) -> int:
        """Tokens the scaled model is made for.

        Files made by the recipe of some model cards give the original context and a factor for yarn, and leave the
        context as it was.
        """
        scaled = round(self.original * self.factor) if self.kind == "yarn" else 0
        return min(max(self.context, scaled), LONGEST_CONTEXT)

    def frequencies(self, theta: float, dimensions: int, *, truncate: bool = True, long: bool = False) -> Floats:
        """Radians a token of each pair of channels, ``(dimensions / 2,)``, as llama.cpp computes them.

        Args:
            theta: Base.
            dimensions: Rotated channels.
            truncate: Yarn: whether the ramp begins and ends at whole channels.
            long: For a context longer than `original`.
        """
        plain: Floats = theta ** (-np.arange(0, dimensions, 2, dtype=np.float64) / dimensions)
        divisors = self.divisors if self.divisors is not None else self.long if long else self.short
        if divisors is not None:
            plain = plain / divisors
        if self.kind == "linear":
            return plain / self.factor
        if self.kind != "yarn":
            return plain

        def channel(rotations: float) -> float:
            turns = math.log(self.original / (rotations * 2 * math.pi))
            return dimensions * turns / (2 * math.log(theta))

        low, high = channel(self.beta_fast), channel(self.beta_slow)
        if truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dimensions - 1)
        ramp = np.clip((np.arange(dimensions // 2) - low) / max(high - low, 0.001), 0, 1)
        scaled: Floats = plain / self.factor * ramp + plain * (1 - ramp)
        return scaled

    def amplitude(self) -> float:
        """Length of (cosine, sine): yarn's factor (Peng et al., 2023, equation 22) times the file's own."""
        of_yarn = 0.1 * math.log(self.factor) + 1 if self.kind == "yarn" and self.factor > 1 else 1.0
        return of_yarn * self.attention


def read_rope(header: Header) -> Rope:
    """What the header and the tensors of divisors say.

    Raises:
        ModelError: A number is impossible.
        UnsupportedError: The file scales positions in a way that isn't known here.
    """

    def say(what: str) -> UnsupportedError:
        return UnsupportedError(f"model {header.path}: its positions are scaled {what}, which isn't supported")

    def at_least(key: str, least: float, default: float | None) -> float | None:
        value = header.number(key)
        if value is not None and not value >= least:
            raise damaged(header.path, f"expected at least {least:g} as {key}, got {value:g}")
        return default if value is None else value

    kind, factor, tensors = _kind(header, say)
    for key in _UNKNOWN:
        if header.number(f"rope.scaling.{key}") not in (None, _UNKNOWN[key]):
            raise say(f"with {key}")
    context = at_least("context_length", 1, None) or LONGEST_CONTEXT
    dimensions = at_least("rope.dimension_count", 2, None)
    return Rope(
        theta=at_least("rope.freq_base", _LEAST_THETA, None),
        theta_sliding=at_least("rope.freq_base_swa", _LEAST_THETA, None),
        dimensions=None if dimensions is None else int(dimensions),
        kind=kind,
        factor=factor,
        context=int(context),
        original=int(at_least("rope.scaling.original_context_length", 1, None) or context),
        attention=at_least("rope.scaling.attn_factor", _LEAST, None) or 1.0,
        beta_fast=at_least("rope.scaling.yarn_beta_fast", _LEAST, None) or 32.0,
        beta_slow=at_least("rope.scaling.yarn_beta_slow", _LEAST, None) or 1.0,
        **tensors,
    )


def _kind(header: Header, say: Callable[[str], UnsupportedError]) -> tuple[str, float, dict[str, Floats | None]]:
    """How positions are scaled, the factor of linear and yarn, and the tensors by `Rope`'s names."""
    names = {"divisors": "rope_freqs.weight", "short": "rope_factors_short.weight", "long": "rope_factors_long.weight"}
    tensors = {field: header.floats(name) for field, name in names.items()}
    for name in header.tensors:
        if name.startswith("blk.") and name.endswith(tuple(names.values())):
            raise say("by other factors in each layer")
    for field, tensor in tensors.items():
        if tensor is not None and not (np.isfinite(tensor).all() and (tensor > 0).all()):
            raise damaged(header.path, f"expected positive numbers in {names[field]}")
    factor = header.number("rope.scaling.factor")
    if factor is None:
        factor = header.number("rope.scale_linear")
    factor = factor or 1.0  # llama.cpp's reading of 0
    if factor < _LEAST:
        raise damaged(header.path, f"expected a positive number as rope.scaling.factor, got {factor:g}")
    kind = header.values.get(f"{header.architecture}.rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise say(f"by {kind!r}")
    if kind == "linear" and factor == 1.0:
        kind = "none"
    if kind == "none" and tensors["long"] is not None:
        kind = "longrope"
    if kind == "longrope" and (factor != 1.0 or tensors["divisors"] is not None):
        raise say("by longrope and something else besides")
    if any((tensors[field] is None) == (kind == "longrope") for field in ("short", "long")):
        raise say(f"by {kind} with tensors of factors that don't fit it (rope_factors_short, rope_factors_long)")
    return kind, factor if kind in ("linear", "yarn") else 1.0, tensors


def apply_rope(config: Any, header: Header) -> None:
    """Bring a config that transformers read from a GGUF file to the rotary embedding that the file describes.

    Where each kind of layer has its own, scaling is that of the full-attention layers, as in llama.cpp.

    Raises:
        ModelError: A number is impossible.
        UnsupportedError: Neither transformers nor we can compute it.
    """
    rope = read_rope(header)
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None)
    if not parameters:
        if rope.is_scaled:
            raise _not_computed(header, text)
        return
    nested = isinstance(parameters.get(_FULL), dict)
    before = parameters[_FULL] if nested else parameters
    theta = rope.theta or before.get("rope_theta")
    kept = {key: before[key] for key in ("partial_rotary_factor", "truncate") if key in before}
    head = _head_size(text, header)
    rotated = int(head * kept.get("partial_rotary_factor", 1))
    if rope.dimensions is not None and rope.dimensions != rotated and not nested:
        rotated = rope.dimensions
        kept["partial_rotary_factor"] = rotated / head
    if before.get("rope_type") == "proportional":  # Gemma 4's; its file holds the same as divisors, which are compared
        after = {**before, "rope_theta": theta}
    else:
        after = {**kept, "rope_theta": theta, **_scaling(rope, theta, rotated, text, header)}
        if after["rope_type"] != "yarn":
            after.pop("truncate", None)
    if rope.kind == "yarn" and rope.whole_context > text.max_position_embeddings:
        text.max_position_embeddings = rope.whole_context
    if "original_max_position_embeddings" in after and hasattr(text, "original_max_position_embeddings"):
        text.original_max_position_embeddings = after["original_max_position_embeddings"]  # Phi-3's, which goes first
    sliding = parameters.get("sliding_attention") if nested else None
    if isinstance(sliding, dict) and rope.theta_sliding is not None:
        parameters = {**parameters, "sliding_attention": {**sliding, "rope_theta": rope.theta_sliding}}
    text.rope_parameters = {**parameters, _FULL: after} if nested else after


def _head_size(text: Any, header: Header) -> int:
    """Channels of a head."""
    try:
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    except (TypeError, ZeroDivisionError):
        size = 0
    if not isinstance(size, int) or size < 2:
        raise damaged(header.path, "its sizes and its number of heads don't fit one another")
    return size


def _scaling(rope: Rope, theta: float, dimensions: int, text: Any, header: Header) -> dict[str, Any]:
    """The keys of `rope_parameters` that scale."""
    for divisors in (rope.divisors, rope.long, rope.short):
        if divisors is not None and len(divisors) != dimensions // 2:
            raise damaged(header.path, f"expected {dimensions // 2} rotary factors, got {len(divisors)}")
    if rope.kind == "longrope":
        assert rope.short is not None
        assert rope.long is not None
        return {
            "rope_type": "longrope",
            "short_factor": rope.short.tolist(),
            "long_factor": rope.long.tolist(),
            "original_max_position_embeddings": rope.original,
            "factor": max(rope.context / rope.original, 1.0),
            "attention_factor": rope.amplitude(),
        }
    takes_all = text.model_type != "phi3"  # whose config refuses all types but longrope
    if rope.divisors is None and takes_all:
        if rope.kind == "none" and rope.attention == 1.0:
            return {"rope_type": "default"}
        if rope.kind == "linear" and rope.attention == 1.0:
            return {"rope_type": "linear", "factor": rope.factor}
        if rope.kind == "yarn":
            return {
                "rope_type": "yarn",
                "factor": rope.factor,
                "original_max_position_embeddings": rope.original,
                "attention_factor": rope.amplitude(),
                "beta_fast": rope.beta_fast,
                "beta_slow": rope.beta_slow,
            }
    if not rope.is_scaled and rope.attention == 1.0:
        return {"rope_type": "default"}
    wanted = rope.frequencies(theta, dimensions)
    if takes_all and rope.kind == "none" and rope.attention == 1.0:
        assert rope.divisors is not None
        factor = float(rope.divisors.max())
        if np.allclose(_llama3_divisors(theta, dimensions, factor), rope.divisors, rtol=_SAME, atol=0):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    # Any divisors at all: longrope's, the same ones at every length.
    plain = theta ** (-np.arange(0, dimensions, 2, dtype=np.float64) / dimensions)
    return {
        "rope_type": "longrope",
        "short_factor": (plain / wanted).tolist(),
        "long_factor": (plain / wanted).tolist(),
        "original_max_position_embeddings": rope.whole_context,
        "factor": 1.0,
        "attention_factor": rope.amplitude(),
    }


def _llama3_divisors(theta: float, dimensions: int, factor: float) -> Floats:
    """Llama 3.1's divisors of the frequencies, ``(dimensions / 2,)``."""
    plain = theta ** (-np.arange(0, dimensions, 2, dtype=np.float64) / dimensions)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    rotations = _LLAMA3["original_max_position_embeddings"] * plain / (2 * math.pi)
    kept = np.clip((rotations - low) / (high - low), 0, 1)
    divisors: Floats = 1 / ((1 - kept) / factor + kept)
    return divisors


def check_rope(model: Any, header: Header) -> None:
    """Compare the frequencies that a model computes, at short and at long contexts, with the file's.

    Args:
        model: Any of the model's class and config; its parameters aren't touched and may be on the meta device.
        header: Of the file.

    Raises:
        UnsupportedError: They differ: its class doesn't take what its config says.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = read_rope(header)
    text = model.config.get_text_config()
    parameters = getattr(text, "rope_parameters", None)
    found = [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    if not found or not parameters:
        if rope.is_scaled:
            raise _not_computed(header, text)
        return
    nested = isinstance(parameters.get(_FULL), dict)
    own = parameters[_FULL] if nested else parameters
    fresh = type(found[0])(text)  # on the CPU
    prefix = f"{_FULL}_" if nested else ""
    computed = {False: (getattr(fresh, f"{prefix}inv_freq"), getattr(fresh, f"{prefix}attention_scaling"))}
    if own["rope_type"] == "longrope":
        layer = {"layer_type": _FULL} if nested else {}
        behind = own["original_max_position_embeddings"] + 1
        computed[True] = ROPE_INIT_FUNCTIONS["longrope"](text, "cpu", seq_len=behind, **layer)
    for long, (frequencies, amplitude) in computed.items():
        got = frequencies.double().numpy()
        dimensions = rope.dimensions or 2 * len(got)
        wanted = rope.frequencies(own["rope_theta"], dimensions, truncate=own.get("truncate", True), long=long)
        same = len(got) == len(wanted) and np.allclose(got, wanted, rtol=_SAME, atol=_SAME * wanted.min())
        if not same or not math.isclose(float(amplitude), rope.amplitude(), rel_tol=_SAME):
            raise _not_computed(header, text)


def _not_computed(header: Header, text: Any) -> UnsupportedError:
    return UnsupportedError(
        f"model {header.path}: transformers can't compute the rotary embedding that the file describes for "
        f"{text.model_type}; use a model folder in place of the GGUF file"
    )
