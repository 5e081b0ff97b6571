"""Standard input, output and error as a command needs them, however it was started.

A stream may be closed, a full disk, or of an encoding that can't hold the answer.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator

from questkv.cli.shown import shown_line
from questkv.errors import OutputError

CLOSED_OUTPUT = "standard output is closed; send it to a file, or to /dev/null where nobody reads it"


def prepare() -> None:
    """Make the streams fit to be used: called once, before anything is read or written.

    What is closed gets the null device, so that no file that is opened later takes its number and is written into. What
    an encoding can't hold is replaced by its escape, and doesn't end the command in the middle of an answer.

    Raises:
        OutputError: Standard output is closed: the answer would be lost.
    """
    for number in range(3):
        _occupy(number)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdout, io.TextIOWrapper):
        line, through, encoding = sys.stdout.line_buffering, sys.stdout.write_through, sys.stdout.encoding
        sys.stdout = _Output(
            sys.stdout.detach(), encoding, "backslashreplace", line_buffering=line, write_through=through
        )
    if sys.stdout is None:
        raise OutputError(CLOSED_OUTPUT)


class _Output(io.TextIOWrapper):
    """Standard output whose errors name it, whoever writes: help texts are not ours."""

    def write(self, text: str) -> int:
        """As of any text file.

        Raises:
            OutputError: It can't be written.
            BrokenPipeError: Its reader has gone.
        """
        with guarded():
            return super().write(text)

    def flush(self) -> None:
        """As of any text file; errors as of `write`."""
        with guarded():
            super().flush()


def write(text: str) -> None:
    """Write to standard output at once.

    Raises:
        OutputError: It can't be written: a full disk.
        BrokenPipeError: Its reader has gone.
    """
    with guarded():
        sys.stdout.write(text)
        sys.stdout.flush()


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Name standard output in the errors of what writes to it.

    Raises:
        OutputError: It can't be written.
        BrokenPipeError: Its reader has gone.
    """
    try:
        yield
    except (BrokenPipeError, OutputError):
        raise
    except OSError as error:
        drop_output()
        raise OutputError(f"standard output: can't be written: {error.strerror or error}") from None


def say(line: str) -> None:
    """Print one line on standard error, control characters as escapes; a failure to do so can be told to nobody."""
    with contextlib.suppress(OSError, ValueError):
        print(shown_line(line), file=sys.stderr, flush=True)


def drop_output() -> None:
    """Send what standard output still holds to the null device: else Python writes it once more at exit, and fails."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _occupy(number: int) -> None:
    try:
        os.fstat(number)
    except OSError:
        null = os.open(os.devnull, os.O_RDWR)
        if null != number:
            os.dup2(null, number)
            os.close(null)
