"""Standard streams that are closed, full or of another encoding, and faults that nobody foresaw: one line each."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from questkv.cli import app as application
from questkv.cli import output, streams
from questkv.cli.shown import json_shown, shown, shown_line
from questkv.errors import OutputError

Run = Callable[..., Result]
FULL = Path("/dev/full")
needs_full_device = pytest.mark.skipif(not FULL.exists(), reason="the system has no /dev/full")


def shell(command: str, environment: dict[str, str], **more: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command line with ``questkv`` in it; `more` goes into its environment."""
    line = command.replace("questkv", f"{sys.executable} -m questkv")
    return subprocess.run(
        ["bash", "-c", line], env={**environment, **more}, capture_output=True, check=False, timeout=300
    )


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("questkv --version >&-", 1, "questkv: error: standard output is closed; send it to a file"),
        ("questkv ask none.txt q >&-", 1, "questkv: error: standard output is closed; send it to a file"),
        ("questkv ask - q <&-", 1, "questkv: error: document standard input: is closed; expected a text"),
        ("questkv chat none.txt <&-", 2, "the questions come from standard input, and it is closed"),
        ("questkv ask none.txt q 2>&-", 1, ""),
        ("questkv ask none.txt $'\\xff'", 2, "QUESTION: is not valid utf-8 (byte 0xff at character 0)"),
        ("questkv ask none.txt q --answer-prefix $'a\\xe9'", 2, "--answer-prefix: is not valid utf-8 (byte 0xe9 at"),
        ("questkv ask '~nosuchuser.txt' q", 1, "questkv: error: document ~nosuchuser.txt: no such file"),
        ("questkv ask $'\\xff.txt' q", 1, "questkv: error: document \\udcff.txt: no such file"),
        ("questkv ask $'a\\e[2J.txt' q", 1, "questkv: error: document a\\x1b[2J.txt: no such file"),
        ("questkv ask a q $'--\\e[2J'", 2, "No such option: --\\x1b[2J"),
    ],
)
def test_what_is_closed_or_no_text_is_one_line(
    child_environment: dict[str, str], tmp_path: Path, command: str, code: int, message: str
) -> None:
    done = shell(f"cd {tmp_path} && {command}", child_environment, LC_ALL="C.UTF-8")
    assert done.returncode == code, done.stderr
    assert done.stdout == b""
    said = done.stderr.decode()
    assert message in said
    assert said.count("\n") == (1 if message else 0)
    assert "Traceback" not in said


@needs_full_device
@pytest.mark.parametrize("command", ["questkv --version", "questkv --help", "questkv info", "questkv info --json -"])
def test_a_full_disk_behind_standard_output_is_one_line(child_environment: dict[str, str], command: str) -> None:
    done = shell(f"{command} >/dev/full", child_environment)
    assert done.returncode == 1
    assert done.stderr == b"questkv: error: standard output: can't be written: No space left on device\n"


@pytest.mark.slow
@needs_full_device
def test_an_answer_that_meets_a_full_disk_ends_in_one_line(
    tiny_model: str, document: Path, child_environment: dict[str, str]
) -> None:
    done = shell(f"questkv ask {document} What --model {tiny_model} >/dev/full", child_environment)
    assert done.returncode == 1
    assert done.stderr == b"questkv: error: standard output: can't be written: No space left on device\n"


