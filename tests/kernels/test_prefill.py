"""prefill is causal dense attention: for every token what a dense row gives."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.calls import dense, prefill
from kernels.cases import DTYPES, Case, Shape, build_case, case_arguments, read_page
from kernels.formulas import attention

pytestmark = pytest.mark.usefixtures("every_fast_backend")


def _assert_is_causal_attention(case: Case, q: torch.Tensor, softcap=None, sinks=None):
    """One sequence; q [n, Hq, D] are its last tokens'."""
    length, n = int(case.lengths[0]), len(q)
    out = prefill(q, case.pages, case.page_table[0], length, scale=case.scale, softcap=softcap, sinks=sinks)
    assert out.dtype == case.shape.dtype
    assert out.shape == (*q.shape[:2], case.shape.value_dim)
    for i in range(n):
        tokens = [range(length - n + i + 1)] * case.shape.heads
        expected, tolerance = attention(q[i], case.keys[0], case.values[0], tokens, case.scale, softcap, sinks)
        assert bool(((out[i].double() - expected).abs() <= tolerance).all())


@settings(max_examples=40)
@given(
    arguments=case_arguments(max_rows=1, max_pages=4),
    share=st.floats(0, 1),
    softcap=st.sampled_from([None, 2.0]),
    with_sinks=st.booleans(),
)
def test_each_token_gets_attention_over_itself_and_what_lies_before(arguments, share, softcap, with_sinks):
    case = build_case(**arguments)
    n = max(1, round(share * arguments["lengths"][0]))
    q = torch.randn(n, case.shape.heads, case.shape.head_dim).to(case.shape.dtype)
    sinks = torch.randn(case.shape.heads) if with_sinks else None
    _assert_is_causal_attention(case, q, softcap, sinks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("length", "n"), [(600, 530), (530, 530)])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_runs_of_more_than_one_block_equal_dense_rows(dtype, length, n, softcap):
    shape = Shape(kv_heads=1, group=3, head_dim=16, page_size=17, dtype=dtype)
    case = build_case(0, shape, [length])
    q = torch.randn(n, 3, 16).to(dtype)
    out = prefill(q, case.pages, case.page_table[0], length, scale=case.scale, softcap=softcap)
    rows = torch.arange(length - n + 1, length + 1)
    table = case.page_table.expand(n, -1)
    expected = dense(q, case.pages, table, rows, scale=case.scale, softcap=softcap)
    # Each is within its bound of the exact value, so they differ by the sum of both at most.
    for i in (0, 1, 200, 255, 256, 257, 511, 512, n - 1):
        tokens = [range(length - n + i + 1)] * 3
        _, tolerance = attention(q[i], case.keys[0], case.values[0], tokens, case.scale, softcap)
        assert bool(((out[i].double() - expected[i].double()).abs() <= 2 * tolerance).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["keys", "values"])
@pytest.mark.parametrize("n", [5, 40])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_bad_token_reaches_no_query_before_it(bad, where, n, softcap):
    case = build_case(1, Shape(page_size=16, group=2), [40])
    token = 37  # the third last
    read_page(case.pages, case.tables[0][token // 16], where)[:, token % 16] = bad
    q = torch.randn(n, 4, 16)
    out = prefill(q, case.pages, case.page_table[0], 40, scale=case.scale, softcap=softcap)
    rows = torch.arange(40 - n + 1, 41)
    expected = dense(q, case.pages, case.page_table.expand(n, -1), rows, scale=case.scale, softcap=softcap)
    assert bool(expected[:-3].isfinite().all())
    assert bool(out[:-3].isfinite().all())
    assert bool((out[:-3] - expected[:-3]).abs().max() < 1e-5)
    assert out[-3:].isfinite().tolist() == expected[-3:].isfinite().tolist()


def test_page_table_may_name_more_pages_than_the_tokens_fill():
    case = build_case(2, Shape(page_size=3), [7])
    q = torch.randn(4, 6, 16)
    wide = torch.cat([case.page_table[0], torch.tensor([0, 1])])
    assert torch.equal(
        prefill(q, case.pages, wide, 7, scale=1.0), prefill(q, case.pages, case.page_table[0], 7, scale=1.0)
    )


def test_no_tokens_give_no_output():
    case = build_case(3, Shape(page_size=3), [7])
    q = torch.randn(0, 6, 16)
    assert list(prefill(q, case.pages, case.page_table[0], 7, scale=1.0).shape) == [0, 6, 16]
