"""What the commands print: the answer on standard output, all else on standard error.

A progress bar is drawn on a terminal only, other people's warnings never. Names, titles and answers are foreign text:
they are shown and never interpreted, neither by the terminal nor as rich's markup.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from questkv import files
from questkv.cli import streams
from questkv.cli.shown import json_shown, shown, shown_line

STDOUT = "-"
_PACKAGE = str(Path(__file__).resolve().parent.parent)
# Where the output is no terminal, nothing has to fit.
_ANY_WIDTH = 100_000


def note(message: str) -> None:
    """Print one line about the run on standard error."""
    streams.say(f"questkv: {message}")


def stream_text(piece: str) -> None:
    """Print a piece of an answer at once: to a terminal as it is to be read, elsewhere as it is."""
    streams.write(shown(piece) if sys.stdout.isatty() else piece)


def print_out(*parts: Any) -> None:
    """Print texts and rich's tables on standard output, whole where it is no terminal."""
    with streams.guarded():
        console = _Console(width=None if sys.stdout.isatty() else _ANY_WIDTH)
        for part in parts:
            console.print(part)


class _Console(Console):
    """A console to which every text is foreign."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """A text as rich shows it; cells, headings and titles of tables come by here too."""
        return super().render_str(shown(text), **options)


def screen() -> Console:
    """The console on standard error: for bars, on a terminal."""
    return _Console(stderr=True)


def description_column() -> TextColumn:
    """The column of a bar that says what is being done."""
    return TextColumn("{task.description}", markup=False)


def quiet_libraries() -> None:
    """Silence the libraries under us; warnings raised in questkv come out as one line each.

    Must run before transformers is imported: it reads its settings then.
    """

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if str(Path(filename).resolve()).startswith(_PACKAGE) and category is not DeprecationWarning:
            note(f"warning: {' '.join(str(message).split())}")

    warnings.showwarning = show
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    # transformers imports torchao where it is installed, which tells of parts for GPUs that aren't there
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def quiet_progress_bars() -> None:
    """Turn off transformers' own progress bars; the hub's downloads keep theirs on a terminal."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if not sys.stderr.isatty():
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()


@contextlib.contextmanager
def busy(what: str) -> Iterator[None]:
    """Show that something takes time, on a terminal."""
    console = screen()
    if not console.is_terminal:
        yield
        return
    with console.status(Text(shown_line(what))):
        yield


@contextlib.contextmanager
def token_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Draw a progress bar over `total` tokens on a terminal; gives the function that moves it."""
    console = screen()
    if not console.is_terminal:
        yield lambda done: None
        return
    columns = (
        description_column(),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(shown_line(what), total=total)
        yield lambda done: progress.update(task, completed=done)


def write_json(target: str, values: Mapping[str, Any], *, indent: int | None = 2) -> None:
    """Write one JSON object to a file, or to standard output where `target` is ``-``.

    Raises:
        OutputError: It can't be written.
    """
    text = json_text(values, indent=indent)
    if target != STDOUT:
        write_text(target, text, "--json")
        return
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:  # JSON has escapes of its own for what the encoding can't hold
        text = json_text(values, indent=indent, ascii_only=True)
    streams.write(text)


def json_text(values: Mapping[str, Any], *, indent: int | None = 2, ascii_only: bool = False) -> str:
    """An object as JSON, without raw control characters, and a line break."""
    return json_shown(json.dumps(values, indent=indent, ensure_ascii=ascii_only)) + "\n"


def write_text(target: str, text: str, option: str) -> None:
    """Write a file that an option named.

    Raises:
        OutputError: The file can't be written.
    """
    files.write_whole(target, files.encoded(text), option)


class JsonLines:
    """``--json`` of a command that answers several times: a line each, on standard output or in a file.

    A file holds whole lines at any time: it is written anew with each of them. What can't be replaced, a pipe or a
    device, gets each line as it comes.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._held: list[str] | None = None
        if target != STDOUT and (not os.path.exists(target) or os.path.isfile(target)):
            self._held = []
            write_text(target, "", "--json")

    def add(self, values: Mapping[str, Any]) -> None:
        """Write one line.

        Raises:
            OutputError: It can't be written; the lines before it stay.
        """
        if self._held is None:
            write_json(self._target, values, indent=None)
            return
        self._held.append(json_text(values, indent=None))
        write_text(self._target, "".join(self._held), "--json")
