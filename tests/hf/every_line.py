"""An exception at the k-th line that Python runs in questkv's files or in transformers' cache."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import transformers.cache_utils

import questkv

_FOLDER = str(Path(questkv.__file__).parent)
_CACHE = transformers.cache_utils.__file__


class Stop(KeyboardInterrupt):
    """What is raised."""


def stopped_at(line: int, run: Callable[[], Any]) -> tuple[bool, bool]:
    """Run with an exception at the `line`-th line, from 1.

    Returns:
        Whether so many lines were run, and whether the exception came out.
    """
    seen = 0

    def at_line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if event == "line":
            seen += 1
            if seen == line:
                sys.settrace(None)
                raise Stop
        return at_line

    def at_call(frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        return at_line if seen < line and (name.startswith(_FOLDER) or name == _CACHE) else None

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        run()
    except Stop:
        return True, True
    finally:
        sys.settrace(before)
    return seen >= line, False
