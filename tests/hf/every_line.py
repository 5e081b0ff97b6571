"""An exception at the k-th line that Python runs in questkv's files or in transformers' cache."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import cache
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

    def in_frame(blocks: dict[int, range]) -> Any:
        last = 0

        def at_line(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal seen, last
            if event == "line":
                previous, last = last, frame.f_lineno
                if previous in blocks.get(last, ()):
                    return at_line
                seen += 1
                if seen == line:
                    sys.settrace(None)
                    raise Stop
            return at_line

        return at_line

    def at_call(frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        is_ours = seen < line and (name.startswith(_FOLDER) or name == _CACHE)
        return in_frame(_blocks(name)) if is_ours else None

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        run()
    except Stop:
        return True, True
    finally:
        sys.settrace(before)
    return seen >= line, False


@cache
def _blocks(file: str) -> dict[int, range]:
    """Lines of the block of every `with`, by the line of the `with`, which Python calls again when the block ends.

    There, before ``__exit__``, Python lets no signal in; an exception would leave a lock taken for ever.
    """
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    found = (node for node in ast.walk(tree) if isinstance(node, ast.With))
    return {node.lineno: range(node.body[0].lineno, (node.end_lineno or 0) + 1) for node in found}
