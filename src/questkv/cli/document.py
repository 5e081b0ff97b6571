"""Reading a document: a UTF-8 text file, or standard input."""

from __future__ import annotations

import os
import stat
import sys
from typing import BinaryIO

from questkv.cli import output
from questkv.cli.formats import format_of
from questkv.errors import DocumentError

STDIN = "-"
# Ten times what the longest context of any model holds.
MAX_BYTES = 256 << 20
_PIECE = 1 << 20


def read_document(name: str) -> str:
    """Read a text, from standard input where `name` is ``-``, with line ends made uniform.

    At most `MAX_BYTES` are read, so a pipe or a device that never ends is refused too.

    Raises:
        DocumentError: It is missing, no file, empty, too large, not UTF-8 text, or of another format.
    """
    label = "standard input" if name == STDIN else name
    try:
        raw = _read_stdin() if name == STDIN else _read_file(os.path.expanduser(name), label)
    except FileNotFoundError:
        raise DocumentError(f"document {label}: no such file") from None
    except IsADirectoryError:
        raise DocumentError(f"document {label}: is a folder; expected a text file") from None
    except DocumentError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DocumentError(f"document {label}: can't be read: {reason}") from None
    return _as_text(raw, label)


def _read_stdin() -> bytes:
    if sys.stdin is None:
        raise DocumentError("document standard input: is closed; expected a text")
    if sys.stdin.isatty():
        output.note("reading the document from the terminal; Ctrl-D on a line of its own ends it")
    return _read(sys.stdin.buffer, "standard input")


def _read_file(path: str, label: str) -> bytes:
    with open(path, "rb") as file:
        state = os.fstat(file.fileno())
        if stat.S_ISREG(state.st_mode) and state.st_size > MAX_BYTES:
            raise _too_large(label)
        if file.isatty():
            raise DocumentError(f"document {label}: is a terminal; expected a text file, or - for standard input")
        return _read(file, label)


def _read(file: BinaryIO, label: str) -> bytes:
    """All of it, piece by piece, so that what isn't text or doesn't end is refused early."""
    pieces: list[bytes] = []
    size = 0
    while piece := file.read(_PIECE):
        if not pieces:
            _refuse_formats(piece, label)
        if b"\0" in piece:
            place = size + piece.index(0)
            raise DocumentError(f"document {label}: is binary (a NUL byte at offset {place}); expected UTF-8 text")
        pieces.append(piece)
        size += len(piece)
        if size > MAX_BYTES:
            raise _too_large(label)
    return b"".join(pieces)


def _refuse_formats(beginning: bytes, label: str) -> None:
    found = format_of(beginning)
    if found is not None:
        raise DocumentError(f"document {label}: is {found.name}; expected UTF-8 text: {found.advice}")


def _too_large(label: str) -> DocumentError:
    return DocumentError(
        f"document {label}: is larger than {MAX_BYTES >> 20} MiB, which no model's context holds; give a part of it, "
        "for example the end with tail -c 10M"
    )


def _as_text(raw: bytes, label: str) -> str:
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"document {label}: is not UTF-8 text (byte {raw[error.start]:#04x} at offset {error.start}); convert it, "
            "for example with iconv -t UTF-8"
        ) from None
    text = text.replace("\r\n", "\n").strip()
    if not text:
        raise DocumentError(f"document {label}: is empty")
    return text
