"""One way for a command to fail: a line on standard error, an exit code, no traceback."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import typer

from questkv.cli import streams
from questkv.cli.shown import shown
from questkv.errors import ConfigError, QuestKVError

FAILED = 1
BAD_ARGUMENTS = 2
INTERRUPTED = 128 + signal.SIGINT
TRACEBACK = "QUESTKV_TRACEBACK"
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "std::bad_alloc", "cannot allocate")


@contextlib.contextmanager
def one_line_failures() -> Iterator[None]:
    """Run a command's body; what the user caused ends it with one line and the right exit code.

    Anything else is a fault of ours and goes on to `report_fault`.
    """
    with noted_interrupts() as interrupted:
        try:
            yield
        except typer.Exit:
            raise
        except ConfigError as error:
            fail(str(error), BAD_ARGUMENTS)
        except QuestKVError as error:
            fail(str(error))
        except KeyboardInterrupt:
            fail("interrupted", INTERRUPTED)
        except BrokenPipeError:
            streams.drop_output()  # the reader has gone
            raise typer.Exit(FAILED) from None
        except Exception as error:
            if interrupted:  # a Ctrl-C inside somebody's import can come out as another error
                fail("interrupted", INTERRUPTED)
            if is_out_of_memory(error):
                fail(_memory_line(error))
            raise


def fail(message: str, code: int = FAILED) -> None:
    """Print one line and end the command.

    Raises:
        typer.Exit: Always.
    """
    with contextlib.suppress(OSError, ValueError):  # the line says what went wrong first
        sys.stdout.flush()
    say_failure(message, code)
    raise typer.Exit(code) from None


def say_failure(message: str, code: int = FAILED) -> None:
    """Print the line of a command that fails."""
    line = " ".join(message.split())
    streams.say(f"questkv: {line}" if code == INTERRUPTED else f"questkv: error: {line}")


def report_fault(error: Exception) -> int:
    """Say in one line that questkv has a fault, and how to report it; gives the exit code.

    With ``QUESTKV_TRACEBACK=1`` the traceback stands before it.
    """
    if os.environ.get(TRACEBACK, "") not in ("", "0"):
        with contextlib.suppress(OSError, ValueError):
            print(shown("".join(traceback.format_exception(error))), end="", file=sys.stderr, flush=True)
        advice = "please report it with the lines above"
    else:
        advice = f"please report it with what {TRACEBACK}=1 in the environment shows"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    text = " ".join(str(error).split())[:300]
    say_failure(f"questkv has a fault: {type(error).__name__}{place}{f': {text}' if text else ''}; {advice}")
    return FAILED


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: torch raises plain RuntimeErrors for it on the CPU."""
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(sign in text for sign in _OUT_OF_MEMORY)


def _memory_line(error: BaseException) -> str:
    """The out-of-memory line, with torch's own first sentence where it says how much was wanted."""
    detail = str(error).strip().splitlines()[0][:160] if str(error).strip() else "the system gave no memory"
    return f"out of memory: {detail}; try a shorter document (--tail), --dtype bfloat16 or a smaller model"


@contextlib.contextmanager
def noted_interrupts() -> Iterator[list[int]]:
    """Note each Ctrl-C before it is raised as a KeyboardInterrupt.

    A handler can be set in the main thread only; and a Ctrl-C that the shell told us to ignore stays ignored. One that
    comes while Python calls a ``__del__`` would be shown there and lost; it is sent again.
    """
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
        yield noted
        return
    show = sys.unraisablehook

    def again(lost: sys.UnraisableHookArgs) -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            show(lost)
            return
        threading.Thread(target=send_outside, daemon=True).start()

    def send_outside() -> None:
        """Send it when the main thread is out of `again`, where it would be lost once more."""
        while again.__code__ in (frame.f_code for frame, _ in traceback.walk_stack(main_frame())):
            time.sleep(0.001)
        signal.raise_signal(signal.SIGINT)

    def main_frame() -> FrameType | None:
        return sys._current_frames().get(threading.main_thread().ident or 0)

    signal.signal(signal.SIGINT, note)
    sys.unraisablehook = again
    try:
        yield noted
    finally:
        sys.unraisablehook = show
        signal.signal(signal.SIGINT, before)
