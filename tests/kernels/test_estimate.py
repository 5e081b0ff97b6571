"""estimate against the float64 formula, and as the bound it is at optimism 1."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.calls import estimate
from kernels.cases import DTYPES, GROUP_RULES, Case, Shape, build_case, case_arguments, cases, read_page
from kernels.formulas import group_scores, head_scores
from questkv.kernels import seal

pytestmark = pytest.mark.usefixtures("every_backend")


def _stored_bounds(case: Case, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[Hkv, n, D] float64 lo and hi of the row's sealed pages, as they are stored."""
    boxes = torch.stack([read_page(case.pages, page, "boxes") for page in case.tables[row][: case.sealed[row]]], dim=1)
    boxes = boxes.double()
    if case.pages.segments[0].scales is not None:
        scales = [read_page(case.pages, page, "scales") for page in case.tables[row][: case.sealed[row]]]
        boxes = boxes * torch.stack(scales, dim=1).double()[..., None, None]
    return boxes[:, :, 0], boxes[:, :, 1]


@given(case=cases(), group=st.sampled_from(GROUP_RULES), optimism=st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0]))
def test_scores_are_the_formula_on_the_stored_boxes(case, group, optimism):
    scores = estimate(*case.args, scale=case.scale, optimism=optimism, group=group)
    heads = case.shape.heads if group == "per_head" else case.shape.kv_heads
    assert scores.dtype == torch.float32
    assert list(scores.shape) == [len(case.rows), heads, case.page_table.shape[1]]
    for row, sealed in enumerate(case.sealed):
        assert bool((scores[row, :, sealed:] == -math.inf).all())
        if sealed:
            exact = head_scores(case.q[row], *_stored_bounds(case, row), case.scale, optimism)
            expected, tolerance = group_scores(*exact, case.shape.kv_heads, group)
            assert bool(((scores[row, :, :sealed].double() - expected).abs() <= tolerance).all())