@pytest.mark.slow
def test_a_full_disk_behind_standard_error_ends_nothing(
    child_environment: dict[str, str], tiny_model: str, document: Path
) -> None:
    if not FULL.exists():
        pytest.skip("the system has no /dev/full")
    command = f"questkv ask {document} What --model {tiny_model} --max-new-tokens 4"
    done = shell(f"{command} 2>/dev/full", child_environment)
    assert done.returncode == 0
    assert done.stdout.strip()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_an_answer_that_the_encoding_can_not_hold_is_replaced(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    streams.prepare()
    output.stream_text("a \u2192 b")
    assert raw.getvalue() == b"a \\u2192 b"
    output.write_json("-", {"answer": "\u2192 \x9b \U0001f600"}, indent=None)
    assert raw.getvalue().endswith(b'{"answer": "\\u2192 \\u009b \\ud83d\\ude00"}\n')


class _Terminal(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


STEERING = "\x1b[2J\x07\r\x7f\x9b31m\u202e[/x] :bug: \ttab\n"
SHOWN = r"\x1b[2J\x07\x0d\x7f\x9b31m\u202e[/x] :bug: " + "\ttab\n"


def test_control_characters_are_shown_and_not_obeyed() -> None:
    assert shown(STEERING) == SHOWN
    assert shown_line("a\n\tb\x1b") == r"a\n\tb\x1b"
    assert shown("na\u00efve \u4f60\u597d \u0645\u0631\u062d\u0628\u0627 \U0001f600") == (
        "na\u00efve \u4f60\u597d \u0645\u0631\u062d\u0628\u0627 \U0001f600"
    )
    assert json_shown('"\x9b"') == r'"\u009b"'


def test_an_answer_reaches_a_pipe_as_it_is_and_a_terminal_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, terminal = io.StringIO(), _Terminal()
    for stream in (pipe, terminal):
        monkeypatch.setattr(sys, "stdout", stream)
        output.stream_text(STEERING)
    assert pipe.getvalue() == STEERING
    assert terminal.getvalue() == SHOWN


def test_tables_take_foreign_names_as_text_and_keep_them_whole(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.table import Table

    name = "/models/[/x]/[red]" + "long" * 60
    table = Table(title=f"of {name}")
    table.add_column(name)
    table.add_row(name + ":bug:\x1b[2J")
    output.print_out(table, f"[/x] {name}")
    out = capsys.readouterr().out
    assert out.count(name) == 4
    assert ":bug:\\x1b[2J" in out
    assert f"[/x] {name}\n" in out
    assert "\u2026" not in out


def test_bars_and_waiting_lines_take_foreign_names_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    from questkv.cli.eval_run import share_progress

    drawn = _Terminal()
    monkeypatch.setattr(sys, "stderr", drawn)
    monkeypatch.setenv("TERM", "xterm")
    with output.busy("Loading [/x] \x1b]0;title\x07"):
        pass
    with output.token_progress("Reading [/y] \x1b]0;title\x07", 2) as moved:
        moved(1)
    with share_progress("[/z]") as moved_share:
        moved_share(0.5, "[/w] \x1b]0;title\x07")
    for part in (r"Loading [/x] \x1b]0;title\x07", r"Reading [/y] \x1b]0;title\x07", r"[/w] \x1b]0;title\x07"):
        assert part in drawn.getvalue()
    assert "\x1b]0;" not in drawn.getvalue()


def end(monkeypatch: pytest.MonkeyPatch, body: Callable[[], Any], **environment: str) -> int:
    """The exit code of a command line whose body is another."""
    monkeypatch.setattr(application, "app", body)
    monkeypatch.setattr(streams, "prepare", lambda: None)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as ended:
            application.main()
    finally:
        signal.signal(signal.SIGINT, before)
    code = ended.value.code
    assert isinstance(code, int)
    return code


def test_a_fault_of_ours_is_one_line_with_the_way_to_report_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def body() -> None:
        raise KeyError("\x1b[2Jsurprise\nand more")

    monkeypatch.delenv("QUESTKV_TRACEBACK", raising=False)
    assert end(monkeypatch, body) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("questkv: error: questkv has a fault: KeyError in test_streams.py, line ")
    assert said.endswith("please report it with what QUESTKV_TRACEBACK=1 in the environment shows\n")
    assert "\x1b" not in said
    assert end(monkeypatch, body, QUESTKV_TRACEBACK="1") == 1
    said = capsys.readouterr().err
    assert said.startswith("Traceback (most recent call last):\n")
    assert said.splitlines()[-1].endswith("please report it with the lines above")
    assert "\x1b" not in said


def test_an_interrupt_outside_a_command_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def body() -> None:
        raise KeyboardInterrupt

    assert end(monkeypatch, body) == 130
    assert capsys.readouterr().err == "questkv: interrupted\n"


def test_an_output_that_can_not_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, os.strerror(28))

    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(OutputError, match=r"^standard output: can't be written: No space left on device$"):
        output.stream_text("words")
