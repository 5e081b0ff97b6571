"""Every option of every command with values that nobody should give: one line, exit 1 or 2, never a traceback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import Result

from questkv.cli.app import app

Run = Callable[..., Result]
NUMBERS = ("-1", "nan", "inf", "1e-40", "1e999", "99999999999999999999")
VALUES = ("", *NUMBERS, "x" * 5000, "[/x]", "\x1b[2J", "\udcff", "a\0b")
# A model that isn't there: what passes the checks of the arguments ends at it.
NOWHERE = "./nowhere/model"


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def cases() -> Iterator[tuple[tuple[str, ...], str, str]]:
    """A command, one of its options, and a value; a model's name may be one on the hub, which asks the network."""
    for path, command in commands(typer.main.get_command(app)):
        for option in command.params:
            if option.param_type_name != "option" or option.is_flag or option.name in ("help", "model"):
                continue
            for value in VALUES:
                yield path, option.opts[0], value


def by_command() -> dict[tuple[str, ...], list[tuple[str, str]]]:
    found: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for path, option, value in cases():
        found.setdefault(path, []).append((option, value))
    return found


@pytest.mark.long
@pytest.mark.parametrize("path", [path for path in by_command() if path[-1] not in ("info", "attention")], ids=" ".join)
def test_silly_values_are_one_line(
    run: Run, document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = {"ask": [str(document), "What?"], "chat": [str(document)]}.get(path[-1], [])
    if path[-1] in ("needle", "perplexity", "recall"):
        arguments = [str(document)]
    if path[-1] == "harness":
        arguments = ["--tasks", "none"]
    wrong = []
    for option, value in by_command()[path]:
        done = run(*path, *arguments, "--model", NOWHERE, option, value, stdin="One?\n")
        one_line = len(done.stderr.splitlines()) == 1 and done.stderr.startswith("questkv: error: ")
        ended = done.exit_code in (1, 2) and isinstance(done.exception, SystemExit)
        if not (ended and one_line and "\x1b" not in done.stderr and not done.stdout):
            wrong.append((option, value[:20], done.exit_code, repr(done.exception)[:200], done.stderr[:300]))
    assert not wrong, wrong
    assert [path.name for path in tmp_path.iterdir()] == ["document.txt"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--seed", "4294967296"), "4294967295"),
        (("--threads", "2147483648"), "1024"),
        (("--temperature", "1e-40"), "expected 0, or a number in [0.001, 1000], got 1e-40"),
        (("--temperature", "nan"), "expected 0, or a number in [0.001, 1000], got nan"),
        (("--temperature", "inf"), "expected 0, or a number in [0.001, 1000], got inf"),
    ],
)
def test_what_no_library_under_us_takes_is_a_bad_argument(
    run: Run, tiny_model: str, document: Path, arguments: tuple[str, ...], says: str
) -> None:
    for command in (["ask", str(document), "What?"], ["chat", str(document)]):
        done = run(*command, "--model", tiny_model, *arguments)
        assert done.exit_code == 2
        assert says in done.stderr


def test_the_edges_of_what_is_taken_work(run: Run, tiny_model: str, document: Path) -> None:
    shared = ["ask", str(document), "What?", "--model", tiny_model, "--max-new-tokens", "4"]
    for temperature in ("0.001", "1000"):
        done = run(*shared, "--seed", "4294967295", "--temperature", temperature)
        assert done.exit_code == 0, done.output
    done = run(*shared, "--budget", "99999999999999999999")
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("passkey", "--samples", "1000000000"), "10000"),
        (("passkey", "--lengths", "1000000000"), "expected at most the model's context of 1,024 tokens, got 1,000,000"),
        (("passkey", "--lengths", "99999999999"), "expected token counts such as 64,128 or 4k"),
        (("recall", "DOCUMENT", "--budgets", "8"), "--budgets: expected at least 96 tokens"),
    ],
)
def test_an_evaluation_without_end_is_refused(
    run: Run, tiny_model: str, document: Path, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    words = [str(document) if word == "DOCUMENT" else word for word in arguments]
    done = run("eval", *words, "--model", tiny_model, "--output", str(tmp_path / "out"))
    assert done.exit_code == 2, done.output
    assert says in done.stderr


@pytest.mark.parametrize("command", ["attention", "decode"])
def test_a_benchmark_names_its_budget_by_the_option(run: Run, command: str) -> None:
    done = run("bench", command, "--budget", "8")
    assert done.exit_code == 2
    assert done.stderr.startswith("questkv: error: --budget: expected at least 96 tokens")


@pytest.mark.parametrize("seconds", ["nan", "inf", "1e9", "0"])
def test_a_benchmark_ends(run: Run, seconds: str) -> None:
    done = run("bench", "attention", "--seconds", seconds)
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
