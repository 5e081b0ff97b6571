"""Where on this machine models are kept, and who else can write there."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from questkv.errors import ModelError


def model_cache_dir() -> Path:
    """The folder that holds converted models: ``$QUESTKV_CACHE_DIR``, or the user's own place for caches.

    Raises:
        ModelError: The user has no home folder, or the variable names another user's that there isn't.
    """
    try:
        return _cache_dir() / "models"
    except RuntimeError:  # of pathlib
        raise ModelError(
            "there is no home folder to keep converted models in; name a folder with QUESTKV_CACHE_DIR"
        ) from None


def _cache_dir() -> Path:
    chosen = os.environ.get("QUESTKV_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    if xdg:
        return Path(xdg) / "questkv"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "questkv"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home()) / "questkv" / "Cache"
    return Path.home() / ".cache" / "questkv"


def is_private(folder: Path) -> bool:
    """Whether nobody but this user and root can write to a folder or put another in its place.

    A folder that isn't there yet is judged by those above it. Those above may be open to all where the sticky bit
    keeps others from renaming what isn't theirs, as in ``/tmp``, and to the user's own group of one.
    """
    if os.name != "posix":
        return True  # profiles are private there, and permissions have another form
    try:
        absolute = folder.resolve()
        if not all(_guarded(above) for above in absolute.parents if above.exists()):
            return False
        return not os.path.lexists(absolute) or _only_ours(absolute.lstat())
    except (OSError, RuntimeError):  # what can't be looked at can't be vouched for; RuntimeError: a loop of links
        return False


def _only_ours(state: os.stat_result) -> bool:
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o022


def _guarded(folder: Path) -> bool:
    state = folder.stat()
    if state.st_uid not in (0, os.getuid()):
        return False
    if state.st_mode & stat.S_ISVTX:
        return True
    # many systems give each user a group of the same number, and a umask that lets it write
    own_group = state.st_gid == os.getgid() == os.getuid()
    return not state.st_mode & (0o002 if own_group else 0o022)
