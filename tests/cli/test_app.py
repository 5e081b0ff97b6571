"""The command as a whole: help, version, info, Ctrl-C, and that help imports nothing heavy."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.markup import render
from typer.testing import Result

from questkv import __version__
from questkv.cli.app import app

Run = Callable[..., Result]


def start(environment: dict[str, str], *arguments: str, **pipes: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "questkv", *arguments], env=environment, **pipes)  # type: ignore[call-overload,no-any-return]


def test_version(run: Run) -> None:
    assert run("--version").stdout == f"questkv {__version__}\n"


@pytest.mark.parametrize("command", [[], ["ask"], ["chat"], ["info"]])
def test_help(run: Run, command: list[str]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout


def every_help(command: Any, path: str = "questkv") -> Iterator[tuple[str, str]]:
    """Where a help text stands, and the text: of a command, its options and its subcommands."""
    yield path, command.help or ""
    for parameter in command.params:
        yield f"{path} {parameter.name}", getattr(parameter, "help", None) or ""
    for name, below in getattr(command, "commands", {}).items():
        yield from every_help(below, f"{path} {name}")


def test_no_help_text_is_swallowed_as_markup() -> None:
    texts = dict(every_help(typer.main.get_command(app)))
    assert "questkv eval passkey threads" in texts
    assert [where for where, text in texts.items() if render(text).plain != text] == []


@pytest.mark.parametrize(
    ("command", "default"),
    [
        (["ask"], "[default: (2048)]"),
        (["ask"], "[default: (torch's choice)]"),
        (["eval", "harness"], "[default: (all)]"),
    ],
)
def test_help_tells_a_default_that_is_worked_out_later(run: Run, command: list[str], default: str) -> None:
    assert default in " ".join(run(*command, "--help").stdout.replace("\u2502", " ").split())


def test_help_imports_neither_torch_nor_transformers(child_environment: dict[str, str]) -> None:
    code = (
        "import sys\nfrom questkv.cli.app import app\n"
        "try: app(['ask', '--help'])\nexcept SystemExit: pass\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=child_environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_info_lists_what_there_is(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUESTKV_CACHE_DIR", str(tmp_path))
    kept = tmp_path / "models" / "some-model"
    kept.mkdir(parents=True)
    (kept / "model.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "models" / ".partial-1").mkdir()
    values = json.loads(run("info", "--json", "-").stdout)
    assert values["questkv"] == __version__
    assert values["backends"]["reference"] == "available"
    assert list(values["backends"]) == ["native", "triton", "reference"]
    assert values["model_cache"] == {"folder": str(tmp_path / "models"), "models": {"some-model": 100}}
    assert values["cpu"]["cores"] >= 1
    table = run("info")
    assert table.exit_code == 0
    assert "some-model" in table.stdout


def test_info_survives_a_machine_without_proc(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.read_text

    def no_proc(path: Path, *args: str | None, **kwargs: str | None) -> str:
        if str(path).startswith("/proc"):
            raise FileNotFoundError(path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", no_proc)
    assert json.loads(run("info", "--json", "-").stdout)["cpu"]["instruction_sets"] == []


@pytest.mark.slow
def test_ctrl_c_while_decoding_keeps_what_was_printed(
    roomy_model: str, document: Path, child_environment: dict[str, str]
) -> None:
    process = start(
        child_environment,
        *("ask", str(document), "What?", "--model", roomy_model, "--max-new-tokens", "500000", "--threads", "1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert first + rest
    assert errors == b"questkv: interrupted\n"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_ctrl_c_during_prefill(roomy_model: str, tmp_path: Path, child_environment: dict[str, str]) -> None:
    document = tmp_path / "long.txt"
    document.write_text("a lamp " * 40_000, encoding="utf-8")
    ours, theirs = os.openpty()  # the progress bar, which tells when prefill runs, is drawn on a terminal only
    process = start(
        {**child_environment, "TERM": "xterm"},
        *("ask", str(document), "What?", "--model", roomy_model, "--threads", "1"),
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    while b"Reading" not in shown:
        shown += os.read(ours, 4096)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    answer, _ = process.communicate(timeout=120)
    while True:
        try:
            more = os.read(ours, 4096)
        except OSError:  # Linux's way to say that the other end is closed
            break
        if not more:
            break
        shown += more
    os.close(ours)
    assert process.returncode == 130
    assert answer == b""
    assert b"questkv: interrupted" in shown
    assert b"Traceback" not in shown
