"""What the operators read: the pages of one layer. Every shape is defined in docs/layout.md."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True, eq=False)
class PageSegment:
    """N physical pages of one layer with one storage, all plain (in the model's type) or all coded (in eight bits).

    Attributes:
        keys: [Hkv, N, S, D] float32, bfloat16 or float16, contiguous; keys as attention sees them (after rotary). In a
            coded segment uint8: a key's place in its page's box (docs/method.md).
        values: [Hkv, N, S, Dv] the keys' dtype, contiguous; in a coded segment uint8 steps above the token's offset.
        boxes: [Hkv, N + M, 2, D] int8 or the keys' dtype, contiguous; index 0 the lowest, 1 the highest value of every
            key channel. The first N are the pages', defined for sealed ones only. M is 0, or N / C for spans of C
            pages: then box N + i is around the span whose last page is C i + C - 1 of the segment, defined once
            `seal_spans` wrote it. Always int8 in a coded segment.
        scales: [Hkv, N + M] float32 for int8 boxes (bound = code * scale; +inf marks a page that holds a NaN or
            infinite key, and a span with such a page), None for boxes in the keys' dtype.
        value_scales: [Hkv, N, S, 2] float32 in a coded segment, None in a plain one: index 0 the step, 1 the offset of
            a token's value; both NaN where it holds a NaN or infinite value.
        host: Whether keys, values and value_scales lie in host memory (pinned, where boxes and scales lie on a GPU).
            Such pages are scored and transferred; attention reads those that were transferred to the device.

    Slots that no token was written to may hold anything, NaN included.
    """

    keys: torch.Tensor
    values: torch.Tensor
    boxes: torch.Tensor
    scales: torch.Tensor | None
    value_scales: torch.Tensor | None = None
    host: bool = False

    @property
    def coded(self) -> bool:
        """Whether its pages hold eight bits a channel instead of the model's type."""
        return self.keys.dtype == torch.uint8

    @property
    def span_pages(self) -> int:
        """C, pages a span; 0 where spans have no boxes."""
        pages = self.keys.shape[1]
        spans = self.boxes.shape[1] - pages
        return pages // spans if spans else 0


@dataclass(frozen=True, eq=False)
class Pages:
    """All pages of one layer: physical page ids number the segments' pages one after another.

    The first segment is plain; the others may be plain or coded. A page is written in a plain page, and `seal` may code
    it into another.

    Raises:
        ValueError: The segments' tensors don't fit each other.
        TypeError: A dtype that the operators don't take.
    """

    segments: tuple[PageSegment, ...]

    def __post_init__(self) -> None:
        if not self.segments:
            raise ValueError("[Pages] segments: expected at least one segment, got none")
        if self.segments[0].coded:
            raise TypeError("[Pages] keys: expected a plain first segment (float32, bfloat16 or float16), got uint8")
        if self.segments[0].host:
            raise ValueError("[Pages] host: expected a first segment on the layer's device, got one in host memory")
        for segment in self.segments:
            _check_segment(segment, self.segments[0])
            if segment.boxes.dtype != self.segments[0].boxes.dtype:
                raise TypeError(
                    f"[Pages] boxes: expected the same dtype for all segments, {self.segments[0].boxes.dtype}, "
                    f"got {segment.boxes.dtype}"
                )
            if segment.span_pages != self.span_pages:
                raise ValueError(
                    f"[Pages] boxes: expected spans of {self.span_pages} pages in all segments, got "
                    f"{segment.span_pages}"
                )

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First physical page of every segment, and the end of the last: one more entry than segments."""
        starts = [0]
        for segment in self.segments:
            starts.append(starts[-1] + segment.keys.shape[1])
        return tuple(starts)

    @cached_property
    def layout(self) -> tuple[object, ...]:
        """What layers of one pool have in common: pages and kind of segments, Hkv, S, D, Dv, dtype, device, boxes."""
        first = self.segments[0]
        kinds = tuple((segment.keys.shape[1], segment.coded, segment.host) for segment in self.segments)
        return (
            *(kinds, self.num_kv_heads, self.page_size, self.head_dim, self.value_dim, self.dtype, self.device),
            *(first.boxes.dtype, self.span_pages),
        )

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
    def span_pages(self) -> int:
        """C, pages a span; 0 where spans have no boxes."""
        return self.segments[0].span_pages

    @property
    def head_dim(self) -> int:
        """D, channels of a key and of a query."""
        return self.segments[0].keys.shape[3]

    @property
    def value_dim(self) -> int:
        """Dv, channels of a value and of an output."""
        return self.segments[0].values.shape[3]

    @cached_property
    def coded(self) -> torch.Tensor | None:
        """[num_pages] bool on the CPU, True for pages in eight bits; None if none is."""
        if not any(segment.coded for segment in self.segments):
            return None
        return torch.cat([torch.full((segment.keys.shape[1],), segment.coded) for segment in self.segments])

    @cached_property
    def host(self) -> bool:
        """Whether any segment lies in host memory."""
        return any(segment.host for segment in self.segments)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of keys and values in plain pages."""
        return self.segments[0].keys.dtype

    @property
    def device(self) -> torch.device:
        """Device of every tensor but those in host memory."""
        return self.segments[0].keys.device


def _check_segment(segment: PageSegment, first_segment: PageSegment) -> None:
    keys, first = segment.keys, first_segment.keys
    if keys.ndim != 4 or keys.shape[0] != first.shape[0] or keys.shape[2:] != first.shape[2:] or 0 in keys.shape:
        raise ValueError(f"[Pages] keys: expected [Hkv, N, S, D], the same Hkv, S, D for all, got {list(keys.shape)}")
    if not segment.coded:
        if keys.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(f"[Pages] keys: expected float32, bfloat16 or float16, got {keys.dtype}")
        if keys.dtype != first.dtype:
            raise TypeError(f"[Pages] keys: expected {first.dtype} like the first segment's, got {keys.dtype}")
    _check_values(segment, first_segment.values)
    _check_boxes(segment)
    for name in ("keys", "values", "boxes", "scales", "value_scales"):
        tensor = getattr(segment, name)
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"[Pages] {name}: expected a contiguous tensor, got strides {tensor.stride()}")
        device = torch.device("cpu") if segment.host and name not in ("boxes", "scales") else first.device
        if tensor is not None and tensor.device != device:
            raise ValueError(f"[Pages] {name}: expected device {device}, got {tensor.device}")


