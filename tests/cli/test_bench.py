"""`questkv bench attention`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from questkv.cli.app import app

SMALL = [
    "--heads",
    "4",
    "--kv-heads",
    "2",
    "--head-dim",
    "16",
    "--context",
    "512",
    "--budget",
    "160",
    "--seconds",
    "0.1",
]


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["bench", "attention", *SMALL, *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_json_on_standard_output_is_all_there_is() -> None:
    code, out, _ = run("--json", "-")
    assert code == 0
    values = json.loads(out)
    assert {"rows", "speedup_over_dense", "speedup_over_best_peer", "bandwidth_share", "environment"} <= set(values)
    first = values["rows"][0]
    assert first["name"] == "questkv-sparse"
    assert {"name", "context", "budget", "median_ms", "min_ms", "gb_per_s", "max_error"} == set(first)
    medians = {row["name"]: row["median_ms"] for row in values["rows"]}
    assert values["speedup_over_dense"] == pytest.approx(medians["questkv-dense"] / medians["questkv-sparse"])
    assert values["config"]["token_budget"] == 160


def test_contexts_are_swept_and_the_table_names_each(tmp_path: Path) -> None:
    code, out, _ = run("--context", "512,1k", "--json", str(tmp_path / "rows.json"))
    assert code == 0
    assert "1,024 tokens: sparse" in out
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["rows"]
    assert {row["context"] for row in rows} == {512, 1024}


def test_pages_in_eight_bits_are_compared_with_the_models_type() -> None:
    code, out, err = run("--kv-dtype", "int8")
    assert code == 0, err
    assert "pages in eight bits: sparse" in out
    code, out, _ = run("--kv-dtype", "int8", "--json", "-")
    values = json.loads(out)
    assert code == 0
    medians = {row["name"]: row["median_ms"] for row in values["rows"]}
    expected = medians["questkv-sparse-model"] / medians["questkv-sparse"]
    assert values["speedup_over_sparse_model"] == pytest.approx(expected)
    assert values["config"]["kv_dtype"] == "int8"


@pytest.mark.parametrize("kv_dtype", ["model", "int8"])
def test_spans_are_checked_and_timed(kv_dtype: str) -> None:
    arguments = ("--context", "2048", "--budget", "112", "--span-pages", "4", "--kv-dtype", kv_dtype, "--json", "-")
    code, out, err = run(*arguments)
    assert code == 0, err
    values = json.loads(out)
    assert values["config"]["span_pages"] == 4
    by_name = {row["name"]: row for row in values["rows"]}
    # 127 sealed pages: 31 spans, of which those of ceil(4 K / 4) = K are kept, K = (112 - 16) / 16; 3 pages behind.
    heads, dim = values["shape"]["kv_heads"], values["shape"]["head_dim"]
    boxes = (31 + 6 * 4 + 3) * heads * (2 * dim + 4)
    estimate = by_name["estimate"]
    assert estimate["gb_per_s"] * estimate["median_ms"] * 1e6 == pytest.approx(boxes, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--context", "many"], 2, "expected token counts"),
        (["--context", "500"], 2, "expected a multiple of 16"),
        (["--context", "128"], 2, "above the budget 160"),
        (["--preset", "gpt-9"], 2, "expected one of llama2-7b"),
        (["--budget", "32"], 2, "expected at least 96 tokens"),
        (["--heads", "5"], 2, "expected a multiple of 2 KV heads"),
        (["--kv-dtype", "int4"], 2, "expected 'model' or 'int8'"),
        (["--context", "528", "--span-pages", "4"], 2, "expected a multiple of 64"),
        (["--span-pages", "1"], 2, "expected 0 (no spans) or at least 2, got 1"),
        (["--dtype", "int8"], 2, "expected one of float32"),
        (["--json", "/nowhere/rows.json"], 1, "there is no folder"),
        (["--plot", "/nowhere/times.png"], 1, "--plot /nowhere/times.png: there is no folder"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], code: int, message: str) -> None:
    got, out, err = run(*arguments)
    assert got == code
    assert message in " ".join(err.split())
    assert "Traceback" not in out + err


def test_a_plot_is_a_picture_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the figure needs matplotlib")
    code, _, err = run("--context", "512,1024", "--plot", str(tmp_path / "times.png"))
    assert code == 0, err
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    monkeypatch.setattr("questkv.benchmark.attention.Attention.measure", lambda *_: pytest.fail("was timed"))
    code, _, err = run("--plot", "times.png")
    assert code == 1
    assert "pip install matplotlib" in err
