"""Boxes of spans, and scores in two levels: against float64, against scoring every page, and between the operators."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interpreter import has_triton
from kernels.calls import attend, decode, dense, estimate, select
from kernels.cases import GROUP_RULES, Case, Shape, build_case, case_arguments, read_page
from kernels.formulas import group_scores, head_scores
from kernels.spans import spanned, whole_spans
from questkv.errors import UnsupportedError
from questkv.kernels import Pages, Places, Writes, seal_spans

pytestmark = pytest.mark.usefixtures("every_fast_backend")


def stored(case: Case, page: int, *, span: bool = False) -> torch.Tensor:
    """[Hkv, 2, D] float64 bounds of a page, or of the span that ends with it."""
    for segment in case.pages.segments:
        pages = segment.keys.shape[1]
        if page < pages:
            at = pages + page // case.pages.span_pages if span else page
            scale = 1.0 if segment.scales is None else segment.scales[:, at].double()[:, None, None]
            return segment.boxes[:, at].double() * scale
        page -= pages
    raise IndexError(page)


@st.composite
def spanned_cases(draw: st.DrawFn, max_pages: int = 30, **fixed) -> Case:
    arguments = draw(case_arguments(max_rows=3, max_pages=max_pages, **fixed))
    case = build_case(**arguments)
    case = spanned(case, draw(st.sampled_from([2, 3, 4, 8])), draw(st.integers(0, 99)))
    ids = [span for row in case.rows for span in whole_spans(case, row)]
    seal_spans(case.pages, torch.tensor(ids, dtype=torch.int64).view(-1, case.pages.span_pages))
    return case


def drawn_counts(draw, case: Case, forced: int = 0) -> torch.Tensor:
    return torch.tensor([draw(st.integers(min(n, forced), max(n // 3, min(n, forced)))) for n in case.sealed])


@given(case=spanned_cases())
def test_a_spans_box_is_the_smallest_around_its_pages(case):
    for row in case.rows:
        for span in whole_spans(case, row):
            pages = torch.stack([stored(case, page) for page in span])
            lo, hi = pages[:, :, 0].amin(dim=0), pages[:, :, 1].amax(dim=0)
            box = stored(case, span[-1], span=True)
            if case.shape.box_dtype == "model":
                assert torch.equal(box, torch.stack([lo, hi], dim=1))
                continue
            step = torch.stack([read_page(case.pages, page, "scales") for page in span]).amax(dim=0).double()[:, None]
            assert bool(((box[:, 0] <= lo) & (box[:, 0] > lo - step * (1 + 1e-9))).all())
            assert bool(((box[:, 1] >= hi) & (box[:, 1] < hi + step * (1 + 1e-9))).all())


@given(data=st.data(), case=spanned_cases(), group=st.sampled_from(GROUP_RULES), optimism=st.sampled_from([0.5, 1.0]))
def test_the_pages_of_the_best_spans_are_scored_and_no_other(data, case, group, optimism):
    counts, size, kv_heads = drawn_counts(data.draw, case), case.pages.span_pages, case.shape.kv_heads
    rule = {"scale": case.scale, "optimism": optimism, "group": group}
    scores = estimate(*case.args, counts, **rule)
    every = estimate(*case.args, **rule)
    for row, sealed in enumerate(case.sealed):
        assert bool((scores[row, :, sealed:] == -math.inf).all())
        spans, kept = whole_spans(case, row), -(-4 * int(counts[row]) // size)
        if kept >= len(spans):
            assert torch.equal(scores[row], every[row])
            continue
        shown = scores[row, :, :sealed] > -math.inf
        tail = len(spans) * size
        assert bool(shown[:, tail:].all())
        of_spans = shown[:, :tail].unflatten(1, (-1, size))
        assert torch.equal(of_spans.any(dim=2), of_spans.all(dim=2))
        assert of_spans.all(dim=2).sum(dim=1).tolist() == [kept] * len(shown)
        bounds = torch.stack([stored(case, span[-1], span=True) for span in spans], dim=1)
        exact = head_scores(case.q[row], bounds[:, :, 0], bounds[:, :, 1], case.scale, optimism)
        expected, slack = group_scores(*exact, kv_heads, group)
        for head, best in enumerate(of_spans.all(dim=2)):
            worst = (expected[head] + slack[head])[best]
            left_out = (expected[head] - slack[head])[~best]
            assert not len(worst) or not len(left_out) or left_out.max() <= worst.min() + 2 * slack[head].max()
        pages = torch.stack([stored(case, page) for page in case.tables[row][:sealed]], dim=1)
        exact = head_scores(case.q[row], pages[:, :, 0], pages[:, :, 1], case.scale, optimism)
        for head in range(len(shown)):
            own = shown[head].nonzero().flatten()
            if not len(own):
                continue
            expected, slack = group_scores(exact[0][:, own], exact[1][:, own], kv_heads, group)
            assert bool(((scores[row, head, own].double() - expected[head]).abs() <= slack[head]).all())


@given(data=st.data(), case=spanned_cases(), group=st.sampled_from(GROUP_RULES))
def test_decode_is_estimate_in_two_levels_select_and_attend(data, case, group):
    forced = {"sink_pages": data.draw(st.integers(0, 2)), "recent_pages": data.draw(st.integers(0, 2))}
    counts = drawn_counts(data.draw, case, sum(forced.values()))
    read = torch.zeros_like(counts)
    out = decode(*case.args, counts, scale=case.scale, group=group, **forced, pages_read=read)
    scores = estimate(*case.args, counts, scale=case.scale, group=group)
    selection = select(scores, torch.tensor(case.sealed), counts, **forced)
    sparse, full = attend(*case.args, selection, scale=case.scale), dense(*case.args, scale=case.scale)
    for row, sealed in enumerate(case.sealed):
        assert torch.equal(out[row], sparse[row] if int(counts[row]) < sealed else full[row])
        if group != "per_head":
            assert read[row] == (min(int(counts[row]), sealed) + 1) * case.shape.kv_heads


@given(case=spanned_cases(max_pages=12), group=st.sampled_from(GROUP_RULES))
def test_a_row_decodes_alone_as_in_a_batch(case, group):
    counts = torch.tensor([n // 4 for n in case.sealed])
    rule = {"scale": case.scale, "group": group, "sink_pages": 0, "recent_pages": 0}
    out = decode(*case.args, counts, **rule)
    for row in case.rows:
        assert torch.equal(decode(*case.row(row).args, counts[row : row + 1], **rule)[0], out[row])


@pytest.mark.parametrize("group", GROUP_RULES)
@pytest.mark.parametrize("box_dtype", ["int8", "model"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_page_with_a_bad_key_is_read_whatever_its_span_scores(group, box_dtype, bad):
    shape = Shape(kv_heads=1, group=2, page_size=3, box_dtype=box_dtype)
    case = spanned(build_case(2, shape, [3 * 40 + 1], bad_keys=[(0, 50, bad)]), 4)
    seal_spans(case.pages, torch.tensor(whole_spans(case, 0)))
    out = decode(*case.args, torch.tensor([3]), scale=1.0, group=group, sink_pages=1, recent_pages=1)
    assert bool(out.isnan().all())
    scores = estimate(*case.args, torch.tensor([3]), scale=1.0, group=group)
    assert (scores[0] == math.inf).nonzero()[:, 1].unique().tolist() == [50 // 3]


@pytest.mark.parametrize("group", GROUP_RULES)
def test_scores_that_all_overflow_select_the_first_pages(group):
    shape = Shape(kv_heads=1, group=2, page_size=3, dtype=torch.bfloat16)
    case = build_case(2, shape, [3 * 40 + 1])
    for page in case.tables[0][:40]:
        read_page(case.pages, page, "scales").fill_(3e38)
        read_page(case.pages, page, "boxes").fill_(-127)
    case = spanned(case, 4)
    seal_spans(case.pages, torch.tensor(whole_spans(case, 0)))
    case.q.fill_(20.0)
    scores = estimate(*case.args, torch.tensor([6]), scale=1.0, group=group)
    assert not bool(scores.isnan().any())
    selection = select(scores, torch.tensor([40]), torch.tensor([6]), sink_pages=1, recent_pages=1)
    got = decode(*case.args, torch.tensor([6]), scale=1.0, group=group, sink_pages=1, recent_pages=1)
    assert torch.equal(got, attend(*case.args, selection, scale=1.0))


def test_new_tokens_complete_spans_before_they_are_read(every_fast_backend):
    case = spanned(build_case(3, Shape(page_size=2), [2 * 24 + 1]), 4)
    spans = torch.tensor(whole_spans(case, 0))
    last = case.tables[0][23]
    seal_spans(case.pages, spans)
    expected = decode(*case.args, torch.tensor([3]), scale=0.3, sink_pages=1, recent_pages=1)
    for segment in case.pages.segments:
        segment.boxes[:, segment.keys.shape[1] :] = 99
    seal_spans(case.pages, spans[:-1])
    key, value = case.keys[0][:, -1:], case.values[0][:, -1:]
    slot = torch.tensor([case.tables[0][24] * 2])
    places = Places(slot, torch.tensor([last]), None, spans[-1:])
    new = Writes(key.transpose(0, 1), value.transpose(0, 1), places)
    forced = {"sink_pages": 1, "recent_pages": 1}
    assert torch.equal(decode(*case.args, torch.tensor([3]), scale=0.3, writes=new, **forced), expected)
    with pytest.raises(ValueError, match=r"\[decode\] spans: expected \[k, C=4\], got None"):
        decode(
            *case.args, torch.tensor([3]), scale=0.3, writes=replace(new, places=replace(places, spans=None)), **forced
        )


def test_what_is_no_span_is_refused():
    case = spanned(build_case(3, Shape(page_size=2), [2 * 9 + 1]), 4)
    with pytest.raises(ValueError, match=r"\[seal_spans\] page_ids: expected \[n, C=4\], got \[2, 3\]"):
        seal_spans(case.pages, torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"expected last pages 3 modulo 4, got \[4\]"):
        seal_spans(case.pages, torch.tensor([[0, 1, 2, 4]]))
    with pytest.raises(ValueError, match="page_ids: expected physical pages 0 to"):
        seal_spans(case.pages, torch.tensor([[0, 1, 2, 4 * 10**6 + 3]]))
    without = build_case(3, Shape(page_size=2), [5]).pages
    with pytest.raises(ValueError, match=r"expected boxes for spans, \[Hkv, N \+ N / C, 2, D\], got none"):
        seal_spans(without, torch.zeros(0, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"\[Rows\] num_selected: expected \[R=1\]"):
        estimate(*case.args, torch.tensor([1, 1]), scale=1.0)
    mixed = (case.pages.segments[0], *without.segments)
    with pytest.raises(ValueError, match=r"boxes: expected spans of 4 pages in all segments, got 0"):
        Pages(mixed)


def test_triton_refuses_spans(triton_backend):
    case = spanned(build_case(3, Shape(page_size=2), [2 * 9 + 1]), 4)
    assert has_triton()
    for call in (
        lambda: estimate(*case.args, scale=1.0),
        lambda: seal_spans(case.pages, torch.tensor(whole_spans(case, 0))),
        lambda: decode(*case.args, torch.tensor([6]), scale=1.0),
    ):
        with pytest.raises(UnsupportedError, match="expected boxes of pages alone with backend 'triton'"):
            call()
