"""What the layers of a step share, `Rows` and `Places`: checked once, and again when it has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.cases import Case, Shape, build_case
from questkv.config import QuestConfig
from questkv.kernels import Pages, PageSegment, Places, Rows, Scoring, Softmax, Writes, checks, decode

SHAPE = Shape(kv_heads=2, group=3, head_dim=16, page_size=4)
SOFTMAX, SCORING = Softmax(0.25), Scoring(sink_pages=1, recent_pages=1)
FEW = torch.tensor([4, 3])


def make_case() -> Case:
    return build_case(3, SHAPE, [37, 22], poison=0.0)


def layers(count: int) -> list[Pages]:
    """Pages of one layout with other contents in each."""
    pages = make_case().pages
    return [
        Pages(
            tuple(
                PageSegment(s.keys + i, s.values - i, s.boxes.clone(), None if s.scales is None else s.scales + i)
                for s in pages.segments
            )
        )
        for i in range(count)
    ]


def rows_of(case: Case) -> Rows:
    return Rows(case.page_table.clone(), case.lengths.clone(), FEW.clone())


def places_of(case: Case) -> Places:
    """The rows' last tokens, the first of which seals a page."""
    last = [case.tables[row][n] * 4 + int(case.lengths[row] - 1) % 4 for row, n in enumerate(case.sealed)]
    return Places(torch.tensor(last), torch.tensor(case.tables[0][8:9]))


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def test_every_layer_gets_what_it_gets_with_rows_and_places_of_its_own(every_backend):
    case = make_case()
    rows, places = rows_of(case), places_of(case)
    for ours, theirs in zip(layers(3), layers(3), strict=True):
        keys, values, q = torch.randn(2, 2, 16), torch.randn(2, 2, 16), torch.randn(2, 6, 16)
        read, expected_read = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        shared = {"writes": Writes(keys, values, places), "pages_read": read}
        got = decode(q, ours, rows, SOFTMAX, SCORING, **shared)
        own = {"writes": Writes(keys, values, places_of(case)), "pages_read": expected_read}
        expected = decode(q, theirs, rows_of(case), SOFTMAX, SCORING, **own)
        assert torch.equal(got, expected)
        assert torch.equal(read, expected_read)
        for one, other in zip(ours.segments, theirs.segments, strict=True):
            assert torch.equal(one.keys, other.keys)
            assert torch.equal(one.boxes, other.boxes)


def test_values_are_checked_with_the_first_layer_only(monkeypatch):
    looked_at: list[str] = []

    def counted(name: str) -> Any:
        check = getattr(checks, name)

        def call(*args: Any) -> None:
            looked_at.append(name)
            check(*args)

        return call

    for name in ("check_lengths", "check_slots", "check_sealed"):
        monkeypatch.setattr(checks, name, counted(name))
    case = make_case()
    rows, places = rows_of(case), places_of(case)
    q, keys, values = tensors((2, 6, 16), (2, 2, 16), (2, 2, 16))
    for pages in layers(3):
        decode(q, pages, rows, SOFTMAX, SCORING, writes=Writes(keys, values, places))
    decode(q, pages, rows.selecting(FEW + 1), SOFTMAX, SCORING)
    assert sorted(looked_at) == ["check_lengths", "check_sealed", "check_slots"]


def test_pages_that_have_grown_are_taken_and_fewer_are_checked_again():
    """A fork in another thread may make the pool grow between two layers."""
    case = make_case()
    first, second = layers(2)
    rows = rows_of(case)
    (q,) = tensors((2, 6, 16))
    expected = decode(q, second, rows, SOFTMAX, SCORING)
    grown = Pages((*second.segments, *first.segments))
    assert torch.equal(decode(q, grown, rows, SOFTMAX, SCORING), expected)
    fewer = Pages(second.segments[:1])
    with pytest.raises(ValueError, match=r"^\[decode\] page_table: expected physical pages 0 to"):
        decode(q, fewer, rows, SOFTMAX, SCORING)
    with pytest.raises(ValueError, match=r"^\[decode\] page_table: expected physical pages 0 to"):
        decode(q, fewer, rows.selecting(FEW), SOFTMAX, SCORING)


def test_rows_that_change_in_place_are_seen(every_fast_backend):
    case = make_case()
    rows = rows_of(case)
    (q,) = tensors((2, 6, 16))
    decode(q, case.pages, rows, SOFTMAX, SCORING)
    rows.lengths.sub_(5)
    rows.num_selected.sub_(1)
    other = Rows(case.page_table, case.lengths - 5, FEW - 1)
    expected = decode(q, case.pages, other, SOFTMAX, SCORING)
    assert torch.equal(decode(q, case.pages, rows, SOFTMAX, SCORING), expected)
    for wrong, name in (
        (rows.num_selected, "num_selected"),
        (rows.lengths, "lengths"),
        (rows.page_table, "page_table"),
    ):
        before = wrong.clone()
        wrong.fill_(-7)
        with pytest.raises(ValueError, match=rf"^\[decode\] {name}: expected"):
            decode(q, case.pages, rows, SOFTMAX, SCORING)
        wrong.copy_(before)
    assert torch.equal(decode(q, case.pages, rows, SOFTMAX, SCORING), expected)


def test_strided_rows_that_change_in_place_are_seen(every_fast_backend):
    case = make_case()
    lengths = case.lengths.repeat_interleave(2)[::2]
    rows = Rows(case.page_table, lengths, FEW)
    (q,) = tensors((2, 6, 16))
    decode(q, case.pages, rows, SOFTMAX, SCORING)
    lengths.sub_(5)
    expected = decode(q, case.pages, Rows(case.page_table, case.lengths - 5, FEW), SOFTMAX, SCORING)
    assert torch.equal(decode(q, case.pages, rows, SOFTMAX, SCORING), expected)


