"""`questkv eval`: tables, files, what it refuses, and a run that was killed."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

Run = Callable[..., Result]
FEW = ["--methods", "full,quest,h2o", "--budgets", "64,128", "--lengths", "300", "--samples", "3", "--dtype", "float32"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows without what differs from run to run."""
    lines = (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in lines]


@pytest.mark.slow
def test_a_run_writes_rows_table_markdown_json_and_figure(run: Run, tiny_model: str, tmp_path: Path) -> None:
    files = ["--json", "rows.json", "--markdown", "table.md", "--plot", "figure.svg"]
    done = run("eval", "passkey", "--model", tiny_model, *FEW, "--output", "out", *files)
    assert done.exit_code == 0, done.stderr
    assert "300 tokens: keys found (3 samples)" in done.stdout
    assert "At 64, quest ran with sink_tokens=16 and recent_tokens=0" in done.stdout
    assert "questkv: 15 rows in out" in done.stderr
    saved = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert [{k: v for k, v in row.items() if k != "seconds"} for row in saved["rows"]] == rows_of(tmp_path / "out")
    assert saved["run"] == json.loads((tmp_path / "out" / "run.json").read_text(encoding="utf-8"))
    assert {"torch", "transformers", "questkv"} <= set(saved["run"]["environment"])
    assert saved["run"]["settings"] == {
        "lengths": [300],
        "positions": 3,
        "seed": 0,
        "prompt": "plain",
    }
    assert saved["run"]["model"]["dtype"] == "float32"
    assert "| method | 64 | 128 | all |" in (tmp_path / "table.md").read_text(encoding="utf-8")
    assert (tmp_path / "figure.svg").read_bytes().startswith(b"<?xml")


def test_pages_in_eight_bits_are_every_methods(run: Run, tiny_model: str, tmp_path: Path) -> None:
    few = [*FEW, "--samples", "1", "--kv-dtype", "int8"]
    done = run("eval", "passkey", "--model", tiny_model, *few, "--methods", "full,quest,h2o,oracle", "--output", "out")
    assert done.exit_code == 0, done.stderr
    assert {row["kv_dtype"] for row in rows_of(tmp_path / "out")} == {"int8"}
    assert json.loads((tmp_path / "out" / "run.json").read_text(encoding="utf-8"))["quest"]["kv_dtype"] == "int8"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to offload from")
def test_pages_in_host_memory_need_a_gpu(run: Run, tiny_model: str) -> None:
    done = run("eval", "passkey", "--model", tiny_model, *FEW, "--offload", "host")
    assert done.exit_code == 1
    assert "--offload: expected a GPU for host, got none" in done.stderr


def test_json_on_standard_output_is_all_there_is(run: Run, tiny_model: str) -> None:
    done = run("eval", "passkey", "--model", tiny_model, *FEW, "--samples", "1", "--methods", "full", "--json", "-")
    assert done.exit_code == 0, done.stderr
    assert [row["method"] for row in json.loads(done.stdout)["rows"]] == ["full"]


def test_settings_have_a_folder_each_and_a_finished_run_is_shown_again(
    run: Run, tiny_model: str, tmp_path: Path
) -> None:
    once = ["eval", "passkey", "--model", tiny_model, *FEW, "--samples", "1", "--methods", "full"]
    first = run(*once)
    assert run(*once, "--seed", "1").exit_code == 0
    assert len(list((tmp_path / "questkv-eval").iterdir())) == 2
    refused = run(*once)
    assert refused.exit_code == 1
    assert "holds 1 finished rows; continue with --resume" in refused.stderr
    again = run(*once, "--resume")
    assert (again.exit_code, again.stdout) == (0, first.stdout)


