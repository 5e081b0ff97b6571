"""`questkv eval recall`, `longbench` and `harness`: what they print and write, and what they refuse."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

Run = Callable[..., Result]
SMALL = ["--lengths", "300", "--budgets", "128,200", "--steps", "3", "--dtype", "float32"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_recall_compares_rules_and_writes_files(run: Run, tiny_model: str, document: Path) -> None:
    knobs = ["--optimism", "0.5,1", "--group", "mean,per_head", "--page-size", "16,8"]
    files = ["--json", "rows.json", "--markdown", "tables.md", "--plot", "figure.png"]
    done = run("eval", "recall", str(document), "--model", tiny_model, *SMALL, *knobs, *files, "--output", "out")
    assert done.exit_code == 0, done.stderr
    assert "300 tokens: share of attention mass kept" in done.stdout
    assert "quest a=1 per_head, pages of 8" in done.stdout
    saved = json.loads(Path("rows.json").read_text(encoding="utf-8"))
    assert len(saved["rows"]) == (1 + 2 + 8) * 2 + 3
    assert saved["suggestions"][0]["config"]["page_size"] == 16
    assert saved["run"]["settings"]["text"]["name"] == "document.txt"
    page = Path("tables.md").read_text(encoding="utf-8")
    assert "## 300 tokens: relative error of a layer's output, lower is better" in page
    assert "`questkv eval recall" in page or "# recall" in page
    assert Path("figure.png").read_bytes().startswith(b"\x89PNG")
    again = run("eval", "recall", str(document), "--model", tiny_model, *SMALL, *knobs, "--output", "out", "--resume")
    assert again.stdout == done.stdout


def test_suggest_prints_what_each_layer_needs_and_a_config_line(run: Run, tiny_model: str, document: Path) -> None:
    done = run("eval", "recall", str(document), "--model", tiny_model, *SMALL, "--suggest", "0.6", "--json", "r.json")
    assert done.exit_code == 0, done.stderr
    (suggestion,) = json.loads(Path("r.json").read_text(encoding="utf-8"))["suggestions"]
    assert suggestion["line"] == f"QuestConfig(token_budget={suggestion['mean']})"
    assert suggestion["line"] in done.stdout
    assert "layer 0 (dense)" in done.stdout
    assert "share of attention mass kept" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--suggest", "1.5"], 2, "expected a share of the attention mass in (0, 1)"),
        (["--optimism", "half"], 2, "--optimism: expected values separated by commas"),
        (["--group", "median"], 2, "group: expected 'mean'"),
        (["--budgets", "64"], 2, "expected at least 96 tokens"),
        (["--lengths", "900"], 1, "expected at least 903 tokens"),
        (["--plot", "figure.jpg"], 2, "expected a file that ends in .png or .svg"),
    ],
)
def test_recall_refuses_in_one_line(
    run: Run, tiny_model: str, document: Path, arguments: list[str], code: int, message: str
) -> None:
    done = run("eval", "recall", str(document), "--model", tiny_model, *SMALL, *arguments)
    assert done.exit_code == code
    assert message in " ".join(done.stderr.replace("│", " ").split())


def write_records(folder: Path, name: str) -> None:
    record = {"input": "Who?", "context": "Ann came at noon. " * 9, "answers": ["Ann"], "all_classes": ["Ann", "Bob"]}
    (folder / f"{name}.jsonl").write_text(f"{json.dumps(record)}\n" * 2, encoding="utf-8")


@pytest.mark.slow
def test_longbench_has_a_table_for_each_data_set(run: Run, tiny_model: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in ("hotpotqa", "trec"):
        write_records(data, name)
    done = run(
        *("eval", "longbench", "--data", str(data), "--datasets", "hotpotqa,trec", "--max-length", "600"),
        *("--methods", "full,quest", "--budgets", "128", "--samples", "1", "--model", tiny_model, "--output", "out"),
        *("--dtype", "float32", "--plot", "figure.svg"),
    )
    assert done.exit_code == 0, done.stderr
    assert "hotpotqa: score (1 sample)" in done.stdout
    assert "trec: score (1 sample)" in done.stdout
    rows = [json.loads(line) for line in Path("out", "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(row["sample"], row["method"]) for row in rows] == [
        (f"{name}-0", method) for name in ("hotpotqa", "trec") for method in ("full", "quest")
    ]
    assert Path("figure.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--datasets", "squad"], 2, "expected some of qasper"),
        (["--datasets", "trec,trec"], 2, "each once, got trec twice"),
        (["--datasets", "qasper"], 1, "qasper.jsonl, got no such file"),
    ],
)
def test_longbench_refuses_in_one_line(run: Run, tmp_path: Path, arguments: list[str], code: int, message: str) -> None:
    done = run("eval", "longbench", "--data", str(tmp_path), *arguments)
    assert done.exit_code == code
    assert message in " ".join(done.stderr.split())


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval: pip install 'questkv[eval]'")
def test_harness_refuses_a_task_that_nobody_knows(run: Run, tiny_model: str) -> None:
    done = run("eval", "harness", "--tasks", "no_such_task", "--model", tiny_model)
    assert done.exit_code == 2
    assert "expected tasks of lm-evaluation-harness, got 'no_such_task'" in " ".join(done.stderr.split())


def test_harness_without_its_package_names_the_command_that_installs_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find(name))
    done = run("eval", "harness", "--tasks", "arc_easy")
    assert done.exit_code == 1
    assert "pip install 'questkv[eval]'" in done.stderr
