"""A row's bits depend on its own tokens only: not on neighbours, pages, segments, poison, or what came after."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.calls import decode, dense, estimate, prefill, select
from kernels.cases import DTYPES, GROUP_RULES, Case, Shape, build_case, case_arguments, read_page
from questkv import QuestConfig
from questkv.kernels import Pages, PageSegment, append, seal

pytestmark = pytest.mark.usefixtures("every_backend")


def _all_results(case: Case, group: str) -> list[list[torch.Tensor]]:
    """For every row: scores, selection, sparse output, dense output, pages read."""
    half = torch.tensor([max(sealed // 2, min(sealed, 2)) for sealed in case.sealed])
    scores = estimate(*case.args, scale=case.scale, group=group)
    selection = select(scores, torch.tensor(case.sealed), half, sink_pages=1, recent_pages=1)
    read = torch.zeros(len(case.rows), dtype=torch.int64)
    out = decode(*case.args, half, scale=case.scale, group=group, sink_pages=1, recent_pages=1, pages_read=read)
    full = dense(*case.args, scale=case.scale)
    results = []
    for row, sealed in enumerate(case.sealed):
        count = min(int(half[row]), sealed)
        results.append([scores[row, :, :sealed], selection[row, :, :count], out[row], full[row], read[row]])
    return results


def _assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


@given(arguments=case_arguments(max_rows=4), group=st.sampled_from(GROUP_RULES))
def test_a_row_alone_gives_the_bits_it_gives_in_a_batch(arguments, group):
    case = build_case(**arguments)
    together = _all_results(case, group)
    for row in case.rows:
        _assert_same(_all_results(case.row(row), group)[0], together[row])


@pytest.mark.slow
@given(arguments=case_arguments(max_rows=3), group=st.sampled_from(GROUP_RULES), placement=st.integers(1, 99))
def test_other_physical_pages_segments_and_poison_give_the_same_bits(arguments, group, placement):
    case = build_case(**arguments)
    arguments["segments"] = arguments["segments"] % 4 + 1
    moved = build_case(**arguments, placement=placement, poison=31000.0, free_pages=7)
    for one, other in zip(_all_results(case, group), _all_results(moved, group), strict=True):
        _assert_same(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("box_dtype", ["int8", "model"])
@pytest.mark.parametrize("head_dim", [8, 80])
def test_pages_in_one_run_give_the_bits_of_scattered_pages(dtype, box_dtype, head_dim):
    shape = Shape(kv_heads=3, group=1, head_dim=head_dim, page_size=3, dtype=dtype, box_dtype=box_dtype)
    scattered = build_case(0, shape, [100], placement=3)
    order = torch.tensor(scattered.tables[0])
    for first in (0, 1, 2):  # a run that starts at different addresses
        tensors = []
        for name in ("keys", "values", "boxes", "scales"):
            parts = [getattr(segment, name) for segment in scattered.pages.segments]
            if parts[0] is None:
                tensors.append(None)
                continue
            rows = torch.cat(parts, dim=1)[:, order]
            pad = torch.zeros_like(rows[:, :first])
            tensors.append(torch.cat([pad, rows], dim=1).contiguous())
        run = Pages((PageSegment(*tensors),))
        table = torch.arange(first, first + len(order))[None]
        moved = Case(**{**vars(scattered), "pages": run, "page_table": table, "tables": [table[0].tolist()]})
        _assert_same(_all_results(moved, "mean")[0], _all_results(scattered, "mean")[0])
        q = torch.randn(40, 3, head_dim).to(dtype)
        one, other = (prefill(q, case.pages, case.page_table[0], 100, scale=1.0) for case in (moved, scattered))
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["heads first", "dims first"])
def test_the_strides_of_the_queries_change_no_bit(layout):
    case = build_case(1, Shape(page_size=3, group=4, head_dim=64), [40, 31, 22])
    axes = (1, 0, 2) if layout == "heads first" else (2, 0, 1)
    back = (1, 0, 2) if layout == "heads first" else (1, 2, 0)
    strided = Case(**{**vars(case), "q": case.q.permute(axes).contiguous().permute(back)})
    assert not strided.q.is_contiguous()
    for group in GROUP_RULES:
        for one, other in zip(_all_results(case, group), _all_results(strided, group), strict=True):
            _assert_same(one, other)


def _empty_pages(shape: Shape, num_pages: int, poison: float) -> Pages:
    tokens = (shape.kv_heads, num_pages, shape.page_size, shape.head_dim)
    bounds = (shape.kv_heads, num_pages, 2, shape.head_dim)
    keys, values = (torch.full(tokens, poison, dtype=shape.dtype) for _ in range(2))
    if shape.box_dtype == "int8":
        boxes, scales = torch.full(bounds, 55, dtype=torch.int8), torch.full(bounds[:2], poison)
    else:
        boxes, scales = torch.full(bounds, poison, dtype=shape.dtype), None
    return Pages((PageSegment(keys, values, boxes, scales),))


@settings(max_examples=25)
@given(
    data=st.data(),
    size=st.sampled_from([1, 3, 4, 16]),
    group=st.sampled_from(GROUP_RULES),
    dtype=st.sampled_from(DTYPES),
    box_dtype=st.sampled_from(["int8", "model"]),
)
def test_n_tokens_in_one_call_give_the_bits_of_n_single_steps(data, size, group, dtype, box_dtype):
    shape = Shape(kv_heads=2, group=3, head_dim=8, page_size=size, dtype=dtype, box_dtype=box_dtype)
    length = data.draw(st.integers(2, 6 * size + 2))
    config = QuestConfig(token_budget=3 * size, page_size=size, sink_tokens=1, recent_tokens=1)
    num_pages = -(-length // size)
    table = torch.tensor(data.draw(st.permutations(range(num_pages + 2))))[:num_pages]
    keys, values = (torch.randn(length, 2, 8).to(dtype) for _ in range(2))
    q = torch.randn(length, shape.heads, 8).to(dtype)
    rest = {"scale": 0.35, "group": group, "sink_pages": 1, "recent_pages": 1}

    pages, steps = _empty_pages(shape, num_pages + 2, math.nan), []
    for i in range(length):
        append(pages, table[i // size : i // size + 1] * size + i % size, keys[i : i + 1], values[i : i + 1])
        if i and i % size == 0:
            seal(pages, table[i // size - 1 : i // size])
        seen = table[: i // size + 1][None]
        budget = torch.tensor([config.pages_at(i + 1)])
        steps.append(decode(q[i : i + 1], pages, seen, torch.tensor([i + 1]), budget, **rest))

    pages = _empty_pages(shape, num_pages + 2, 99.0)
    slots = table[torch.arange(length) // size] * size + torch.arange(length) % size
    append(pages, slots, keys, values)
    seal(pages, table[: (length - 1) // size])
    lengths = torch.arange(1, length + 1)
    budgets = torch.tensor([config.pages_at(n) for n in lengths.tolist()])
    together = decode(q, pages, table.expand(length, -1), lengths, budgets, **rest)

    assert torch.equal(together, torch.cat(steps))


@given(arguments=case_arguments(max_rows=1), data=st.data())
def test_tokens_behind_the_row_are_not_seen(arguments, data):
    """A row that ends inside a written page: later tokens of its open page, and later pages, have no part in it."""
    case = build_case(**arguments)
    size, length = case.shape.page_size, arguments["lengths"][0]
    shorter = data.draw(st.integers(1, length))
    view = Case(**{**vars(case), "lengths": torch.tensor([shorter])})
    before = _all_results(view, "mean")
    q = torch.randn(min(shorter, 3), case.shape.heads, case.shape.head_dim).to(case.shape.dtype)
    run = prefill(q, case.pages, case.page_table[0], shorter, scale=1.0)
    for token in range(shorter, length):
        page = case.tables[0][token // size]
        read_page(case.pages, page, "keys")[:, token % size] = math.nan
        read_page(case.pages, page, "values")[:, token % size] = math.nan
    _assert_same(_all_results(view, "mean")[0], before[0])
    assert torch.equal(prefill(q, case.pages, case.page_table[0], shorter, scale=1.0), run)
