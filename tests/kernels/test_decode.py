"""decode is estimate, select and attend; with enough pages it is dense, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.calls import attend, decode, dense, estimate, select
from kernels.cases import GROUP_RULES, Case, Shape, build_case, cases, read_page

pytestmark = pytest.mark.usefixtures("every_backend")


@st.composite
def _decodes(draw: st.DrawFn, case: Case) -> dict:
    """Keyword arguments of decode that select fewer pages than there are in some rows, and as many in others."""
    sink, recent = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    counts = [draw(st.integers(min(sealed, sink + recent), sealed + 1)) for sealed in case.sealed]
    return {
        "num_selected": torch.tensor(counts),
        "scale": case.scale,
        "optimism": draw(st.sampled_from([0.5, 1.0])),
        "group": draw(st.sampled_from(GROUP_RULES)),
        "sink_pages": sink,
        "recent_pages": recent,
        "softcap": draw(st.sampled_from([None, 5.0])),
        "sinks": draw(st.sampled_from([None, torch.linspace(-1, 1, case.shape.heads)])),
    }


def _selection(case: Case, arguments: dict) -> torch.Tensor:
    scores = estimate(*case.args, **{name: arguments[name] for name in ("scale", "optimism", "group")})
    forced = {name: arguments[name] for name in ("sink_pages", "recent_pages")}
    return select(scores, torch.tensor(case.sealed), arguments["num_selected"], **forced)


def _is_sparse(case: Case, arguments: dict, row: int) -> bool:
    return int(arguments["num_selected"][row]) < case.sealed[row]


@given(data=st.data(), case=cases())
def test_decode_is_estimate_select_and_attend(data, case):
    arguments = data.draw(_decodes(case))
    out = decode(*case.args, **arguments)
    softmax = {name: arguments[name] for name in ("scale", "softcap", "sinks")}
    sparse = attend(*case.args, _selection(case, arguments), **softmax)
    full = dense(*case.args, **softmax)
    for row in case.rows:
        assert torch.equal(out[row], sparse[row] if _is_sparse(case, arguments, row) else full[row])


@given(data=st.data(), case=cases(), group=st.sampled_from(GROUP_RULES))
def test_enough_pages_give_the_bits_of_dense(data, case, group):
    more = torch.tensor([sealed + data.draw(st.integers(0, 2)) for sealed in case.sealed])
    out = decode(*case.args, more, scale=case.scale, group=group, sink_pages=2, recent_pages=2)
    assert torch.equal(out, dense(*case.args, scale=case.scale))


@given(data=st.data(), case=cases())
def test_pages_read_counts_each_page_of_a_kv_head_once(data, case):
    arguments = data.draw(_decodes(case))
    counted = torch.full((len(case.rows),), -999)
    out = decode(*case.args, **arguments, pages_read=counted)
    selection = _selection(case, arguments).tolist()
    for row in case.rows:
        if _is_sparse(case, arguments, row):
            ratio = len(selection[row]) // case.shape.kv_heads
            read = {(h // ratio, page) for h, pages in enumerate(selection[row]) for page in pages if page != -1}
        else:
            read = {(head, page) for head in range(case.shape.kv_heads) for page in range(case.sealed[row])}
        assert counted[row].item() == len(read) + case.shape.kv_heads
    assert torch.equal(out, decode(*case.args, **arguments))


@pytest.mark.parametrize("group", GROUP_RULES)
def test_a_budget_of_no_sealed_page_reads_the_open_page_alone(group):
    case = build_case(0, Shape(kv_heads=2, group=3, page_size=3), [11])
    counted = torch.zeros(1, dtype=torch.int64)
    forced = {"sink_pages": 0, "recent_pages": 0}
    out = decode(*case.args, torch.tensor([0]), scale=1.0, group=group, pages_read=counted, **forced)
    assert counted.item() == 2
    tail = build_case(0, Shape(kv_heads=2, group=3, page_size=3), [2])
    page = tail.tables[0][0]
    for name in ("keys", "values"):
        read_page(tail.pages, page, name)[:, :2] = read_page(case.pages, case.tables[0][3], name)[:, :2]
    # A few terms: nothing but the order of their sums can differ.
    expected = dense(case.q, tail.pages, tail.page_table, tail.lengths, scale=1.0)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


@pytest.mark.slow
@given(data=st.data(), case=cases(), bad=st.sampled_from([math.nan, -2e4]))
def test_poisoning_every_page_that_was_not_selected_changes_no_bit(data, case, bad):
    arguments = data.draw(_decodes(case))
    before = decode(*case.args, **arguments)
    selection = _selection(case, arguments)
    read: set[tuple[int, int]] = set()
    for row, sealed in enumerate(case.sealed):
        sparse = _is_sparse(case, arguments, row)
        for head in range(case.shape.heads):
            listed = selection[row, head * selection.shape[1] // case.shape.heads].tolist()
            pages = [*listed, sealed] if sparse else range(sealed + 1)
            read |= {(head // case.shape.group, case.tables[row][page]) for page in pages if page != -1}
    for page in range(case.pages.num_pages):
        for head in range(case.shape.kv_heads):
            if (head, page) not in read:
                read_page(case.pages, page, "keys")[head] = bad
                read_page(case.pages, page, "values")[head] = bad
    assert torch.equal(decode(*case.args, **arguments), before)


@pytest.mark.parametrize("group", GROUP_RULES)
@pytest.mark.parametrize("box_dtype", ["int8", "model"])
@pytest.mark.parametrize("optimism", [0.0, 1.0])
def test_the_page_that_holds_the_answer_is_found(group, box_dtype, optimism):
    shape = Shape(kv_heads=2, group=4, head_dim=16, page_size=16, box_dtype=box_dtype)
    needles = (5, 22)  # logical page for each KV head
    case = build_case(1, shape, [16 * 30 + 3])
    for head, needle in enumerate(needles):
        # All queries of the group agree; one key of that page answers them.
        case.q[0, head * 4 : head * 4 + 4] = torch.randn(16).sign() * 6
        page = case.tables[0][needle]
        keys, values = read_page(case.pages, page, "keys")[head], read_page(case.pages, page, "values")[head]
        keys[7] = case.q[0, head * 4] * 2
        values[7] = float(100 + head)
        _rebox(case, page, head)
    counted = torch.zeros(1, dtype=torch.int64)
    one = torch.tensor([1 + 1 + 1])
    out = decode(
        *case.args,
        one,
        scale=0.25,
        optimism=optimism,
        group=group,
        sink_pages=1,
        recent_pages=1,
        pages_read=counted,
    )
    assert counted.item() == 2 * 4  # sink, recent, needle and open page of each KV head
    assert out[0, :, 0].round().tolist() == [100.0] * 4 + [101.0] * 4


def _rebox(case: Case, page: int, head: int) -> None:
    keys = read_page(case.pages, page, "keys")[head]
    boxes = read_page(case.pages, page, "boxes")[head]
    lo, hi = keys.min(dim=0).values, keys.max(dim=0).values
    if case.shape.box_dtype == "int8":
        step = keys.abs().max() / 126
        read_page(case.pages, page, "scales")[head] = step
        lo, hi = (lo / step).floor(), (hi / step).ceil()
    boxes[0], boxes[1] = lo, hi


@pytest.mark.parametrize("group", GROUP_RULES)
def test_a_page_with_a_nan_key_is_read_whatever_the_others_score(group):
    shape = Shape(kv_heads=1, group=2, page_size=3)
    case = build_case(2, shape, [31], bad_keys=[(0, 13, math.nan)])
    out = decode(*case.args, torch.tensor([3]), scale=1.0, group=group, sink_pages=1, recent_pages=1)
    assert bool(out.isnan().all())
    assert bool(dense(*case.args, scale=1.0).isnan().all())


def test_no_rows_give_no_output():
    case = build_case(3, Shape(), [7])
    none = torch.zeros(0, dtype=torch.int64)
    out = decode(case.q[:0], case.pages, case.page_table[:0], none, none, scale=1.0, pages_read=none.clone())
    assert list(out.shape) == [0, 6, 16]
