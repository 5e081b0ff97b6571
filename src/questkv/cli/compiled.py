"""Where ``--compile`` keeps what torch compiled, so that the next run is quick."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from questkv.errors import UnsupportedError
from questkv.models import is_private, model_cache_dir

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def keep_compiled() -> None:
    """Name torch's compiler, not yet imported, a folder that only this user can write to: it runs what it finds there.

    That is one beside the converted models; where others can write to that, one of this run's own.

    Raises:
        UnsupportedError: The user has set a folder that others can write to.
    """
    chosen = os.environ.get(_VARIABLE)
    if chosen:
        if not is_private(_made(Path(chosen))):
            raise UnsupportedError(
                f"--compile: expected a folder that only you can write to as {_VARIABLE}, got {chosen}: its files are "
                "run as programs"
            )
        return
    os.environ[_VARIABLE] = str(compiled_dir() or _for_this_run())


def compiled_dir() -> Path | None:
    """The folder beside the converted models, made where it isn't there yet; None where others can write to it."""
    try:
        folder = (model_cache_dir() / ".compiled").resolve()
    except (OSError, RuntimeError):  # no home folder, or a loop of links
        return None
    return folder if is_private(_made(folder)) else None


def _made(folder: Path) -> Path:
    """The folder, made private where it can be made; what is wrong with it is `is_private`'s to say."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return folder
    return folder


def _for_this_run() -> Path:
    folder = tempfile.mkdtemp(prefix="questkv-compiled-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
