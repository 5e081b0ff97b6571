"""Positions of GGUF files: the loaded model's inverse frequencies against the formulas, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from questkv.errors import ModelError, UnsupportedError
from questkv.models import load_model
from questkv.models.gguf.header import read_header
from questkv.models.gguf.rope import apply_rope, check_rope
from tiny_gguf import write_tiny_gguf

HEAD, THETA, CONTEXT, ORIGINAL = 64, 500_000.0, 131_072, 8192
# a frequency is a power and a division in float32, and yarn's a sum of two
RTOL = 16 * np.finfo(np.float32).eps


@pytest.fixture(autouse=True)
def _kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUESTKV_CACHE_DIR", str(tmp_path / "cache"))


def load(path: Path, **options: Any) -> Any:
    return load_model(str(path), dtype="float32", device="cpu", **options).model


def write(
    folder: Path, metadata: Callable[[Any], None] = lambda writer: None, name: str = "rope.gguf", **options: Any
) -> Path:
    return write_tiny_gguf(
        folder / name, metadata=metadata, **{"head": HEAD, "theta": THETA, "context": CONTEXT, **options}
    )


def seen(model: Any, length: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies and amplitude with which a model rotates the last position of so many."""
    rotary = model.model.rotary_emb
    cos, sin = rotary(torch.zeros(1, 1, 1), torch.tensor([[length - 1]]))
    amplitude = float((cos.double() ** 2 + sin.double() ** 2).sqrt().mean())
    return rotary.inv_freq.double().numpy(), amplitude


