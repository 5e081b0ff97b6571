"""Pages refuses segments that don't fit each other."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from questkv.kernels import Pages, PageSegment


def _segment(pages: int = 4, dtype: torch.dtype = torch.float32, box: str = "int8", **changes: Any) -> PageSegment:
    tokens, bounds = (2, pages, 3, 8), (2, pages, 2, 8)
    tensors = {
        "keys": torch.zeros(tokens, dtype=dtype),
        "values": torch.zeros(tokens, dtype=dtype),
        "boxes": torch.zeros(bounds, dtype=torch.int8 if box == "int8" else dtype),
        "scales": torch.zeros(2, pages) if box == "int8" else None,
    }
    return PageSegment(**{**tensors, **changes})


def test_pages_number_the_segments_pages_one_after_another():
    pages = Pages((_segment(4), _segment(1), _segment(7)))
    assert pages.starts == (0, 4, 5, 12)
    assert (pages.num_pages, pages.num_kv_heads, pages.page_size, pages.head_dim) == (12, 2, 3, 8)
    assert pages.dtype == torch.float32
    assert pages.device == torch.device("cpu")


def test_values_have_a_width_of_their_own_the_same_in_all_segments():
    narrow, wide = (_segment(values=torch.zeros(2, 4, 3, width)) for width in (5, 9))
    assert [(pages.head_dim, pages.value_dim) for pages in map(Pages, [(narrow, narrow), (wide,)])] == [(8, 5), (8, 9)]
    assert Pages((narrow,)).layout != Pages((wide,)).layout
    with pytest.raises(ValueError, match=r"^\[Pages\] values: expected Dv=5 in all segments, got 9"):
        Pages((narrow, wide))


_WRONG = [
    ("keys", "3 dimensions", {"keys": torch.zeros(2, 4, 24)}, ValueError),
    ("keys", "no pages", {"keys": torch.zeros(2, 0, 3, 8)}, ValueError),
    ("keys", "float64", {"keys": torch.zeros(2, 4, 3, 8).double()}, TypeError),
    ("keys", "not contiguous", {"keys": torch.zeros(4, 2, 3, 8).transpose(0, 1)}, ValueError),
    ("values", "bfloat16", {"values": torch.zeros(2, 4, 3, 8).bfloat16()}, TypeError),
    ("values", "other pages", {"values": torch.zeros(2, 5, 3, 8)}, ValueError),
    ("values", "no channels", {"values": torch.zeros(2, 4, 3, 0)}, ValueError),
    ("values", "3 dimensions", {"values": torch.zeros(2, 4, 24)}, ValueError),
    ("values", "not contiguous", {"values": torch.zeros(4, 2, 3, 8).transpose(0, 1)}, ValueError),
    ("values", "another device", {"values": torch.zeros(2, 4, 3, 8, device="meta")}, ValueError),
    ("boxes", "one bound", {"boxes": torch.zeros(2, 4, 1, 8, dtype=torch.int8)}, ValueError),
    ("boxes", "float with scales", {"boxes": torch.zeros(2, 4, 2, 8)}, TypeError),
    ("boxes", "int8 without scales", {"scales": None}, TypeError),
    ("boxes", "another device", {"boxes": torch.zeros(2, 4, 2, 8, dtype=torch.int8, device="meta")}, ValueError),
    ("scales", "another shape", {"scales": torch.zeros(4, 2)}, ValueError),
    ("scales", "float64", {"scales": torch.zeros(2, 4).double()}, ValueError),
    ("scales", "another device", {"scales": torch.zeros(2, 4, device="meta")}, ValueError),
]


@pytest.mark.parametrize(
    ("name", "changes", "error"), [pytest.param(n, c, e, id=f"{n}-{what}") for n, what, c, e in _WRONG]
)
def test_a_tensor_that_does_not_fit_is_named(name, changes, error):
    with pytest.raises(error, match=re.escape(f"[Pages] {name}: expected ")):
        Pages((_segment(**changes),))
    with pytest.raises(error, match=re.escape(f"[Pages] {name}: expected ")):
        Pages((_segment(), _segment(**changes)))


def test_no_segments_are_refused():
    with pytest.raises(ValueError, match=r"^\[Pages\] segments: expected at least one segment"):
        Pages(())


@pytest.mark.parametrize("first", ["int8", "model"])
def test_segments_with_different_kinds_of_boxes_are_refused(first):
    second = "model" if first == "int8" else "int8"
    with pytest.raises(TypeError, match=r"^\[Pages\] boxes: expected the same dtype for all"):
        Pages((_segment(box=first), _segment(box=second)))


def test_segments_of_different_dtypes_are_refused_by_the_keys_dtype():
    with pytest.raises(TypeError, match=r"^\[Pages\] keys: expected torch.float32 like the first.*got torch.bfloat16"):
        Pages((_segment(), _segment(dtype=torch.bfloat16)))


def test_segments_of_different_geometry_are_refused():
    other = PageSegment(torch.zeros(2, 4, 5, 8), torch.zeros(2, 4, 5, 8), torch.zeros(2, 4, 2, 8), None)
    with pytest.raises(ValueError, match=r"^\[Pages\] keys: expected "):
        Pages((_segment(box="model"), other))


def _coded(**changes: torch.Tensor | None) -> PageSegment:
    tensors = {
        "keys": torch.zeros(2, 3, 3, 8, dtype=torch.uint8),
        "values": torch.zeros(2, 3, 3, 8, dtype=torch.uint8),
        "boxes": torch.zeros(2, 3, 2, 8, dtype=torch.int8),
        "scales": torch.zeros(2, 3),
        "value_scales": torch.zeros(2, 3, 3, 2),
    }
    return PageSegment(**{**tensors, **changes})


def test_coded_pages_lie_behind_plain_ones():
    pages = Pages((_segment(), _coded()))
    assert pages.dtype == torch.float32
    assert pages.coded.tolist() == [False] * 4 + [True] * 3
    assert Pages((_segment(),)).coded is None
    with pytest.raises(TypeError, match=r"^\[Pages\] keys: expected a plain first segment"):
        Pages((_coded(), _segment()))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("values", torch.zeros(2, 3, 3, 8)),
        ("scales", None),
        ("value_scales", None),
        ("value_scales", torch.zeros(2, 3, 3)),
        ("value_scales", torch.zeros(2, 3, 3, 2).double()),
        ("value_scales", torch.zeros(2, 3, 2, 3).transpose(2, 3)),
        ("value_scales", torch.zeros(2, 3, 3, 2, device="meta")),
    ],
)
def test_a_tensor_that_does_not_fit_a_coded_segment_is_named(name, value):
    with pytest.raises((ValueError, TypeError), match=rf"^\[Pages\] {name}: expected "):
        Pages((_segment(), _coded(**{name: value})))


def test_a_plain_segment_has_no_value_scales():
    with pytest.raises(ValueError, match=r"^\[Pages\] value_scales: expected None in a plain segment"):
        Pages((_segment(value_scales=torch.zeros(2, 4, 3, 2)),))
