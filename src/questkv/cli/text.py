"""Whether words from the command line and standard input are text, before a tokenizer meets them."""

from __future__ import annotations

import sys

import typer


def check_valid(words: str) -> None:
    """Refuse words with lone surrogates: bytes that Python couldn't read as text.

    Raises:
        UnicodeEncodeError: It has one.
    """
    words.encode("utf-8")


def check_argument(name: str, words: str) -> None:
    """Refuse an argument that isn't text in the system's encoding.

    Raises:
        typer.BadParameter: It isn't; the message names the argument, the byte and its place.
    """
    try:
        check_valid(words)
    except UnicodeEncodeError as error:
        raise typer.BadParameter(f"{name}: {what_is_invalid(error, sys.getfilesystemencoding())}") from None


def what_is_invalid(error: UnicodeError, encoding: str) -> str:
    """Say which byte can't be read: ``is not valid utf-8 (byte 0xff at offset 3)``."""
    place = ""
    if isinstance(error, UnicodeDecodeError):
        place = f" (byte {error.object[error.start]:#04x} at offset {error.start})"
    elif isinstance(error, UnicodeEncodeError):
        # what os.fsdecode made of a byte is that byte above U+DC00
        byte = ord(error.object[error.start]) & 0xFF
        place = f" (byte {byte:#04x} at character {error.start})"
    return f"is not valid {encoding}{place}"