def plain(theta: float = THETA, dimensions: int = HEAD) -> np.ndarray:
    return np.array([theta ** (-2 * index / dimensions) for index in range(dimensions // 2)])


def yarn(factor: float, original: int, *, fast: float = 32.0, slow: float = 1.0, theta: float = THETA) -> np.ndarray:
    """Peng et al., 2023, section 3.2, with the ramp between whole channels."""

    def channel(rotations: float) -> float:
        return HEAD * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low, high = max(math.floor(channel(fast)), 0), min(math.ceil(channel(slow)), HEAD - 1)
    out = []
    for index, frequency in enumerate(plain(theta)):
        share = min(max((index - low) / (high - low), 0.0), 1.0)
        out.append(frequency * (1 - share) + frequency / factor * share)
    return np.array(out)


def llama3(factor: float, low: float = 1.0, high: float = 4.0, original: int = 8192) -> np.ndarray:
    """The divisors that llama.cpp's converter stores, as it computes them."""
    out = []
    for frequency in plain():
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            out.append(1.0)
        elif wavelength > original / low:
            out.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out)


def assert_rotates(model: Any, expected: np.ndarray, amplitude: float = 1.0, lengths: tuple[int, ...] = ()) -> None:
    for length in lengths or (5, ORIGINAL, ORIGINAL + 1, CONTEXT):
        frequencies, length_of = seen(model, length)
        np.testing.assert_allclose(frequencies, expected, rtol=RTOL, err_msg=str(length))
        assert length_of == pytest.approx(amplitude, rel=1e-6)


def test_yarn(tmp_path: Path) -> None:
    def scaling(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf_scaling("yarn"))
        writer.add_rope_scaling_factor(16.0)
        writer.add_rope_scaling_orig_ctx_len(ORIGINAL)

    model = load(write(tmp_path, scaling))
    assert model.config.max_position_embeddings == CONTEXT
    assert_rotates(model, yarn(16.0, ORIGINAL), 0.1 * math.log(16.0) + 1)


def gguf_scaling(name: str) -> Any:
    import gguf

    return gguf.RopeScalingType(name)


def test_yarn_with_its_own_ramp_and_amplitude(tmp_path: Path) -> None:
    def scaling(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf_scaling("yarn"))
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(ORIGINAL)
        writer.add_rope_scaling_attn_factors(0.75)
        writer.add_rope_scaling_yarn_beta_fast(16.0)
        writer.add_rope_scaling_yarn_beta_slow(2.0)

    expected = yarn(4.0, ORIGINAL, fast=16.0, slow=2.0)
    assert_rotates(load(write(tmp_path, scaling)), expected, 0.75 * (0.1 * math.log(4.0) + 1))


def test_yarn_stretches_a_context_that_the_file_leaves_as_it_was(tmp_path: Path) -> None:
    def scaling(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf_scaling("yarn"))
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(ORIGINAL)

    model = load(write(tmp_path, scaling, context=ORIGINAL))
    assert model.config.max_position_embeddings == 4 * ORIGINAL
    assert_rotates(model, yarn(4.0, ORIGINAL), 0.1 * math.log(4.0) + 1)


@pytest.mark.parametrize("how", ["typed", "untyped", "old key"])
def test_linear(tmp_path: Path, how: str) -> None:
    def scaling(writer: Any) -> None:
        if how == "typed":
            writer.add_rope_scaling_type(gguf_scaling("linear"))
        if how == "old key":
            writer.add_float32("llama.rope.scale_linear", 4.0)
        else:
            writer.add_rope_scaling_factor(4.0)

    model = load(write(tmp_path, scaling))
    assert model.config.max_position_embeddings == CONTEXT
    assert_rotates(model, plain() / 4)


@pytest.mark.parametrize("kind", ["none", "linear"])
def test_no_scaling(tmp_path: Path, kind: str) -> None:
    def scaling(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf_scaling(kind))
        if kind == "none":
            writer.add_rope_scaling_factor(4.0)

    model = load(write(tmp_path, scaling))
    assert model.config.rope_parameters["rope_type"] == "default"
    assert_rotates(model, plain())


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_frequencies(tmp_path: Path, factor: float) -> None:
    divisors = llama3(factor)
    assert ((divisors > 1) & (divisors < factor)).sum() >= 3  # else the ramp between isn't tried
    path = write(tmp_path, tensors={"rope_freqs.weight": divisors.astype(np.float32)})
    model = load(path)
    assert model.config.rope_parameters["rope_type"] == "llama3"
    assert model.config.rope_parameters["factor"] == factor
    assert model.config.rope_parameters["original_max_position_embeddings"] == 8192
    assert_rotates(model, plain() / divisors)


@pytest.mark.parametrize("besides", ["nothing", "linear", "yarn"])
def test_any_divisors(tmp_path: Path, besides: str) -> None:
    divisors = np.random.default_rng(0).uniform(0.5, 40.0, HEAD // 2).astype(np.float32)

    def scaling(writer: Any) -> None:
        if besides != "nothing":
            writer.add_rope_scaling_type(gguf_scaling(besides))
            writer.add_rope_scaling_factor(4.0)
            writer.add_rope_scaling_orig_ctx_len(ORIGINAL)

    model = load(write(tmp_path, scaling, tensors={"rope_freqs.weight": divisors}))
    scaled = {"nothing": plain(), "linear": plain() / 4, "yarn": yarn(4.0, ORIGINAL)}[besides]
    amplitude = 0.1 * math.log(4.0) + 1 if besides == "yarn" else 1.0
    assert_rotates(model, scaled / divisors.astype(np.float64), amplitude)


@pytest.mark.parametrize("typed", [True, False])
def test_longrope_has_one_set_of_factors_up_to_the_original_context_and_one_behind_it(
    tmp_path: Path, typed: bool
) -> None:
    rng = np.random.default_rng(1)
    short, long = (rng.uniform(low, high, HEAD // 2).astype(np.float32) for low, high in ((1.0, 1.2), (1.0, 60.0)))

    def scaling(writer: Any) -> None:
        if typed:
            writer.add_rope_scaling_type(gguf_scaling("longrope"))
        writer.add_rope_scaling_orig_ctx_len(ORIGINAL)
        writer.add_rope_scaling_attn_factors(1.19)

    tensors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    model = load(write(tmp_path, scaling, tensors=tensors))
    assert model.config.max_position_embeddings == CONTEXT
    assert_rotates(model, plain() / short.astype(np.float64), 1.19, lengths=(5, ORIGINAL))
    assert_rotates(model, plain() / long.astype(np.float64), 1.19, lengths=(ORIGINAL + 1, CONTEXT))
    assert_rotates(model, plain() / short.astype(np.float64), 1.19, lengths=(5,))


def test_the_copy_rotates_like_the_file_and_an_older_conversion_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from questkv.models.gguf import copies

    path = write(tmp_path, lambda writer: writer.add_rope_scaling_factor(4.0))
    load(path)
    assert_rotates(load(path), plain() / 4)
    today = copies.copy_name(path, "float32")
    monkeypatch.setattr(copies, "CONVERSION", copies.CONVERSION - 1)
    assert copies.copy_name(path, "float32") != today


def test_a_scaled_file_is_not_stretched_again(tmp_path: Path) -> None:
    path = write(tmp_path, lambda writer: writer.add_rope_scaling_factor(4.0))
    for _ in range(2):  # from memory, and from the copy
        with pytest.raises(UnsupportedError, match=r"scales its rotary embedding already \(linear\)"):
            load(path, rope_factor=2.0)


def test_yarn_in_the_file_and_rope_factor_give_the_same_logits(tmp_path: Path) -> None:
    def scaling(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf_scaling("yarn"))
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(256)

    scaled = load(write(tmp_path, scaling, context=1024, name="scaled.gguf"))
    stretched = load(write(tmp_path, context=256, name="plain.gguf"), rope_factor=4.0)
    assert scaled.config.max_position_embeddings == stretched.config.max_position_embeddings == 1024
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 30, (1, 700)))
    assert torch.equal(scaled(ids).logits, stretched(ids).logits)


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({"llama.rope.scaling.type": "dynamic"}, {}, "scaled by 'dynamic', which isn't supported"),
        ({"llama.rope.scaling.type": "longrope"}, {}, "by longrope with tensors of factors that don't fit it"),
        ({}, {"rope_factors_long.weight": np.ones(32)}, "by longrope with tensors of factors that don't fit"),
        ({}, {"rope_factors_short.weight": np.ones(32)}, "by none with tensors of factors that don't fit"),
        ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, {}, "scaled with yarn_log_multiplier"),
        ({"llama.rope.scaling.alpha": 1000.0}, {}, "scaled with alpha"),
        ({}, {"blk.0.rope_freqs.weight": np.ones(32)}, "by other factors in each layer"),
        (
            {"llama.rope.scaling.factor": 2.0},
            {"rope_factors_long.weight": np.ones(32), "rope_factors_short.weight": np.ones(32)},
            "by linear with tensors of factors",
        ),
    ],
)
def test_what_is_not_known_is_refused(
    tmp_path: Path, metadata: dict[str, str | float], tensors: dict[str, np.ndarray], message: str
) -> None:
    def write_all(writer: Any) -> None:
        for key, value in metadata.items():
            writer.add_string(key, value) if isinstance(value, str) else writer.add_float32(key, value)

    path = write(tmp_path, write_all, tensors={name: values.astype(np.float32) for name, values in tensors.items()})
    with pytest.raises(UnsupportedError, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("scaling.factor", -4.0, "expected a positive number as rope.scaling.factor, got -4"),
        ("scaling.factor", float("nan"), "expected a finite number as llama.rope.scaling.factor, got nan"),
        ("scaling.original_context_length", 0.0, "expected at least 1 as rope.scaling.original_context_length, got 0"),
        ("scaling.attn_factor", float("inf"), "expected a finite number"),
    ],
)
def test_impossible_numbers_are_damage(tmp_path: Path, key: str, value: float, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(write(tmp_path, lambda writer: writer.add_float32(f"llama.rope.{key}", value)))


@pytest.mark.parametrize("divisors", [np.ones(31), np.zeros(32), np.full(32, np.nan)])
def test_divisors_that_can_not_be_are_damage(tmp_path: Path, divisors: np.ndarray) -> None:
    with pytest.raises(ModelError, match=r"expected 32 rotary factors, got 31|expected positive numbers in rope_freqs"):
        load(write(tmp_path, tensors={"rope_freqs.weight": divisors.astype(np.float32)}))


def test_partly_rotated_heads_keep_their_share(tmp_path: Path) -> None:
    """Phi-4 mini rotates three quarters of a head; transformers reads that from no GGUF file."""
    from transformers import Phi3Config, Phi3ForCausalLM

    rng = np.random.default_rng(2)
    short, long = (rng.uniform(1.0, high, 24).astype(np.float32) for high in (1.2, 50.0))

    def scaling(writer: Any) -> None:
        writer.add_rope_scaling_orig_ctx_len(ORIGINAL)

    tensors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    path = write(tmp_path, scaling, architecture="phi3", dimensions=48, tensors=tensors)
    config = Phi3Config(
        hidden_size=256, num_attention_heads=4, num_hidden_layers=1, vocab_size=30, intermediate_size=64,
        max_position_embeddings=CONTEXT, pad_token_id=0, rope_theta=THETA,
    )  # fmt: skip
    header = read_header(path)
    apply_rope(config, header)
    config.validate_rope()
    model = Phi3ForCausalLM(config)
    check_rope(model, header)
    base = plain(THETA, 48)
    assert_rotates(model, base / short.astype(np.float64), lengths=(5, ORIGINAL))
    assert_rotates(model, base / long.astype(np.float64), lengths=(ORIGINAL + 1,))


def test_only_full_attention_is_scaled_where_layers_differ(tmp_path: Path) -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    path = write(tmp_path, lambda writer: writer.add_rope_scaling_factor(8.0), architecture="gemma3", theta=1e6)
    config = Gemma3TextConfig(
        num_hidden_layers=6, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=HEAD,
        vocab_size=30, intermediate_size=64, max_position_embeddings=CONTEXT,
        pad_token_id=0, eos_token_id=1, bos_token_id=2,
    )  # fmt: skip
    header = read_header(path)
    apply_rope(config, header)
    model = Gemma3ForCausalLM(config)
    check_rope(model, header)
    rotary = model.model.rotary_emb
    np.testing.assert_allclose(rotary.full_attention_inv_freq.double().numpy(), plain(1e6) / 8, rtol=RTOL)
    np.testing.assert_allclose(rotary.sliding_attention_inv_freq.double().numpy(), plain(1e4), rtol=RTOL)


def test_a_class_that_ignores_its_config_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    real = LlamaRotaryEmbedding.__init__

    def deaf(self: Any, config: Any, **options: Any) -> None:
        real(self, config, **options)
        self.inv_freq *= 2

    monkeypatch.setattr(LlamaRotaryEmbedding, "__init__", deaf)
    with pytest.raises(UnsupportedError, match="transformers can't compute the rotary embedding"):
        load(write(tmp_path))
