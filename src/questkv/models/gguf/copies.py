"""Converted models kept as ordinary model folders, whole or not at all.

Converting takes transformers some 20 s, reading a folder two. A copy carries a manifest, the checksum of every file, so
that damage is found before it is loaded; only a copy that the manifest refutes is replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from questkv.errors import ModelError
from questkv.models.gguf.convert import CONVERSION

MANIFEST = "questkv-manifest.json"
_PARTIAL = ".partial-"
_STALE_AFTER_S = 24 * 3600


def copy_name(path: Path, dtype: str) -> str:
    """Name of a file's copy: it changes with the content, the dtype and everything that does the converting.

    Raises:
        ModelError: The file can't be read.
    """
    try:
        digest = hashlib.sha256(_digest(path).encode())
    except OSError as error:
        raise ModelError(f"model {path}: {error.strerror or error}") from None
    digest.update(f"questkv {CONVERSION}".encode())
    for made_by in ("transformers", "gguf"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            digest.update(f"{made_by} {importlib.metadata.version(made_by)}".encode())
    return f"{path.stem}-{dtype}-{digest.hexdigest()[:16]}"


def is_whole(copy: Path) -> bool:
    """Whether a copy is there and holds exactly what was written into it.

    Raises:
        OSError: It can't be read, which says nothing about what it holds.
    """
    try:
        manifest = json.loads((copy / MANIFEST).read_bytes())
        names = {file.name for file in copy.iterdir() if not file.name.startswith(".")} - {MANIFEST}
        return names == manifest.keys() and all(_digest(copy / name) == manifest[name] for name in names)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, AttributeError):
        return False


def keep(target: Path, write: Callable[[Path], None]) -> None:
    """Write a copy under another name, force it to the disk, and rename it.

    So neither a killed process nor a power cut leaves a half-written folder under the name that is read. What lies
    there already is replaced, unless it is whole: then another process was faster, and its copy is as good.

    Args:
        target: The copy's folder.
        write: Writes all its files into the folder that it is given.

    Raises:
        OSError: It can't be written or renamed, or lies there and can't be read.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target.parent)
    partial = _new_folder(target.parent)
    try:
        write(partial)
        files = sorted(partial.iterdir())
        manifest = {file.name: _digest(file) for file in files}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
        readable = (partial / MANIFEST).stat().st_mode & 0o777
        for file in [*files, partial / MANIFEST]:
            file.chmod(readable)  # as the umask has it: safetensors makes files that nobody else can read
            with file.open("rb+") as handle:
                os.fsync(handle.fileno())
        try:
            partial.rename(target)
        except OSError:
            if not os.path.lexists(target):
                raise
            if not is_whole(target):
                _replace(target, partial)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _replace(target: Path, partial: Path) -> None:
    """Put a new copy in a damaged one's place; where that fails, the damaged one is still there."""
    aside = _new_folder(target.parent)
    try:
        target.rename(aside / target.name)
        partial.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _new_folder(parent: Path) -> Path:
    """A folder with the permissions that the user's umask gives: tempfile's would shut others out of the copy."""
    folder = parent / f"{_PARTIAL}{secrets.token_hex(8)}"
    folder.mkdir()
    return folder


def _digest(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _sweep(folder: Path) -> None:
    """Remove what killed processes left half-written; the young may belong to a process that is still writing."""
    for left in folder.glob(f"{_PARTIAL}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_AFTER_S:
                shutil.rmtree(left, ignore_errors=True)
