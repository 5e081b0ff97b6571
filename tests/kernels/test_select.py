"""select against a stable sort of plain Python lists."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.calls import select

pytestmark = pytest.mark.usefixtures("every_backend")

# Few distinct values, so that ties are common.
_SCORES = st.sampled_from([math.nan, math.inf, -math.inf, -1.0, -0.0, 0.0, 0.5, 0.5000001, 2.0, 3e38])


def _expected(scores: list[float], pages: int, count: int, sink: int, recent: int) -> list[int]:
    """Sort by score, highest first, NaN as +inf; Python's sort is stable, so the lower page wins a tie."""
    forced = [page for page in range(pages) if page < sink or page >= pages - recent]
    free = sorted(set(range(pages)) - set(forced))
    best = sorted(free, key=lambda page: -math.inf if math.isnan(scores[page]) else -scores[page])
    return sorted((forced + best)[: min(count, pages)])


@st.composite
def _problems(draw: st.DrawFn) -> dict:
    rows, heads, width = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 14))
    sink, recent = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    pages = [draw(st.integers(0, width)) for _ in range(rows)]
    counts = [draw(st.integers(min(n, sink + recent), width + 3)) for n in pages]
    scores = [[[draw(_SCORES) for _ in range(width)] for _ in range(heads)] for _ in range(rows)]
    return {"scores": scores, "pages": pages, "counts": counts, "sink": sink, "recent": recent}


def _select(scores, pages, counts, sink, recent):
    return select(
        torch.tensor(scores, dtype=torch.float32),
        torch.tensor(pages),
        torch.tensor(counts),
        sink_pages=sink,
        recent_pages=recent,
    )


@given(problem=_problems())
def test_selection_is_that_of_a_stable_sort(problem):
    selection = _select(**problem)
    taken = [min(a, b) for a, b in zip(problem["pages"], problem["counts"], strict=True)]
    assert selection.dtype == torch.int64
    assert selection.shape[2] == max(taken)
    for row, heads in enumerate(selection.tolist()):
        for head, listed in enumerate(heads):
            # float32, as the operator sees them
            scores = torch.tensor(problem["scores"][row][head], dtype=torch.float32).tolist()
            expected = _expected(
                scores, problem["pages"][row], problem["counts"][row], problem["sink"], problem["recent"]
            )
            assert listed[: taken[row]] == expected
            assert listed[taken[row] :] == [-1] * (selection.shape[2] - taken[row])


@given(problem=_problems())
def test_selection_has_the_exact_count_of_distinct_ascending_pages_with_the_forced_ones(problem):
    for row, heads in enumerate(_select(**problem).tolist()):
        pages, count = problem["pages"][row], problem["counts"][row]
        forced = {p for p in range(pages) if p < problem["sink"] or p >= pages - problem["recent"]}
        for listed in heads:
            chosen = [page for page in listed if page != -1]
            assert len(chosen) == min(count, pages)
            assert chosen == sorted(set(chosen))
            assert forced <= set(chosen)
            assert all(0 <= page < pages for page in chosen)


@given(problem=_problems())
def test_a_row_selects_alone_what_it_selects_in_a_batch(problem):
    batch = _select(**problem).tolist()
    for row in range(len(batch)):
        one = {key: value[row : row + 1] for key, value in problem.items() if isinstance(value, list)}
        alone = _select(**one, sink=problem["sink"], recent=problem["recent"]).tolist()[0]
        width = len(alone[0])
        assert [listed[:width] for listed in batch[row]] == alone


@given(problem=_problems(), garbage=_SCORES)
def test_scores_behind_the_rows_pages_are_not_looked_at(problem, garbage):
    before = _select(**problem).tolist()
    for row, pages in enumerate(problem["pages"]):
        for listed in problem["scores"][row]:
            listed[pages:] = [garbage] * (len(listed) - pages)
    assert _select(**problem).tolist() == before


@pytest.mark.parametrize("count", range(11))
def test_all_scores_equal_gives_the_lowest_pages(count):
    assert _select([[[0.25] * 10]], [10], [count], 0, 0).tolist() == [[list(range(count))]]


def test_ties_go_to_the_lower_page_in_long_contexts_too():
    scores = torch.randint(0, 3, (1, 2, 9001)).float().tolist()
    selection = _select(scores, [9001], [4000], 2, 3).tolist()
    assert selection == [[_expected(listed, 9001, 4000, 2, 3) for listed in scores[0]]]


def test_a_nan_is_taken_before_every_finite_score():
    scores = [[[1.0, 3e38, math.nan, 5.0, -math.inf]]]
    assert _select(scores, [5], [1], 0, 0).tolist() == [[[2]]]
    assert _select(scores, [5], [2], 0, 0).tolist() == [[[1, 2]]]


def test_pages_that_score_minus_infinity_are_still_taken_when_their_turn_comes():
    scores = [[[-math.inf, 1.0, -math.inf, -math.inf]]]
    assert _select(scores, [4], [3], 0, 0).tolist() == [[[0, 1, 2]]]


def test_sink_and_recent_pages_are_taken_however_low_they_score():
    scores = [[[-math.inf, 9.0, 8.0, 7.0, -math.inf, -math.inf]]]
    assert _select(scores, [6], [4], 1, 2).tolist() == [[[0, 1, 4, 5]]]


def test_forced_pages_that_overlap_count_once():
    assert _select([[[0.0, 1.0, 2.0]]], [3], [3], 2, 2).tolist() == [[[0, 1, 2]]]


def test_strided_scores_are_read_by_value():
    wide = torch.arange(40, dtype=torch.float32).view(2, 20)[:, ::2].flip(1)[None]
    assert select(wide, torch.tensor([10]), torch.tensor([3])).tolist() == [[[0, 1, 2], [0, 1, 2]]]


def test_no_rows_give_no_selection():
    none = torch.zeros(0, dtype=torch.int64)
    assert list(select(torch.zeros(0, 2, 5), none, none).shape) == [0, 2, 0]
