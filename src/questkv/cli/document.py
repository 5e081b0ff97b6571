"""Reading a document: a UTF-8 text file, or standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from questkv.errors import DocumentError

STDIN = "-"


def read_document(name: str) -> str:
    """Read a text, from standard input where `name` is ``-``, with line ends made uniform.

    Raises:
        DocumentError: It is missing, no file, empty, or not UTF-8 text.
    """
    label = "standard input" if name == STDIN else name
    try:
        raw = sys.stdin.buffer.read() if name == STDIN else Path(name).expanduser().read_bytes()
    except FileNotFoundError:
        raise DocumentError(f"document {label}: no such file") from None
    except IsADirectoryError:
        raise DocumentError(f"document {label}: is a folder; expected a text file") from None
    except OSError as error:
        raise DocumentError(f"document {label}: can't be read: {error.strerror or error}") from None
    if b"\0" in raw:
        raise DocumentError(f"document {label}: is binary (a NUL byte at offset {raw.index(0)}); expected UTF-8 text")
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
