"""Where kernels run: the device of the tensors, and what it is."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

from questkv.errors import UnsupportedError
from questkv.kernels.triton.language import interpreted
from questkv.kernels.types import Pages

# Without a GPU: what the tests interpret is what the older of the two architectures would run.
_WITHOUT_GPU = 80
_OLDEST = 80
_MOST_CHANNELS = 256
# Kernels number a row's tokens and pages, and the numbers of a page of one head, in int32, and up to a tile behind the
# last: a tile, and the tokens of as many parts as a row may have, are far below 2^20.
_MOST_NUMBERED = 2**31 - 2**20


def on(device: torch.device) -> AbstractContextManager[object]:
    """Launch on this device: Triton takes the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def architecture(device: torch.device) -> int:
    """10 times the compute capability: 80 for an A100, 90 for an H100."""
    if device.type != "cuda":
        return _WITHOUT_GPU
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def check_device(device: torch.device) -> None:
    """Raise where the kernels can't run.

    Raises:
        ValueError: The tensors aren't on a GPU, and Triton doesn't interpret.
        UnsupportedError: The GPU is older than the kernels.
    """
    if device.type == "cpu" and interpreted:
        return
    if device.type != "cuda":
        raise ValueError(
            "[kernels] backend: expected tensors on a GPU for 'triton' (or on the CPU with the environment variable "
            f"TRITON_INTERPRET=1 set from the start, which is slow and for debugging), got {device}"
        )
    if interpreted:
        raise ValueError(
            f"[kernels] backend: expected TRITON_INTERPRET unset for 'triton' on a GPU, got it set and {device}"
        )
    if torch.version.cuda is not None and architecture(device) < _OLDEST:
        major, minor = divmod(architecture(device), 10)
        raise UnsupportedError(
            f"[kernels] backend: expected a GPU of compute capability 8.0 or newer for 'triton', got {major}.{minor}"
        )


def check_head_dim(op: str, pages: Pages) -> None:
    """Raise UnsupportedError where a row of keys doesn't fit the registers."""
    if pages.head_dim > _MOST_CHANNELS:
        raise UnsupportedError(
            f"[{op}] head dim: expected at most {_MOST_CHANNELS} with backend 'triton', got {pages.head_dim}"
        )


def check_row(op: str, pages: int, page_size: int) -> None:
    """Raise UnsupportedError where a row has tokens without a number; `pages` is the width of the page table."""
    if pages * page_size > _MOST_NUMBERED:
        raise UnsupportedError(
            f"[{op}] page_table: expected pages for at most {_MOST_NUMBERED} tokens with backend 'triton', got "
            f"{pages * page_size}"
        )


def check_page(page_size: int, head_dim: int) -> None:
    """Raise UnsupportedError where a page has keys without a number."""
    if page_size * head_dim > _MOST_NUMBERED:
        raise UnsupportedError(
            f"[triton] page: expected at most {_MOST_NUMBERED} numbers, S * D, with backend 'triton', got "
            f"{page_size * head_dim}"
        )
