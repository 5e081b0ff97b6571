"""How a command ends: one line, whatever was interrupted where."""

from __future__ import annotations

import signal
import time

import pytest
import typer

from questkv.cli.failures import INTERRUPTED, one_line_failures


class Interrupted:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_a_ctrl_c_inside_a_destructor_is_neither_lost_nor_shown(capfd: pytest.CaptureFixture[str]) -> None:
    @one_line_failures()
    def command() -> None:
        held = Interrupted()
        del held  # Python shows what is raised in there, and goes on
        for _ in range(1000):
            time.sleep(0.01)

    with pytest.raises(typer.Exit) as ended:
        command()
    assert ended.value.exit_code == INTERRUPTED
    assert capfd.readouterr().err == "questkv: interrupted\n"


def test_another_exception_inside_a_destructor_is_shown_as_ever(capfd: pytest.CaptureFixture[str]) -> None:
    class Wrong:
        def __del__(self) -> None:
            raise ValueError("wrong")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.unraisablehook", lambda lost: print(f"shown: {lost.exc_value}"))
        with one_line_failures():
            held = Wrong()
            del held
    assert capfd.readouterr().out == "shown: wrong\n"
