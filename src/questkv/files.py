"""Result files: written beside their place and renamed, so that a file is the old one or the new one, never a half."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from questkv.errors import OutputError

PARTIAL = ".questkv-partial-"


def check_writable(target: str | Path, label: str) -> None:
    """Refuse a file that can't be written before the work whose result it is to hold.

    Args:
        target: The file; a symbolic link stands for what it points to.
        label: What the message calls it: ``--json``.

    Raises:
        OutputError: Its folder is missing, it is a folder, or it is not ours to write.
    """
    path = _real(target, label)
    if path.is_dir():
        raise OutputError(f"{label} {target}: is a folder; expected a file")
    if not path.parent.is_dir():
        raise OutputError(f"{label} {target}: there is no folder {path.parent}")
    if path.exists() and not os.access(path, os.W_OK):
        raise OutputError(f"{label} {target}: can't be written")
    if not _is_stream(path) and not os.access(path.parent, os.W_OK):
        raise OutputError(f"{label} {target}: can't be written: nothing can be made in the folder {path.parent}")


def refuse_inputs(target: str | Path, label: str, inputs: Mapping[str, str | Path]) -> None:
    """Refuse to write onto what is read: the same file by another name, or a place inside a folder that is read.

    Args:
        target: The file to be written.
        label: What the message calls it.
        inputs: Files and folders that are read, by what the message calls them; some may not exist.

    Raises:
        OutputError: It is one of them.
    """
    path = _real(target, label)
    for name, source in inputs.items():
        read = _real(source, name)
        if not read.is_dir():
            if _is_same(path, read) and not _is_stream(path):
                raise OutputError(f"{label} {target}: is {name}, which is read; choose another file")
        # a hard link to one of a folder's files lies elsewhere
        elif path.is_relative_to(read) or (path.is_file() and any(_is_same(path, file) for file in read.rglob("*"))):
            raise OutputError(f"{label} {target}: lies in {name}, which is read; choose another file")


def write_whole(target: str | Path, content: bytes, label: str) -> None:
    """Write a file whole, or leave what was there.

    A pipe or a device is written as it is; a symbolic link stays and what it points to is replaced; a file that was
    there keeps its permissions.

    Raises:
        OutputError: It can't be written.
    """
    try:
        path = _real(target, label)
        if _is_stream(path):
            with path.open("wb", buffering=0) as stream:
                _write_all(stream.fileno(), content)
            return
        descriptor, partial = tempfile.mkstemp(prefix=PARTIAL, dir=path.parent)
        try:
            try:
                os.fchmod(descriptor, _mode(path))
                _write_all(descriptor, content)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"{label} {target}: can't be written: {error.strerror or error}") from None


def encoded(text: str) -> bytes:
    """A text as UTF-8; what isn't text, as the bytes of a file's name may be, as an escape that JSON reads back."""
    return text.encode("utf-8", errors="backslashreplace")


def _real(target: str | Path, label: str) -> Path:
    """Where a name leads, links followed."""
    try:
        path = Path(os.path.realpath(target))
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
        return path
    except ValueError as error:  # a NUL in the name
        raise OutputError(f"{label} {target}: is no name of a file: {error}") from None
    except OSError as error:  # too long, or behind a folder that isn't ours to look into
        raise OutputError(f"{label} {target}: can't be written: {error.strerror or error}") from None


def _is_stream(path: Path) -> bool:
    """Whether a file is there that holds nothing and so can't be replaced: a pipe, a terminal, a device."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def _is_same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them isn't there
        return one == other


def _mode(path: Path) -> int:
    """The permissions of the file that is there, or those that a new one gets."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:  # a nearly full disk takes a part
        rest = rest[os.write(descriptor, rest) :]
