"""attend against float64 attention over exactly the selected tokens and the open page's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.calls import attend, dense
from kernels.cases import DTYPES, Case, Shape, build_case, cases, read_page, selections
from kernels.formulas import attention

pytestmark = pytest.mark.usefixtures("every_backend")


def _tokens(case: Case, row: int, selection: torch.Tensor) -> list[list[int]]:
    """For each query head the positions it may see: those of its selected pages, and the open page's."""
    size, length, heads = case.shape.page_size, int(case.lengths[row]), case.shape.heads
    listed = selection[row].tolist()
    seen = []
    for head in range(heads):
        pages = [page for page in listed[head * len(listed) // heads] if page != -1] + [case.sealed[row]]
        seen.append([t for page in pages for t in range(page * size, min((page + 1) * size, length))])
    return seen


def _assert_is_attention(out: torch.Tensor, case: Case, tokens: list[list[list[int]]], softcap=None, sinks=None):
    assert out.dtype == case.shape.dtype
    assert out.shape == (*case.q.shape[:2], case.shape.value_dim)
    for row in case.rows:
        expected, tolerance = attention(
            case.q[row], case.keys[row], case.values[row], tokens[row], case.scale, softcap, sinks
        )
        assert bool(((out[row].double() - expected).abs() <= tolerance).all())


@given(data=st.data(), case=cases(), per_head=st.booleans())
def test_output_is_attention_over_the_selected_and_the_open_page(data, case, per_head):
    selection = data.draw(selections(case, per_head))
    out = attend(*case.args, selection, scale=case.scale)
    _assert_is_attention(out, case, [_tokens(case, row, selection) for row in case.rows])


@given(
    data=st.data(),
    case=cases(),
    softcap=st.sampled_from([None, 0.5, 30.0, 1000.0]),
    sink_dtype=st.sampled_from([None, torch.float32, torch.bfloat16]),
)
def test_softcap_and_sinks_apply_as_in_the_formula(data, case, softcap, sink_dtype):
    selection = data.draw(selections(case, per_head=data.draw(st.booleans())))
    sinks = None if sink_dtype is None else (2 * torch.randn(case.shape.heads)).to(sink_dtype)
    out = attend(*case.args, selection, scale=case.scale, softcap=softcap, sinks=sinks)
    _assert_is_attention(out, case, [_tokens(case, row, selection) for row in case.rows], softcap, sinks)
    everything = [[list(range(n))] * case.shape.heads for n in case.lengths.tolist()]
    full = dense(*case.args, scale=case.scale, softcap=softcap, sinks=sinks)
    _assert_is_attention(full, case, everything, softcap, sinks)


@given(case=cases())
def test_dense_is_attention_over_all_tokens_of_the_row(case):
    out = dense(*case.args, scale=case.scale)
    _assert_is_attention(out, case, [[list(range(n))] * case.shape.heads for n in case.lengths.tolist()])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_rows_keep_the_tolerance(dtype):
    shape = Shape(kv_heads=2, group=4, head_dim=80, page_size=17, dtype=dtype)
    case = build_case(0, shape, [17 * 60 + 5, 17 * 60])
    selection = torch.stack([torch.arange(1, 55, 2), torch.arange(0, 54, 2)]).expand(2, 2, 27)
    out = attend(*case.args, selection, scale=case.scale)
    _assert_is_attention(out, case, [_tokens(case, row, selection) for row in case.rows])
    everything = [[list(range(n))] * shape.heads for n in case.lengths.tolist()]
    _assert_is_attention(dense(*case.args, scale=case.scale), case, everything)


def test_query_head_h_reads_kv_head_h_div_g():
    shape = Shape(kv_heads=3, group=4, head_dim=8, page_size=3)
    case = build_case(1, shape, [8])
    for page in case.tables[0]:
        for head in range(3):
            read_page(case.pages, page, "values")[head] = float(head + 1)
    out = attend(*case.args, torch.tensor([[[0, 1]] * 3]), scale=1.0)
    assert out[0, :, 0].round().tolist() == [1.0] * 4 + [2.0] * 4 + [3.0] * 4


def test_heads_of_a_group_that_disagree_each_read_their_own_pages():
    shape = Shape(kv_heads=1, group=3, head_dim=8, page_size=1)
    case = build_case(2, shape, [7])
    case.q.zero_()  # every token weighs the same: the output is the mean of what was read
    for logical, page in enumerate(case.tables[0]):
        read_page(case.pages, page, "values").fill_(0.0)[0, 0, logical] = 1.0
    out = attend(*case.args, torch.tensor([[[0, 1], [1, 2], [4, 5]]]), scale=1.0)[0]
    third = torch.tensor(1 / 3)
    for head, read in enumerate([(0, 1, 6), (1, 2, 6), (4, 5, 6)]):
        expected = torch.zeros(8)
        expected[list(read)] = third
        torch.testing.assert_close(out[head], expected, rtol=0, atol=4 * 2.0**-24)


@given(data=st.data(), case=cases(), bad=st.sampled_from([math.nan, math.inf, 3e4]))
def test_what_lies_in_unselected_pages_has_no_effect(data, case, bad):
    per_head = data.draw(st.booleans())
    selection = data.draw(selections(case, per_head))
    before = attend(*case.args, selection, scale=case.scale)
    read: set[tuple[int, int]] = set()  # (KV head, physical page) that some row reads
    ratio = selection.shape[1] // case.shape.kv_heads
    for row in case.rows:
        for head, listed in enumerate(selection[row].tolist()):
            read |= {(head // ratio, case.tables[row][page]) for page in [*listed, case.sealed[row]] if page >= 0}
    for page in range(case.pages.num_pages):
        for head in range(case.shape.kv_heads):
            if (head, page) not in read:
                for name in ("keys", "values"):
                    read_page(case.pages, page, name)[head] = bad
    for name in ("boxes", "scales"):
        for segment in case.pages.segments:
            tensor = getattr(segment, name)
            if tensor is not None:
                tensor.fill_(77 if tensor.dtype == torch.int8 else bad)
    after = attend(*case.args, selection, scale=case.scale)
    assert torch.equal(before, after)


def test_a_nan_value_in_a_selected_page_reaches_the_output():
    case = build_case(3, Shape(page_size=3), [10])
    read_page(case.pages, case.tables[0][1], "values")[0, 1] = math.nan
    with_it = attend(*case.args, torch.tensor([[[1], [1]]]), scale=1.0)
    without = attend(*case.args, torch.tensor([[[0], [0]]]), scale=1.0)
    assert bool(with_it[0, :3].isnan().all())
    assert bool(with_it[0, 3:].isfinite().all())
    assert bool(without.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_logits_give_no_overflow(dtype):
    case = build_case(4, Shape(page_size=3, dtype=dtype), [10])
    case.q.mul_(1e4)
    selection = torch.tensor([[[0, 2], [1, 2]]])
    out = attend(*case.args, selection, scale=1.0)
    assert bool(out.isfinite().all())
    for head, seen in enumerate(_tokens(case, 0, selection)):
        logits = case.keys[0][head // 3, seen].double() @ case.q[0, head].double()
        first, second = logits.topk(2).values.tolist()
        if first - second > 200:  # all weight on one token: its value, exactly
            best = seen[int(logits.argmax())]
            assert out[0, head].tolist() == case.values[0][head // 3, best].tolist()


def test_a_sink_that_dominates_takes_all_the_mass():
    case = build_case(5, Shape(page_size=3), [10])
    out = attend(*case.args, torch.tensor([[[0], [1]]]), scale=1.0, sinks=torch.full((6,), 1e4))
    assert out.abs().max().item() == 0.0


def test_strided_queries_are_read_by_value():
    case = build_case(6, Shape(page_size=3), [10, 4])
    wide = torch.full((2, 32, 6), math.nan)
    wide[:, ::2] = case.q.transpose(1, 2)
    strided = wide[:, ::2].transpose(1, 2)
    assert not strided.is_contiguous()
    selection = torch.tensor([[[0, 2], [1, 2]], [[0, -1], [0, -1]]])
    args = (case.pages, case.page_table, case.lengths)
    assert torch.equal(
        attend(strided, *args, selection, scale=1.0), attend(strided.contiguous(), *args, selection, scale=1.0)
    )
    assert torch.equal(dense(strided, *args, scale=1.0), dense(strided.contiguous(), *args, scale=1.0))


def test_arguments_are_not_written():
    case = build_case(7, Shape(page_size=3), [10])
    selection = torch.tensor([[[0, 2], [1, 2]]])
    inputs = (case.q, case.page_table, case.lengths, selection)
    before = [tensor.clone() for tensor in inputs]
    keys = [segment.keys.clone() for segment in case.pages.segments]
    attend(*case.args, selection, scale=1.0)
    dense(*case.args, scale=1.0)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    for segment, old in zip(case.pages.segments, keys, strict=True):
        torch.testing.assert_close(segment.keys, old, rtol=0, atol=0, equal_nan=True)


def test_no_rows_give_no_output():
    case = build_case(8, Shape(), [7])
    empty = (case.q[:0], case.pages, case.page_table[:0], case.lengths[:0])
    assert list(attend(*empty, torch.zeros(0, 2, 0, dtype=torch.int64), scale=1.0).shape) == [0, 6, 16]
    assert list(dense(*empty, scale=1.0).shape) == [0, 6, 16]
