"""Memory: how much is left, so that a cache that can't fit is refused in time, and advice to the system on ours."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable
from pathlib import Path

import torch


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on `device`, or None where nobody says."""
    if device.type == "cuda":
        # To the driver, what PyTorch holds in reserve for its next tensors is as used as what they lie in.
        in_reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + in_reserve
    if device.type != "cpu":
        return None
    limits = [limit for limit in (_system(), _control_group()) if limit is not None]
    return min(limits, default=None)


def _system() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def _control_group() -> int | None:
    """What the container's limit leaves (cgroup v2); page cache counts as used, so this errs on the small side."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        used = int((folder / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return max(int(limit) - used + int(stat.get("inactive_file", 0)), 0)


# A page of the KV cache takes a few KiB, so picking pages at random costs an address translation each with the system's
# small pages. Below this size a tensor would hold little but rounding.
_WORTH_HUGE_PAGES = 4 * 2**20
_HUGE_PAGE = 2 * 2**20
_MADV_DONTNEED = 4
_MADV_HUGEPAGE = 14


def prefer_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Ask Linux to back a large CPU tensor with huge pages, which it may; gives the tensor back, untouched."""
    size = tensor.numel() * tensor.element_size()
    advise = _madvise() if tensor.device.type == "cpu" and size >= _WORTH_HUGE_PAGES else None
    if advise is not None:
        start = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
        end = (tensor.data_ptr() + size) // _HUGE_PAGE * _HUGE_PAGE
        # A system without them refuses, and nothing is lost.
        advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_HUGEPAGE)
    return tensor


def give_back(run: torch.Tensor) -> None:
    """Give the memory behind a contiguous CPU tensor to the system until it is written again; its content is lost.

    Memory that lies only partly in the tensor stays, and all of it on a system that isn't Linux.
    """
    advise = _madvise() if run.device.type == "cpu" and run.is_contiguous() else None
    if advise is not None:
        start = -(-run.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (run.data_ptr() + run.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if start < end:
            advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


@functools.cache
def _madvise() -> Callable[..., int] | None:
    return ctypes.CDLL(None).madvise if sys.platform == "linux" else None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch or Python says that memory ran out."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
