"""What the operators read: the pages of one layer. Every shape is defined in docs/layout.md."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from questkv.errors import UnsupportedError


@dataclass(frozen=True, eq=False)
class PageSegment:
    """N physical pages of one layer with one storage.

    Attributes:
        keys: [Hkv, N, S, D] float32, bfloat16 or float16, contiguous; keys as attention sees them (after rotary).
        values: Like `keys`.
        boxes: [Hkv, N, 2, D] int8 or the keys' dtype, contiguous; index 0 the lowest, 1 the highest value of every
            key channel. Defined for sealed pages only.
        scales: [Hkv, N] float32 for int8 boxes (bound = code * scale; +inf marks a page that holds a NaN or infinite
            key), None for boxes in the keys' dtype.

    Slots that no token was written to may hold anything, NaN included.
    """

    keys: torch.Tensor
    values: torch.Tensor
    boxes: torch.Tensor
    scales: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class Pages:
    """All pages of one layer: physical page ids number the segments' pages one after another.

    Raises:
        ValueError: The segments' tensors don't fit each other.
        TypeError: A dtype that the operators don't take.
    """

    segments: tuple[PageSegment, ...]

    def __post_init__(self) -> None:
        if not self.segments:
            raise ValueError("[Pages] segments: expected at least one segment, got none")
        first = self.segments[0].keys
        for segment in self.segments:
            _check_segment(segment, first)
            if segment.boxes.dtype != self.segments[0].boxes.dtype:
                raise TypeError(
                    f"[Pages] boxes: expected the same dtype for all segments, {self.segments[0].boxes.dtype}, "
                    f"got {segment.boxes.dtype}"
                )

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First physical page of every segment, and the end of the last: one more entry than segments."""
        starts = [0]
        for segment in self.segments:
            starts.append(starts[-1] + segment.keys.shape[1])
        return tuple(starts)

    @property
    def num_pages(self) -> int:
        """Physical pages of all segments."""
        return self.starts[-1]

    @property
    def num_kv_heads(self) -> int:
        """Hkv."""
        return self.segments[0].keys.shape[0]

    @property
    def page_size(self) -> int:
        """S, tokens a page."""
        return self.segments[0].keys.shape[2]

    @property
    def head_dim(self) -> int:
        """D."""
        return self.segments[0].keys.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of keys and values."""
        return self.segments[0].keys.dtype

    @property
    def device(self) -> torch.device:
        """Device of every tensor."""
        return self.segments[0].keys.device


@dataclass(frozen=True, eq=False)
class NewTokens:
    """Tokens that `decode` writes before it reads: what `append` takes, and the pages that they seal.

    Attributes:
        slots: [n] int64, ``physical page * S + slot`` of every token, all different.
        keys: [n, Hkv, D] the pages' dtype and device.
        values: Like `keys`.
        sealed: [m] int64 physical pages that are full and have a token behind them now.
    """

    slots: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    sealed: torch.Tensor


def _check_segment(segment: PageSegment, first: torch.Tensor) -> None:
    keys = segment.keys
    if keys.ndim != 4 or keys.shape[0] != first.shape[0] or keys.shape[2:] != first.shape[2:] or 0 in keys.shape:
        raise ValueError(f"[Pages] keys: expected [Hkv, N, S, D], the same Hkv, S, D for all, got {list(keys.shape)}")
    if keys.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"[Pages] keys: expected float32, bfloat16 or float16, got {keys.dtype}")
    if keys.dtype != first.dtype:
        raise TypeError(f"[Pages] keys: expected {first.dtype} like the first segment's, got {keys.dtype}")
    if segment.values.dtype != keys.dtype:
        raise TypeError(f"[Pages] values: expected {keys.dtype} like the keys, got {segment.values.dtype}")
    if segment.values.shape != keys.shape:
        if segment.values.shape[:3] == keys.shape[:3]:
            raise UnsupportedError(
                f"[Pages] values: expected the keys' head dim {keys.shape[3]}, got {segment.values.shape[3]}; "
                "keys and values of different widths are not supported"
            )
        raise ValueError(f"[Pages] values: expected {list(keys.shape)} like keys, got {list(segment.values.shape)}")
    expected = [keys.shape[0], keys.shape[1], 2, keys.shape[3]]
    if list(segment.boxes.shape) != expected:
        raise ValueError(f"[Pages] boxes: expected {expected}, got {list(segment.boxes.shape)}")
    box_dtype = torch.int8 if segment.scales is not None else keys.dtype
    if segment.boxes.dtype != box_dtype:
        raise TypeError(f"[Pages] boxes: expected {box_dtype}, got {segment.boxes.dtype}")
    if segment.scales is not None and (segment.scales.shape != keys.shape[:2] or segment.scales.dtype != torch.float32):
        raise ValueError(
            f"[Pages] scales: expected float32 {list(keys.shape[:2])}, got {segment.scales.dtype} "
            f"{list(segment.scales.shape)}"
        )
    for name in ("keys", "values", "boxes", "scales"):
        tensor = getattr(segment, name)
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"[Pages] {name}: expected a contiguous tensor, got strides {tensor.stride()}")
        if tensor is not None and tensor.device != first.device:
            raise ValueError(f"[Pages] {name}: expected device {first.device}, got {tensor.device}")