def _check_values(segment: PageSegment, first: torch.Tensor) -> None:
    keys, values, scales = segment.keys, segment.values, segment.value_scales
    if values.dtype != keys.dtype:
        raise TypeError(f"[Pages] values: expected {keys.dtype} like the keys, got {values.dtype}")
    if values.ndim != 4 or values.shape[:3] != keys.shape[:3] or 0 in values.shape:
        expected = ", ".join(map(str, keys.shape[:3]))
        raise ValueError(f"[Pages] values: expected [{expected}, Dv] beside the keys, got {list(values.shape)}")
    if values.shape[3] != first.shape[3]:
        raise ValueError(f"[Pages] values: expected Dv={first.shape[3]} in all segments, got {values.shape[3]}")
    if not segment.coded:
        if scales is not None:
            raise ValueError(f"[Pages] value_scales: expected None in a plain segment, got {list(scales.shape)}")
        return
    scaled = [*keys.shape[:3], 2]
    if scales is None or list(scales.shape) != scaled or scales.dtype != torch.float32:
        got = "None" if scales is None else f"{scales.dtype} {list(scales.shape)}"
        raise ValueError(f"[Pages] value_scales: expected float32 {scaled} in a coded segment, got {got}")


def _check_boxes(segment: PageSegment) -> None:
    keys, boxes, scales = segment.keys, segment.boxes, segment.scales
    expected = [keys.shape[0], keys.shape[1], 2, keys.shape[3]]
    spans = boxes.shape[1] - keys.shape[1] if boxes.ndim == 4 else 0
    if spans > 0 and keys.shape[1] % spans == 0 and keys.shape[1] > spans:
        expected[1] += spans
    if list(boxes.shape) != expected:
        raise ValueError(f"[Pages] boxes: expected {expected}, got {list(boxes.shape)}")
    box_dtype = torch.int8 if scales is not None or segment.coded else keys.dtype
    if boxes.dtype != box_dtype:
        raise TypeError(f"[Pages] boxes: expected {box_dtype}, got {boxes.dtype}")
    if scales is None and segment.coded:
        raise ValueError(f"[Pages] scales: expected float32 {expected[:2]} in a coded segment, got None")
    if scales is not None and (list(scales.shape) != expected[:2] or scales.dtype != torch.float32):
        raise ValueError(f"[Pages] scales: expected float32 {expected[:2]}, got {scales.dtype} {list(scales.shape)}")
