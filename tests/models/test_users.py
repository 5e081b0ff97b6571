"""Several users and one cache: it works or says why, and nobody's program is run by another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from questkv.cli import compiled
from questkv.errors import UnsupportedError
from questkv.models import is_private
from tiny_gguf import write_tiny_gguf

OTHER = 65_534
LOAD = """
import os, sys, warnings

from pathlib import Path
import torch, transformers, transformers.models.llama.modeling_llama, transformers.modeling_gguf_pytorch_utils, gguf
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from questkv.errors import QuestKVError
from questkv.models import find_model, load_model
from questkv.models.gguf import load
os.umask(int(sys.argv[3], 8))
os.setgroups([])
os.setresgid(*[int(sys.argv[2])] * 3)
os.setresuid(*[int(sys.argv[2])] * 3)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        model = load_model(sys.argv[1], dtype="float32", device="cpu").model
        print("loaded", float(model.model.embed_tokens.weight.sum()))
    except QuestKVError as error:
        print("refused", error)
print(*[f"warning {w.message}" for w in caught if "convert" in str(w.message)], sep="\\n")
"""

root_only = pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0, reason="another user can be impersonated by root only"
)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can reach, which pytest's own isn't."""
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def load_as(user: int, path: Path, cache: Path, umask: str = "022") -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(path), str(user), umask],
        capture_output=True,
        text=True,
        env={**os.environ, "QUESTKV_CACHE_DIR": str(cache), "HF_HUB_OFFLINE": "1", "HOME": "/nonexistent"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()


@root_only
@pytest.mark.slow
def test_a_second_user_reads_the_copy_that_the_first_one_made(open_folder: Path) -> None:
    path, cache = write_tiny_gguf(open_folder / "tiny.gguf"), open_folder / "cache"
    first = load_as(0, path, cache)
    made = {file: file.stat().st_mtime_ns for file in cache.rglob("*")}
    assert first[0].startswith("loaded")
    assert load_as(OTHER, path, cache) == first  # and no warning
    assert {file: file.stat().st_mtime_ns for file in cache.rglob("*")} == made


@root_only
@pytest.mark.slow
def test_a_copy_that_a_second_user_can_not_read_costs_a_warning(open_folder: Path) -> None:
    path, cache = write_tiny_gguf(open_folder / "tiny.gguf"), open_folder / "cache"
    first = load_as(0, path, cache, umask="077")
    second = load_as(OTHER, path, cache)
    assert second[0] == first[0]
    assert len(second) == 2
    assert second[1].startswith("warning the model is converted in memory")
    assert second[1].endswith("Permission denied")
    assert load_as(0, path, cache, umask="077") == first


@root_only
@pytest.mark.slow
def test_files_that_may_not_be_read_are_one_line(open_folder: Path) -> None:
    path = write_tiny_gguf(open_folder / "tiny.gguf")
    path.chmod(0o600)
    (closed := open_folder / "closed").mkdir(mode=0o700)
    (folder := open_folder / "folder").mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    (folder / "config.json").chmod(0o600)
    for name in (path, closed, closed / "tiny.gguf", folder):
        said = load_as(OTHER, name, open_folder / "cache")
        assert len(said) == 1, said
        assert said[0].startswith(f"refused model {name}: "), said
        assert "ermission" in said[0], said


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    folder = tmp_path / "ours"
    folder.mkdir(mode=0o700)
    return folder


@pytest.mark.skipif(os.name != "posix", reason="permissions have another form there")
def test_a_folder_is_private_where_nobody_else_can_write_or_replace_it(ours: Path) -> None:
    assert is_private(ours)
    assert is_private(ours / "not" / "there" / "yet")
    for mode in (0o770, 0o702, 0o777, 0o1777):
        ours.chmod(mode)
        assert not is_private(ours), oct(mode)
    inner = ours / "inner"
    ours.chmod(0o777)
    inner.mkdir(mode=0o700)
    assert not is_private(inner)  # it could be renamed, and another put there
    ours.chmod(0o1777)
    assert is_private(inner)
    (link := ours / "link").symlink_to(inner)
    assert is_private(link)
    (loop := ours / "loop").symlink_to(loop)
    assert not is_private(loop)
    file = inner / "file"
    file.touch()
    assert not is_private(file)


@root_only
def test_a_folder_of_another_user_is_not_private(ours: Path) -> None:
    inner = ours / "inner"
    inner.mkdir(mode=0o700)
    os.chown(ours, OTHER, OTHER)
    assert not is_private(ours)
    assert not is_private(inner)


@pytest.mark.skipif(os.name != "posix", reason="permissions have another form there")
def test_what_torch_compiled_lies_where_only_this_user_can_write(ours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUESTKV_CACHE_DIR", str(ours / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    compiled.keep_compiled()
    kept = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert kept == ours / "cache" / "models" / ".compiled"
    assert kept.stat().st_mode & 0o777 == 0o700

    (ours / "cache" / "models").chmod(0o777)  # shared, and a second user could put a folder of his there
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    compiled.keep_compiled()
    once = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert ours not in once.parents
    assert is_private(once)
    assert once.stat().st_mode & 0o777 == 0o700

    (open_to_all := ours / "open").mkdir()
    open_to_all.chmod(0o777)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(open_to_all))
    with pytest.raises(UnsupportedError, match=r"only you can write to as TORCHINDUCTOR_CACHE_DIR, got .*open"):
        compiled.keep_compiled()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(ours / "chosen"))
    compiled.keep_compiled()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(ours / "chosen")


def test_without_a_home_it_lies_in_a_folder_of_this_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUESTKV_CACHE_DIR", "~nosuchuser/cache")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    compiled.keep_compiled()
    assert is_private(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
