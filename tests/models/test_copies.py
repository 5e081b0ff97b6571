"""Converted copies: what is wrong with one is found before it is loaded, and a good one is never thrown away."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from questkv.models import load_model, model_cache_dir
from questkv.models.gguf import convert, copies
from tiny_gguf import TEMPLATE, write_tiny_gguf

MUTATIONS = 1_000


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUESTKV_CACHE_DIR", str(tmp_path / "cache"))
    return write_tiny_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were converted so far."""
    seen: list[Path] = []
    real = convert.convert

    def count(path: Path, dtype: torch.dtype) -> Any:
        seen.append(path)
        return real(path, dtype)

    monkeypatch.setattr(convert, "convert", count)
    return seen


def load(path: Path) -> Any:
    return load_model(str(path), dtype="float32", device="cpu")


def the_copy() -> Path:
    (copy,) = model_cache_dir().iterdir()
    return copy


def assert_as_converted(loaded: Any) -> None:
    expected = np.random.default_rng(0).standard_normal((30, 32), dtype=np.float32)
    assert torch.equal(loaded.model.model.embed_tokens.weight, torch.from_numpy(expected))
    assert loaded.tokenizer.chat_template == TEMPLATE
    assert loaded.tokenizer("hea")["input_ids"] == [29, 2]


def remove(file: Path) -> None:
    file.unlink()


def alter(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("chat_template.jinja", remove),
        ("chat_template.jinja", alter),
        ("tokenizer.json", cut),
        ("tokenizer_config.json", empty),
        ("config.json", alter),
        ("model.safetensors", alter),
        (copies.MANIFEST, remove),
        (copies.MANIFEST, cut),
    ],
)
def test_a_damaged_copy_is_made_anew(
    tiny: Path, conversions: list[Path], name: str, damage: Callable[[Path], None]
) -> None:
    load(tiny)
    damage(the_copy() / name)
    assert_as_converted(load(tiny))
    assert len(conversions) == 2
    assert copies.is_whole(the_copy())


def test_a_file_that_nobody_wrote_into_a_copy_is_damage(tiny: Path, conversions: list[Path]) -> None:
    load(tiny)
    (the_copy() / "adapter_config.json").write_text("{}", encoding="utf-8")
    assert_as_converted(load(tiny))
    assert len(conversions) == 2
    (the_copy() / ".DS_Store").touch()  # systems leave such
    assert_as_converted(load(tiny))
    assert len(conversions) == 2


def test_mutated_copies_are_never_loaded(tiny: Path, tmp_path: Path) -> None:
    load(tiny)
    rng = np.random.default_rng(0)
    whole = tmp_path / "whole"
    shutil.copytree(the_copy(), whole)
    files = sorted(file.name for file in whole.iterdir())
    mutated = tmp_path / "mutated"
    for index in range(MUTATIONS):
        shutil.copytree(whole, mutated)
        file = mutated / files[index % len(files)]
        content = bytearray(file.read_bytes())
        where = int(rng.integers(len(content)))
        if index % 3 == 0:
            content[where] ^= 1 << int(rng.integers(8))
        elif index % 3 == 1:
            del content[where:]
        else:
            content[where:where] = rng.bytes(3)
        file.write_bytes(content)
        before = json.loads((whole / copies.MANIFEST).read_bytes())
        try:
            same = file.name == copies.MANIFEST and json.loads(bytes(content)) == before
        except ValueError:
            same = False
        assert copies.is_whole(mutated) is same, (index, file.name)
        shutil.rmtree(mutated)


def test_an_input_error_costs_a_warning_and_no_copy(
    tiny: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(tiny)
    real = copies._digest

    def broken(file: Path) -> str:
        if file.name == "model.safetensors":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(file)

    with monkeypatch.context() as patch:
        patch.setattr(copies, "_digest", broken)
        with pytest.warns(UserWarning, match=r"converted in memory, since .*: Input/output error") as caught:
            assert_as_converted(load(tiny))
    assert len(caught) == 1
    assert copies.is_whole(the_copy())
    load(tiny)
    assert len(conversions) == 2


def test_a_copy_that_can_not_be_loaded_for_another_reason_stays(tiny: Path, conversions: list[Path]) -> None:
    from questkv.errors import ModelError

    load(tiny)
    with pytest.raises(ModelError, match="nonesuch"):
        load_model(str(tiny), dtype="float32", device="cpu", attention="nonesuch")
    assert copies.is_whole(the_copy())
    assert len(conversions) == 1


def test_a_disk_that_is_full_when_the_tokenizer_is_saved_costs_a_warning(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import PreTrainedTokenizerBase

    def full(tokenizer: object, folder: Path, **options: Any) -> None:
        raise Exception("No space left on device (os error 28)")  # what the package tokenizers raises

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", full)
    with pytest.warns(UserWarning, match=r"could not be kept in .*: No space left on device \(os error 28\)"):
        assert_as_converted(load(tiny))
    assert list(model_cache_dir().iterdir()) == []


def test_a_rename_that_fails_is_not_called_good(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name.startswith(".partial-"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, target)

    load(tiny)
    (the_copy() / "chat_template.jinja").unlink()
    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.warns(UserWarning, match="could not be kept in .*: Permission denied"):
        assert_as_converted(load(tiny))
    assert [path.name for path in model_cache_dir().iterdir() if not path.name.startswith(".")] == []


def test_a_copy_has_the_permissions_that_the_umask_gives(tiny: Path) -> None:
    before = os.umask(0o022)
    try:
        load(tiny)
    finally:
        os.umask(before)
    assert the_copy().stat().st_mode & 0o777 == 0o755
    for file in the_copy().iterdir():
        assert file.stat().st_mode & 0o444 == 0o444, file.name
