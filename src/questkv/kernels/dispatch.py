"""Which backend serves a call: one rule, written here and nowhere else."""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import cache
from typing import Any

import torch

from questkv import config
from questkv.errors import MissingPackageError
from questkv.kernels import native

BACKENDS = config.BACKENDS[1:]
_TRUE = ("1", "true", "on", "yes", "y")  # as Triton reads its environment variables


def available_backends() -> tuple[str, ...]:
    """Names that `backend=` takes here, best first; `auto` is not among them."""
    usable = {"native": native.is_built(), "triton": _has_triton() and _runs_triton(), "reference": True}
    return tuple(name for name in BACKENDS if usable[name])


def automatic(device: torch.device) -> str:
    """The backend that `auto` stands for with tensors on a device.

    On the CPU the compiled one where it is built, else the reference; on a GPU `triton`, and never the reference in its
    place, which is slow there; on any other device the reference.

    Raises:
        MissingPackageError: The tensors are on a GPU, and Triton isn't installed.
    """
    if device.type == "cpu":
        return "native" if native.is_built() else "reference"
    if device.type != "cuda":
        return "reference"
    if not _has_triton():
        raise MissingPackageError(
            f"[kernels] backend: expected the package triton for tensors on {device}, got none; install it with: "
            "pip install 'questkv[triton]' (or ask for backend='reference', which is slow on a GPU)"
        )
    return "triton"


def resolve(backend: str, device: torch.device) -> Any:
    """The backend's module, which has one function an operator.

    `auto` is what `automatic` says. A backend asked for by name never falls back.

    Raises:
        ValueError: No backend of that name, or it doesn't work on the tensors' device.
        MissingPackageError: The compiled backend was asked for by name and isn't built, or Triton isn't installed.
        UnsupportedError: The GPU is too old for the Triton backend.
    """
    if backend == "auto":
        backend = automatic(device)
    if backend not in BACKENDS:
        raise ValueError(f"[kernels] backend: expected 'auto' or one of {list(BACKENDS)}, got {backend!r}")
    if backend == "triton" and not _has_triton():
        raise MissingPackageError(
            "[kernels] backend: expected the package triton for 'triton', got none; install it with: "
            "pip install 'questkv[triton]'"
        )
    module = _module(backend)
    if backend == "native":
        if device.type != "cpu":
            raise ValueError(f"[kernels] backend: expected tensors on the CPU for 'native', got {device}")
        module.load()
    if backend == "triton":
        module.check_device(device)
    return module


@cache
def _module(backend: str) -> Any:
    return importlib.import_module(f"questkv.kernels.{backend}")


def _has_triton() -> bool:
    """Whether the package triton is installed; importing it takes a second, so this only looks."""
    return importlib.util.find_spec("triton") is not None


def _runs_triton() -> bool:
    """Whether there is something that Triton's kernels run on: a GPU, or the interpreter."""
    return torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET", "0").lower() in _TRUE
