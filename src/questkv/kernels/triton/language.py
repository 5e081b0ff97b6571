"""Triton, where it is installed: what the kernels of this backend are written in.

Every module here can be imported without it; only calling a kernel needs it (`questkv.kernels.dispatch` sees to that).
Whether Triton compiles or interprets is decided when it is first imported, by the environment variable
``TRITON_INTERPRET``.
"""

from __future__ import annotations

import importlib
from typing import Any


def _find() -> tuple[Any, Any]:
    """The packages triton and triton.language, or None twice."""
    try:
        return importlib.import_module("triton"), importlib.import_module("triton.language")
    except ImportError:
        return None, None


_triton, tl = _find()


def next_power_of_2(n: int) -> int:
    """The least power of 2 that is at least n."""
    return 1 << (n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """A / b, rounded up."""
    return -(-a // b)


def jit(function: Any = None, **options: Any) -> Any:
    """`triton.jit`; without Triton the function as it is, which nothing calls."""
    if _triton is None:
        return function if function is not None else lambda kernel: kernel
    return _triton.jit(function, **options)


def constant(value: Any) -> Any:
    """A value that kernels may read from their module."""
    return value if tl is None else tl.constexpr(value)


def _interpreted() -> bool:
    """Whether kernels are interpreted that are made now, and Triton's own functions, made when it was imported."""
    return _triton is not None and not any(
        isinstance(function, _triton.runtime.JITFunction) for function in (tl.sum, jit(cdiv))
    )


interpreted = _interpreted()
# The same, for kernels: the interpreter computes with bfloat16's bits as if they were integers.
INTERPRETED = constant(interpreted)
