"""What a result depends on besides the code: versions, the processor, the backend in use."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_CPUINFO = Path("/proc/cpuinfo")


def environment(backend: str, device: torch.device | None = None) -> dict[str, Any]:
    """Versions and machine, for saving beside a result.

    Args:
        backend: The one that was asked for.
        device: Where the model was, which says what ``auto`` is; None for the CPU.
    """
    import torch
    import transformers

    from questkv import __version__
    from questkv.kernels import native
    from questkv.kernels.dispatch import automatic

    used = automatic(device or torch.device("cpu")) if backend == "auto" else backend
    return {
        "questkv": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "backend": used,
        "instruction_set": native.instruction_set() if used == "native" else None,
    }


def cpu_name() -> str:
    """The processor's own name, where the system tells it."""
    return _cpu_fields().get("model name") or platform.processor() or platform.machine()


def cpu_flags() -> set[str]:
    """The instruction sets that Linux lists (``avx2``, ``asimd``, ...); empty elsewhere."""
    fields = _cpu_fields()
    return set((fields.get("flags") or fields.get("Features") or "").split())


def usable_cores() -> int | None:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _cpu_fields() -> dict[str, str]:
    """The first core's entry in Linux's list; empty elsewhere."""
    fields: dict[str, str] = {}
    try:
        for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    return fields
