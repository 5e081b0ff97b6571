"""Which backend serves a call: one rule, written here and nowhere else."""

from __future__ import annotations

import importlib
from typing import Any

BACKENDS = ("reference",)


def available_backends() -> tuple[str, ...]:
    """Names that `backend=` takes here, best first; `auto` is not among them."""
    return BACKENDS


def resolve(backend: str) -> Any:
    """The backend's module, which has one function an operator.

    `auto` takes the first of `available_backends()`. A backend asked for by name never falls back.

    Raises:
        ValueError: No backend of that name.
    """
    name = BACKENDS[0] if backend == "auto" else backend
    if name not in BACKENDS:
        raise ValueError(f"[kernels] backend: expected 'auto' or one of {list(BACKENDS)}, got {backend!r}")
    return importlib.import_module(f"questkv.kernels.{name}")
