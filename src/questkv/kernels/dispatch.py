"""Which backend serves a call: one rule, written here and nowhere else."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch

from questkv import config
from questkv.kernels import native

BACKENDS = config.BACKENDS[1:]


def available_backends() -> tuple[str, ...]:
    """Names that `backend=` takes here, best first; `auto` is not among them."""
    return BACKENDS if native.is_built() else BACKENDS[1:]


def resolve(backend: str, device: torch.device) -> Any:
    """The backend's module, which has one function an operator.

    `auto` is the compiled backend on the CPU where it is built, else the reference. A backend asked for by name never
    falls back.

    Raises:
        ValueError: No backend of that name, or it doesn't work on the tensors' device.
        MissingPackageError: The compiled backend was asked for by name and isn't built.
    """
    if backend == "auto":
        backend = available_backends()[0] if device.type == "cpu" else "reference"
    if backend not in BACKENDS:
        raise ValueError(f"[kernels] backend: expected 'auto' or one of {list(BACKENDS)}, got {backend!r}")
    if backend == "native":
        if device.type != "cpu":
            raise ValueError(f"[kernels] backend: expected tensors on the CPU for 'native', got {device}")
        native.load()
    return _module(backend)


@cache
def _module(backend: str) -> Any:
    return importlib.import_module(f"questkv.kernels.{backend}")