def test_places_that_change_in_place_are_seen():
    case = make_case()
    rows, places = rows_of(case), places_of(case)
    q, keys, values = tensors((2, 6, 16), (2, 2, 16), (2, 2, 16))
    decode(q, case.pages, rows, SOFTMAX, SCORING, writes=Writes(keys, values, places))
    for name in ("slots", "sealed"):
        tensor = getattr(places, name)
        before = tensor.clone()
        tensor.fill_(10**6)
        with pytest.raises(ValueError, match=rf"^\[decode\] {name}: expected"):
            decode(q, case.pages, rows, SOFTMAX, SCORING, writes=Writes(keys, values, places))
        tensor.copy_(before)


def test_what_was_made_in_inference_mode_is_taken():
    case = make_case()
    (q,) = tensors((2, 6, 16))
    expected = decode(q, case.pages, rows_of(case), SOFTMAX, SCORING)
    with torch.inference_mode():
        rows = rows_of(case)
        for _ in range(2):
            assert torch.equal(decode(q, case.pages, rows, SOFTMAX, SCORING), expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(1, 6, 16)}, ValueError, "page_table: expected [R=1, P], got [2, 10]"),
        ({"q": torch.zeros(2, 6, 16).half()}, TypeError, "q: expected torch.float32 like the keys"),
        ({"keys": torch.zeros(1, 2, 16)}, ValueError, "keys: expected [2, 2, 16], got [1, 2, 16]"),
        ({"values": torch.zeros(2, 2, 8)}, ValueError, "values: expected [2, 2, 16], got [2, 2, 8]"),
        ({"num_selected": torch.tensor([4, 1])}, ValueError, "num_selected: expected at least the 2 sink and recent"),
        ({"num_selected": None}, ValueError, "num_selected: expected [R] in rows, got None"),
        ({"pages_read": torch.zeros(3, dtype=torch.int64)}, ValueError, "pages_read: expected [R=2]"),
    ],
)
def test_a_wrong_argument_is_named_whatever_was_checked_before(change, error, message):
    case = make_case()
    rows, places = rows_of(case), places_of(case)
    q, keys, values = tensors((2, 6, 16), (2, 2, 16), (2, 2, 16))

    def step(q, keys, values, num_selected, pages_read):
        rule = {"writes": Writes(keys, values, places), "pages_read": pages_read}
        return decode(q, case.pages, rows.selecting(num_selected), SOFTMAX, SCORING, **rule)

    arguments = {"q": q, "keys": keys, "values": values, "num_selected": FEW, "pages_read": torch.zeros_like(FEW)}
    step(**arguments)
    with pytest.raises(error) as raised:
        step(**(arguments | change))
    assert str(raised.value).startswith(f"[decode] {message}")


_TABLE, _LENGTHS = torch.tensor([[0, 1], [2, -1]]), torch.tensor([7, 4])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Rows(_TABLE[0], _LENGTHS), ValueError, "[Rows] page_table: expected [R, P] or [R, Hkv, P], got [2]"),
        (lambda: Rows(_TABLE.int(), _LENGTHS), TypeError, "[Rows] page_table: expected int64, got torch.int32"),
        (lambda: Rows(_TABLE, _LENGTHS[:1]), ValueError, "[Rows] lengths: expected [R=2], got [1]"),
        (lambda: Rows(_TABLE, _LENGTHS.float()), TypeError, "[Rows] lengths: expected int64, got torch.float32"),
        (lambda: Rows(_TABLE, _LENGTHS.to("meta")), ValueError, "[Rows] lengths: expected device cpu, got meta"),
        (lambda: Rows(_TABLE, _LENGTHS, FEW[:1]), ValueError, "[Rows] num_selected: expected [R=2], got [1]"),
        (lambda: Places(_TABLE, FEW), ValueError, "[Places] slots: expected [n], got [2, 2]"),
        (lambda: Places(FEW, FEW.int()), TypeError, "[Places] sealed: expected int64, got torch.int32"),
        (lambda: Places(FEW, FEW, FEW[:1]), ValueError, "[Places] into: expected a page for each of the 2 in sealed"),
        (lambda: Places(FEW, FEW, None, FEW), ValueError, "[Places] spans: expected [k, C], got [2]"),
        (lambda: Places(FEW, FEW.to("meta")), ValueError, "[Places] sealed: expected device cpu, got meta"),
    ],
)
def test_a_wrong_shape_dtype_or_device_is_named_when_it_is_made(make, error, message):
    with pytest.raises(error) as raised:
        make()
    assert str(raised.value).startswith(message)


def test_operators_score_and_force_by_default_what_the_configuration_says():
    config = QuestConfig()
    assert Scoring() == Scoring.of(config)
    assert (Scoring().optimism, Scoring().sink_pages, Scoring().recent_pages) == (0.5, 1, 4)
    case = build_case(3, SHAPE, [60, 57], poison=0.0)
    rows = Rows(case.page_table, case.lengths, torch.tensor([7, 7]))
    expected = decode(case.q, case.pages, rows, SOFTMAX, Scoring(0.5, "mean", 1, 4))
    assert torch.equal(decode(case.q, case.pages, rows, SOFTMAX), expected)
    with pytest.raises(ValueError, match=r"num_selected: expected at least the 5 sink and recent"):
        decode(case.q, case.pages, rows.selecting(torch.tensor([4, 4])), SOFTMAX)