@given(case=cases(), group=st.sampled_from(["mean", "per_head"]))
def test_at_optimism_1_no_key_of_a_page_has_a_larger_logit(case, group):
    full = [p for table, n in zip(case.tables, case.sealed, strict=True) for p in table[:n]]
    seal(case.pages, torch.tensor(full, dtype=torch.int64))
    scores = estimate(*case.args, scale=case.scale, group=group)
    size, share = case.shape.page_size, case.shape.group
    for row, sealed in enumerate(case.sealed):
        if not sealed:
            continue
        own = case.keys[row][:, : sealed * size].double().unflatten(1, (sealed, size))
        largest = torch.stack(
            [(own[h // share] @ query * case.scale).amax(dim=-1) for h, query in enumerate(case.q[row].double())]
        )
        _, tolerance = head_scores(case.q[row], *_stored_bounds(case, row), case.scale, 1.0)
        largest, tolerance = group_scores(largest, tolerance, case.shape.kv_heads, group)
        assert bool((scores[row, :, :sealed].double() >= largest - tolerance).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_at_optimism_1_the_score_is_the_papers_sum_of_maxima(dtype):
    case = build_case(5, Shape(group=1, page_size=16, dtype=dtype, box_dtype="model"), [70])
    scores = estimate(*case.args, scale=0.3, group="per_head")
    for head in range(2):
        for logical in range(4):
            lo, hi = read_page(case.pages, case.tables[0][logical], "boxes")[head].double()
            query = case.q[0, head].double() * 0.3
            bound = torch.maximum(query * lo, query * hi).sum()
            size = (query.abs() * (lo.abs() + hi.abs())).sum()
            assert abs(scores[0, head, logical] - bound) <= 50 * 2.0**-24 * size


@given(case=cases(), optimism=st.sampled_from([0.0, 0.5]))
def test_less_optimism_never_scores_higher(case, optimism):
    full = estimate(*case.args, scale=case.scale)
    less = estimate(*case.args, scale=case.scale, optimism=optimism)
    for row, sealed in enumerate(case.sealed):
        if sealed:
            bounds = _stored_bounds(case, row)
            slack = group_scores(*head_scores(case.q[row], *bounds, case.scale, 1.0), case.shape.kv_heads, "mean")[1]
            assert bool((less[row, :, :sealed] <= full[row, :, :sealed] + 2 * slack).all())


@given(arguments=case_arguments(max_pages=6), group=st.sampled_from(GROUP_RULES), data=st.data())
def test_a_page_with_a_bad_key_scores_infinity_and_the_others_as_without_it(arguments, group, data):
    size = arguments["shape"].page_size
    length = max(arguments["lengths"][0], 2 * size + 1)
    arguments.update(lengths=[length], kinds=["own"])
    token = data.draw(st.integers(0, (length - 1) // size * size - 1))
    bad = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    case = build_case(**arguments, bad_keys=[(0, token, bad)])
    scores = estimate(*case.args, scale=case.scale, group=group)[0]
    heads = case.shape.group if group == "per_head" else 1
    sealed = case.sealed[0]
    infinite = scores[:, :sealed] == math.inf
    assert not bool(scores.isnan().any())
    assert infinite.nonzero().tolist() == [[head, token // size] for head in range(heads)]
    if group != "softmax_mean":
        return
    others = [page for page in range(sealed) if page != token // size]
    lo, hi = (bound[:, others] for bound in _stored_bounds(case, 0))
    expected, tolerance = group_scores(
        *head_scores(case.q[0], lo, hi, case.scale, 1.0), case.shape.kv_heads, "softmax_mean"
    )
    assert bool(((scores[0, others].double() - expected[0]).abs() <= tolerance[0]).all())


def test_softmax_mean_shares_of_a_row_sum_to_one():
    case = build_case(6, Shape(page_size=3, group=4), [40])
    scores = estimate(*case.args, scale=case.scale, group="softmax_mean")[0, :, : case.sealed[0]]
    assert bool(((scores.double().sum(dim=-1) - 1).abs() < 20 * 2.0**-24).all())


def test_softmax_mean_does_not_let_one_loud_head_decide():
    shape = Shape(kv_heads=1, group=3, head_dim=8, page_size=1)
    case = build_case(7, shape, [3])
    keys = torch.eye(8)[:2][None]
    for logical in range(2):
        page = case.tables[0][logical]
        read_page(case.pages, page, "keys")[0, 0] = keys[0, logical]
        seal(case.pages, torch.tensor([page]))
    case.q[0] = 0.0
    case.q[0, 0, 0] = 100.0  # one head cries for page 0
    case.q[0, 1:, 1] = 5.0  # two heads want page 1
    mean = estimate(*case.args, scale=1.0, group="mean")[0, 0, :2]
    shares = estimate(*case.args, scale=1.0, group="softmax_mean")[0, 0, :2]
    assert mean[0] > mean[1]
    assert shares[1] > shares[0]


@pytest.mark.parametrize("group", GROUP_RULES)
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("box_dtype", ["int8", "model"])
def test_finite_keys_whose_logits_overflow_give_no_nan(group, sign, box_dtype):
    shape = Shape(dtype=torch.bfloat16, page_size=3, box_dtype=box_dtype)
    case = build_case(8, shape, [13])
    for page in case.tables[0][:4]:
        read_page(case.pages, page, "keys").fill_(sign * 3e38)
    seal(case.pages, torch.tensor(case.tables[0][:4]))
    case.q.fill_(20.0)
    scores = estimate(*case.args, scale=1.0, group=group)
    assert not bool(scores.isnan().any())


@pytest.mark.parametrize("group", GROUP_RULES)
def test_no_rows_give_no_scores(group):
    case = build_case(9, Shape(), [7])
    q, table, lengths = case.q[:0], case.page_table[:0], case.lengths[:0]
    scores = estimate(q, case.pages, table, lengths, scale=1.0, group=group)
    assert list(scores.shape) == [0, 6 if group == "per_head" else 2, 3]
