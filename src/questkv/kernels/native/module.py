"""Finding the compiled module, and the instruction set that it is to use."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from types import ModuleType

from questkv.errors import ConfigError, MissingPackageError

_NAME = "questkv.kernels.native._native"
_THREADS = ("auto", "libgomp", "own")


def is_built() -> bool:
    """Whether this installation has the compiled module."""
    return importlib.util.find_spec(_NAME) is not None


@cache
def load() -> ModuleType:
    """The compiled module.

    Raises:
        MissingPackageError: It was not built; the message says how.
        ConfigError: ``QUESTKV_ISA`` names an instruction set that this machine can't run, or ``QUESTKV_THREADS``
            something else than ``auto``, ``libgomp`` or ``own``.
    """
    if not is_built():
        raise MissingPackageError(
            "[native] backend: expected the compiled module, got an installation without it; install a C++ compiler "
            "and run: pip install --force-reinstall --no-deps questkv"
        )
    module = importlib.import_module(_NAME)
    _instruction_set_of(module)
    module.use_threads(_threads())
    return module


def instruction_sets() -> tuple[str, ...]:
    """Instruction sets that this machine can run, best first."""
    return _instruction_sets_of(load())


@cache
def _instruction_sets_of(module: ModuleType) -> tuple[str, ...]:
    # Asked for at every call of an operator; the machine's answer never changes.
    return tuple(module.instruction_sets())


def instruction_set() -> str:
    """The one in use: ``QUESTKV_ISA``, else the best.

    Raises:
        ConfigError: ``QUESTKV_ISA`` names one that this machine can't run.
    """
    return _instruction_set_of(load())


def _instruction_set_of(module: ModuleType) -> str:
    names = _instruction_sets_of(module)
    name = os.environ.get("QUESTKV_ISA") or names[0]
    if name not in names:
        raise ConfigError(f"[native] QUESTKV_ISA: expected one of {', '.join(names)}, got {name!r}")
    return name


def _threads() -> str:
    """Whose threads decode steps run on (docs/native.md)."""
    whose = os.environ.get("QUESTKV_THREADS") or _THREADS[0]
    if whose not in _THREADS:
        raise ConfigError(f"[native] QUESTKV_THREADS: expected one of {', '.join(_THREADS)}, got {whose!r}")
    return whose