@pytest.mark.slow
def test_needle_and_perplexity_read_a_document(run: Run, tiny_model: str, document: Path, tmp_path: Path) -> None:
    shared = ["--model", tiny_model, "--methods", "full,tova", "--budgets", "96", "--dtype", "float32"]
    places = ["--lengths", "300,400", "--samples", "2", "--output", "needles", "--plot", "needles.png"]
    done = run("eval", "needle", str(document), *shared, *places)
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "needles.png").read_bytes().startswith(b"\x89PNG")
    assert {(row["length"], row["depth"]) for row in rows_of(tmp_path / "needles")} == {
        (300, 0.0),
        (300, 1.0),
        (400, 0.0),
        (400, 1.0),
    }
    scored = ["--lengths", "300", "--scored", "21", "--start", "7", "--output", "text", "--plot", "text.png"]
    done = run("eval", "perplexity", str(document), *shared, *scored)
    assert done.exit_code == 0, done.stderr
    assert "perplexity, lower is better (1 sample)" in done.stdout
    assert {len(row["nll"]) for row in rows_of(tmp_path / "text")} == {21}
    assert (tmp_path / "text.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["passkey", "--methods", "full,quset"], 2, "expected some of full, quest"),
        (["passkey", "--budgets", "many"], 2, "expected token counts such as 64,128"),
        (["passkey", "--budgets", "64,64"], 2, "expected each count once"),
        (["passkey", "--budgets", "8"], 2, "expected at least 16 tokens"),
        (["passkey", "--budgets", "0.1"], 2, "expected token counts such as 64,128"),
        (["passkey", "--lengths", "50"], 2, "[passkey] lengths: expected at least 90 tokens, got 50"),
        (["passkey", "--lengths", "4k"], 2, "context of 1,024 tokens"),
        (["passkey", "--prompt", "poem"], 2, "expected plain or chat, got poem"),
        (["passkey", "--optimism", "2"], 2, "--optimism: expected a number in [0, 1], got 2.0"),
        (["passkey", "--group", "median"], 2, "--group: expected 'mean' or"),
        (["passkey", "--page-size", "0"], 2, "--page-size: expected an int >= 1, got 0"),
        (["passkey", "--json", "/nowhere/rows.json"], 1, "--json /nowhere/rows.json: there is no folder"),
        (["passkey", "--markdown", "/nowhere/t.md"], 1, "--markdown /nowhere/t.md: there is no folder"),
        (["passkey", "--markdown", "-"], 2, "--markdown: expected a file, got -"),
        (["passkey", "--plot", "/nowhere/f.png"], 1, "--plot /nowhere/f.png: there is no folder"),
        (["passkey", "--plot", "figure.gif"], 2, "expected a file that ends in .png or .svg"),
        (["passkey", "--output", "/dev/null/out"], 1, "results /dev/null/out: Not a directory"),
        (["passkey", "--model", "./nowhere"], 1, "model ./nowhere: no such file or folder"),
        (["needle", "missing.txt"], 1, "document missing.txt: no such file"),
        (["perplexity", "missing.txt"], 1, "document missing.txt: no such file"),
        (["perplexity", "short.txt"], 1, "document short.txt: expected at least 601 tokens"),
        (["needle", "."], 1, "document .: is a folder"),
    ],
)
def test_bad_arguments_are_one_line(
    run: Run, tiny_model: str, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    (tmp_path / "short.txt").write_text("Too short a text.", encoding="utf-8")
    done = run(
        "eval",
        arguments[0],
        *arguments[1:],
        *([] if "--model" in arguments else ["--model", tiny_model]),
        *([] if "--lengths" in arguments else ["--lengths", "300"]),
    )
    assert done.exit_code == code, done.stderr
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stdout + done.stderr
    assert not list(tmp_path.glob("**/rows.jsonl"))


def test_a_plot_without_matplotlib_is_refused_before_a_model_is_loaded(
    run: Run, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "matplotlib" else find(name, *more)
    )
    monkeypatch.setattr("questkv.cli.eval_run.load", lambda *_: pytest.fail("was loaded"))
    done = run("eval", "passkey", "--model", tiny_model, "--plot", "figure.png")
    assert done.exit_code == 1
    assert "pip install matplotlib" in done.stderr


def start(arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "questkv", "eval", *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for_rows(process: subprocess.Popen[str], file: Path, count: int) -> None:
    while not (file.exists() and file.read_bytes().count(b"\n") >= count):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_was_stopped_resumes_to_the_table_of_an_undisturbed_one(
    run: Run, tiny_model: str, tmp_path: Path, child_environment: dict[str, str], how: signal.Signals
) -> None:
    arguments = ["passkey", "--model", tiny_model, *FEW, "--samples", "4"]
    rows = tmp_path / "stopped" / "rows.jsonl"
    process = start([*arguments, "--output", "stopped"], child_environment)
    wait_for_rows(process, rows, 4)
    process.send_signal(how)
    _, err = process.communicate()
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "finished rows are in stopped; continue with --resume" in err
        assert err.splitlines()[-1] == "questkv: interrupted"
    else:
        assert process.returncode == -signal.SIGKILL
    finished = rows.read_bytes().count(b"\n")
    assert 4 <= finished < 20
    # what a kill in the middle of a write leaves
    rows.write_bytes(rows.read_bytes() + b'{"method": "quest", "budget": 64, "len')

    resumed = run("eval", *arguments, "--output", "stopped", "--resume", "--markdown", "stopped.md")
    assert resumed.exit_code == 0, resumed.stderr
    undisturbed = run("eval", *arguments, "--output", "whole", "--markdown", "whole.md")
    assert resumed.stdout == undisturbed.stdout
    assert rows_of(tmp_path / "stopped") == rows_of(tmp_path / "whole")
    tables = [(tmp_path / name).read_text(encoding="utf-8").partition("## ")[2] for name in ("stopped.md", "whole.md")]
    assert tables[0] == tables[1]
    assert "| full |" in tables[0]
