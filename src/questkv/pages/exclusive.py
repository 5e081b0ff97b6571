"""One thread at a time in what forks share: a pool's counts and segments, and the copies that the device holds."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# One lock for all pools: a batch that is garbage collected gives its pages back in whichever thread that happens, which
# may be inside another pool's method, and of two locks two such threads could wait for each other. It is taken for
# bookkeeping, a few microseconds at a time. And a pool without a lock of its own can be copied and pickled.
LOCK = threading.RLock()


def exclusive(function: Callable[P, R]) -> Callable[P, R]:
    """A function that runs in one thread at a time, and alone among all such functions."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with LOCK:
            return function(*args, **kwargs)

    return run
