"""DecodeStep: what decode gives, layer by layer, and its errors."""

from __future__ import annotations

import pytest
import torch

from kernels.cases import Shape, build_case
from questkv.kernels import DecodeStep, NewTokens, Pages, PageSegment, decode

SHAPE = Shape(kv_heads=2, group=3, head_dim=16, page_size=4)
RULE = {"scale": 0.25, "optimism": 0.5, "group": "mean", "sink_pages": 1, "recent_pages": 1}


def layers(count: int) -> list[Pages]:
    """Pages of one layout with other contents in each."""
    pages = build_case(3, SHAPE, [37, 22], poison=0.0).pages
    return [
        Pages(
            tuple(
                PageSegment(s.keys + i, s.values - i, s.boxes.clone(), None if s.scales is None else s.scales + i)
                for s in pages.segments
            )
        )
        for i in range(count)
    ]


def test_every_layer_gets_what_decode_gives(every_backend):
    case = build_case(3, SHAPE, [37, 22], poison=0.0)
    slots = torch.tensor([case.tables[row][n] * 4 + (case.lengths[row] - 1) % 4 for row, n in enumerate(case.sealed)])
    sealed, few = torch.tensor(case.tables[0][8:9]), torch.tensor([4, 3])
    step = None
    for ours, theirs in zip(layers(3), layers(3), strict=True):
        keys, values, q = torch.randn(2, 2, 16), torch.randn(2, 2, 16), torch.randn(2, 6, 16)
        step = step or DecodeStep(ours, case.page_table, case.lengths, slots, sealed, None)
        read, expected_read = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        got = step.decode(q, ours, few, keys, values, pages_read=read, **RULE)
        new = NewTokens(slots, keys, values, sealed)
        expected = decode(q, theirs, case.page_table, case.lengths, few, pages_read=expected_read, new=new, **RULE)
        assert torch.equal(got, expected)
        assert torch.equal(read, expected_read)
        for one, other in zip(ours.segments, theirs.segments, strict=True):
            assert torch.equal(one.keys, other.keys)
            assert torch.equal(one.boxes, other.boxes)


def test_pages_that_have_grown_since_the_step_was_made_are_taken():
    """A fork in another thread may make the pool grow between two layers."""
    case = build_case(3, SHAPE, [37, 22], poison=0.0)
    slots = torch.tensor([case.tables[row][n] * 4 + (case.lengths[row] - 1) % 4 for row, n in enumerate(case.sealed)])
    first, second = layers(2)
    step = DecodeStep(first, case.page_table, case.lengths, slots, torch.tensor([], dtype=torch.int64), None)
    q, keys, values, few = torch.randn(2, 6, 16), torch.randn(2, 2, 16), torch.randn(2, 2, 16), torch.tensor([4, 3])
    expected = step.decode(q, second, few, keys, values, **RULE)
    grown = Pages((*second.segments, *first.segments))
    assert torch.equal(step.decode(q, grown, few, keys, values, **RULE), expected)
    with pytest.raises(ValueError, match=r"^\[decode\] pages: expected the layout"):
        DecodeStep(grown, case.page_table, case.lengths, slots, slots[:0], None).decode(
            q, second, few, keys, values, **RULE
        )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"pages": build_case(1, SHAPE, [9]).pages}, ValueError, "pages: expected the layout"),
        ({"q": torch.zeros(1, 6, 16)}, ValueError, "q: expected [R=2, Hq, D], got [1, 6, 16]"),
        ({"q": torch.zeros(2, 6, 16).half()}, TypeError, "q: expected torch.float32 like the keys"),
        ({"keys": torch.zeros(1, 2, 16)}, ValueError, "keys: expected [2, 2, 16], got [1, 2, 16]"),
        ({"values": torch.zeros(2, 2, 8)}, ValueError, "values: expected [2, 2, 16], got [2, 2, 8]"),
        ({"num_selected": torch.tensor([4, 1])}, ValueError, "num_selected: expected at least the 2 sink and recent"),
        ({"num_selected": torch.tensor([4])}, ValueError, "num_selected: expected [R=2]"),
        ({"pages_read": torch.zeros(3, dtype=torch.int64)}, ValueError, "pages_read: expected [R=2]"),
        ({"scale": -1.0}, ValueError, "scale: expected a positive finite number"),
        ({"group": "max"}, ValueError, "group: expected one of"),
    ],
)
def test_a_wrong_argument_is_named(change, error, message):
    case = build_case(3, SHAPE, [37, 22], poison=0.0)
    slots, sealed = torch.tensor([0, 4]), torch.empty(0, dtype=torch.int64)
    step = DecodeStep(case.pages, case.page_table, case.lengths, slots, sealed, None)
    arguments = {
        "q": torch.zeros(2, 6, 16),
        "pages": case.pages,
        "num_selected": torch.tensor([4, 3]),
        "keys": torch.zeros(2, 2, 16),
        "values": torch.zeros(2, 2, 16),
    }
    with pytest.raises(error) as raised:
        step.decode(**(arguments | RULE | change))
    assert str(raised.value).startswith(f"[decode] {message}")


def test_wrong_rows_are_named_when_the_step_is_made():
    case = build_case(3, SHAPE, [37, 22], poison=0.0)
    none = torch.empty(0, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"\[decode\] lengths: expected 1 to"):
        DecodeStep(case.pages, case.page_table, case.lengths + 1000, none, none, None)
    with pytest.raises(ValueError, match=r"\[decode\] slots: expected slots 0 to"):
        DecodeStep(case.pages, case.page_table, case.lengths, torch.tensor([10**6]), none, None)
    with pytest.raises(ValueError, match=r"\[decode\] sealed: expected physical pages"):
        DecodeStep(case.pages, case.page_table, case.lengths, none, torch.tensor([10**6]), None)
