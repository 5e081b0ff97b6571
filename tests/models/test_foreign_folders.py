"""Folders that others made: none of their code runs unasked, and what can't be used is one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from questkv.errors import ConfigError, ModelError
from questkv.models import find_model, load_model, model_cache_dir, stretch_context

CODE = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


class OwnConfig(LlamaConfig):
    model_type = "own-model"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def save(folder: Path) -> Path:
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {f"w{index}": index for index in range(16)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0"))).save_pretrained(folder)
    return folder


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that the folder's code creates where it runs."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path / "ran"


@pytest.fixture
def own_code(tmp_path: Path, marker: Path) -> Path:
    """A model folder that needs Python code of its own for its config, model and tokenizer."""
    import json

    folder = save(tmp_path / "own")
    (folder / "own.py").write_text(CODE.format(marker=str(marker)), encoding="utf-8")
    for name, changes in (
        (
            "config.json",
            {
                "model_type": "own-model",
                "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
            },
        ),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}),
    ):
        values = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps({**values, **changes}), encoding="utf-8")
    return folder


def command(arguments: list[str], typed: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_MODULES_CACHE": str(folder / "modules"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-m", "questkv", *arguments],
        input=typed,
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("what", ["ask", "chat", "eval", "bench"])
def test_a_yes_on_standard_input_runs_no_code(own_code: Path, marker: Path, tmp_path: Path, what: str) -> None:
    document = tmp_path / "text.txt"
    document.write_text("w1 w2 w3 w4 " * 20, encoding="utf-8")
    arguments = {
        "ask": ["ask", str(document), "w5", "--max-new-tokens", "2"],
        "chat": ["chat", str(document), "--max-new-tokens", "2"],
        "eval": ["eval", "perplexity", str(document), "--lengths", "40", "--samples", "1", "--methods", "full"],
        "bench": ["bench", "decode", "--contexts", "32", "--steps", "1", "--no-memory", "--text", str(document)],
    }[what] + ["--model", str(own_code), "--dtype", "float32"]
    refused = command(arguments, "y\ny\nw5\n", tmp_path)
    assert refused.returncode == 1, refused.stderr
    assert refused.stdout == ""
    lines = refused.stderr.strip().splitlines()
    assert len(lines) == 1, refused.stderr
    assert "give --trust-remote-code" in lines[0]
    assert not marker.exists()
    command([*arguments, "--trust-remote-code"], "w5\n", tmp_path)
    assert marker.exists()


def test_code_runs_where_it_is_allowed_and_only_there(
    own_code: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *prompt: pytest.fail("a question was asked"))
    with pytest.raises(ModelError, match=r"needs Python code of its own, .* --trust-remote-code") as caught:
        load_model(str(own_code), dtype="float32", device="cpu")
    assert "\n" not in str(caught.value)
    assert not marker.exists()
    loaded = load_model(str(own_code), dtype="float32", device="cpu", trust_remote_code=True)
    assert marker.exists()
    assert type(loaded.model).__name__ == "OwnModel"


def test_a_folder_whose_only_code_is_its_tokenizer_is_refused_too(own_code: Path, marker: Path, tmp_path: Path) -> None:
    import shutil

    plain = save(tmp_path / "plain")
    shutil.copy(own_code / "tokenizer_config.json", plain / "tokenizer_config.json")
    shutil.copy(own_code / "own.py", plain / "own.py")
    try:
        load_model(str(plain), dtype="float32", device="cpu")  # transformers may know a class of its own for it
    except ModelError as error:
        line = str(error)
    else:
        line = "--trust-remote-code"
    assert "--trust-remote-code" in line
    assert not marker.exists()


def test_pickled_weights_are_refused_before_they_are_read(tmp_path: Path, marker: Path) -> None:
    folder = save(tmp_path / "pickled")
    (folder / "model.safetensors").unlink()

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(marker),)

    for content in ({"lm_head.weight": torch.zeros(1)}, Evil()):
        torch.save(content, folder / "pytorch_model.bin")
        with pytest.raises(ModelError, match=r"expected weights as \.safetensors, got pytorch_model\.bin, a pickle"):
            load_model(str(folder), dtype="float32", device="cpu")
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    with pytest.raises(ModelError, match="a pickle"):
        load_model(str(folder), dtype="float32", device="cpu")
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match="can't be loaded") as caught:
        load_model(str(folder), dtype="float32", device="cpu")
    assert "\n" not in str(caught.value)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "generation_config.json"])
def test_a_broken_file_is_one_line(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path / "broken")
    for content in (b"", b"{", b"[]", b"\xff\xfe", b'{"a": 1}'):
        (folder / name).write_bytes(content)
        try:
            load_model(str(folder), dtype="float32", device="cpu")
        except ModelError as error:
            line = str(error)
        else:
            line = "loaded"
        assert "\n" not in line
        assert line.startswith(f"model {folder}: ") or (line == "loaded" and name == "generation_config.json")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("~nosuchuser", "model ~nosuchuser: no such file or folder: ~ names no home folder"),
        ("~nosuchuser/model.gguf", "~ names no home folder"),
        ("x" * 5000, r"model x{200}\.\.\. \(5,000 characters\): File name too long"),
        ("", "expected a .gguf file, a model folder, a hub id or an alias, got ''"),
    ],
)
def test_names_that_can_be_no_model_are_one_line(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        find_model(name)
    assert len(str(caught.value)) < 400


def test_no_home_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("QUESTKV_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)

    def homeless(*arguments: object) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(ModelError, match=r"there is no home folder to keep converted models in; name .*QUESTKV_CACHE"):
        model_cache_dir()
    monkeypatch.setenv("QUESTKV_CACHE_DIR", "~nosuchuser/cache")
    with pytest.raises(ModelError, match="name a folder with QUESTKV_CACHE_DIR"):
        model_cache_dir()


def test_without_a_home_a_gguf_file_is_converted_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiny_gguf import write_tiny_gguf

    monkeypatch.setenv("QUESTKV_CACHE_DIR", "~nosuchuser/cache")
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    with pytest.warns(UserWarning, match="converted in memory, since no converted one can be looked for: there is no"):
        model = load_model(str(path), dtype="float32", device="cpu").model
    assert model(torch.tensor([[2, 3]])).logits.isfinite().all()


@pytest.mark.parametrize("factor", [1e308, 1e10, 2.0**31])
def test_a_context_longer_than_positions_can_be_is_refused(factor: float) -> None:
    config = LlamaConfig(max_position_embeddings=8192)
    before = config.to_dict()
    with pytest.raises(ConfigError, match="rope_factor: expected at most 262143 for a context of 8,192 tokens, got"):
        stretch_context(config, factor)
    assert config.to_dict() == before
