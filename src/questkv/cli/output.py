"""What the commands print: the answer on standard output, all else on standard error.

A progress bar is drawn on a terminal only, other people's warnings never.
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

from questkv.errors import QuestKVError

STDOUT = "-"
_PACKAGE = str(Path(__file__).resolve().parent.parent)


class OutputError(QuestKVError, OSError):
    """A result can't be written where it was asked for."""


def note(message: str) -> None:
    """Print one line about the run on standard error."""
    print(f"questkv: {message}", file=sys.stderr, flush=True)


def stream_text(piece: str) -> None:
    """Print a piece of an answer at once."""
    sys.stdout.write(piece)
    sys.stdout.flush()


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
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


@contextlib.contextmanager
def token_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Draw a progress bar over `total` tokens on a terminal; gives the function that moves it."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)


def check_writable(target: str | None, option: str = "--json") -> None:
    """Refuse a file that can't be written before the work whose result it is to hold.

    Raises:
        OutputError: Its folder is missing, it is a folder, or it is not ours to write.
    """
    if target is None or target == STDOUT:
        return
    path = Path(target)
    if path.is_dir():
        raise OutputError(f"{option} {target}: is a folder; expected a file")
    if not path.parent.is_dir():
        raise OutputError(f"{option} {target}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OutputError(f"{option} {target}: can't be written")


def write_json(target: str, values: Mapping[str, Any], *, indent: int | None = 2, append: bool = False) -> None:
    """Write one JSON object to a file, or to standard output where `target` is ``-``.

    Raises:
        OutputError: The file can't be written.
    """
    text = json.dumps(values, indent=indent, ensure_ascii=False) + "\n"
    if target == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    write_text(target, text, "--json", append=append)


def write_text(target: str, text: str, option: str, *, append: bool = False) -> None:
    """Write a file that an option named.

    Raises:
        OutputError: The file can't be written.
    """
    try:
        with open(target, "a" if append else "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise OutputError(f"{option} {target}: can't be written: {error.strerror}") from None
