"""seal writes boxes that hold every key, no wider than their eight bits ask for."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.calls import estimate
from kernels.cases import DTYPES, PAGE_SIZES, Shape, build_case, case_arguments, read_page
from questkv.kernels import Pages, PageSegment, seal

pytestmark = pytest.mark.usefixtures("every_backend")

# Pages of [S, D] keys that are hard to code, by name.
_HARD = {
    "zero": lambda shape, kind: torch.zeros(shape),
    "equal": lambda shape, kind: torch.full(shape, -0.7),
    "huge": lambda shape, kind: torch.randn(shape).sign() * torch.rand(shape).mul(0.2).add(0.8) * 0.99 * kind.max,
    "largest": lambda shape, kind: torch.full(shape, kind.max),
    "subnormal": lambda shape, kind: torch.randint(-7, 8, shape) * kind.smallest_normal * kind.eps,
    "tiny and huge": lambda shape, kind: torch.where(
        torch.arange(shape[-1]) % 2 == 0, kind.smallest_normal * torch.ones(shape), kind.max * torch.ones(shape)
    ),
    "outlier": lambda shape, kind: torch.randn(shape) * (1 + 999 * (torch.arange(shape[-1]) == 3)),
    "positive": lambda shape, kind: torch.rand(shape) + 5,
    "negative": lambda shape, kind: -torch.rand(shape) - 5,
    "multiples of a step": lambda shape, kind: torch.randint(-127, 128, shape) / 127,
}


def _empty(keys: torch.Tensor, box_dtype: str) -> Pages:
    """One segment of the given keys [Hkv, N, S, D], values and boxes poisoned."""
    bounds = (*keys.shape[:2], 2, keys.shape[3])
    if box_dtype == "int8":
        boxes, scales = torch.full(bounds, 99, dtype=torch.int8), torch.full(bounds[:2], math.nan)
    else:
        boxes, scales = torch.full(bounds, math.nan, dtype=keys.dtype), None
    return Pages((PageSegment(keys.contiguous(), torch.full_like(keys, math.nan), boxes, scales),))


def _assert_box_is_tight(pages: Pages, page: int) -> None:
    """The box holds every key exactly; each side is less than one step away from the true bound."""
    keys = read_page(pages, page, "keys").double()
    lo, hi = keys.min(dim=1).values, keys.max(dim=1).values
    boxes = read_page(pages, page, "boxes")
    if pages.segments[0].scales is None:
        assert torch.equal(boxes[:, 0].double(), lo)
        assert torch.equal(boxes[:, 1].double(), hi)
        return
    step = read_page(pages, page, "scales").double()[:, None]
    # 8 bits times 24 bits: the product is exact in float64.
    code_lo, code_hi = boxes[:, 0].double(), boxes[:, 1].double()
    assert bool(((code_lo * step)[:, None] <= keys).all())
    assert bool((keys <= (code_hi * step)[:, None]).all())
    assert bool(((code_lo + 1) * step > lo).all())
    assert bool(((code_hi - 1) * step < hi).all())
    # The step is docs/method.md's, up to its rounding up; never subnormal, a CPU may flush that to zero.
    largest = keys.abs().amax(dim=(1, 2))[:, None]
    assert bool((step <= torch.clamp(largest / 127 * (1 + 1e-6), min=2.0**-126)).all())
    assert bool((step >= 2.0**-126).all())


@given(arguments=case_arguments())
def test_box_of_every_full_page_holds_its_keys_and_is_tight(arguments):
    case = build_case(**arguments)
    size = case.shape.page_size
    full = sorted({p for table, n in zip(case.tables, case.lengths.tolist(), strict=True) for p in table[: n // size]})
    seal(case.pages, torch.tensor(full, dtype=torch.int64))
    for page in full:
        _assert_box_is_tight(case.pages, page)


@pytest.mark.parametrize("kind", _HARD)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("box_dtype", ["int8", "model"])
def test_box_of_hard_keys_holds_them_and_is_tight(kind, dtype, box_dtype):
    for size in PAGE_SIZES:
        keys = _HARD[kind]((3, 4, size, 80), torch.finfo(dtype)).to(dtype)
        assert bool(keys.isfinite().all())
        pages = _empty(keys, box_dtype)
        seal(pages, torch.arange(4))
        for page in range(4):
            _assert_box_is_tight(pages, page)


@given(
    bits=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=16, max_size=16),
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from([1, 2, 4]),
)
def test_box_holds_any_bit_pattern(bits, dtype, size):
    raw = torch.tensor(bits, dtype=torch.int32).view(torch.float32).to(dtype)
    keys = raw.nan_to_num(nan=1.0, posinf=torch.finfo(dtype).max, neginf=torch.finfo(dtype).min)
    pages = _empty(keys.view(1, 16 // (size * 4), size, 4), "int8")
    seal(pages, torch.arange(pages.num_pages))
    for page in range(pages.num_pages):
        _assert_box_is_tight(pages, page)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("box_dtype", ["int8", "model"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_page_with_a_nan_or_infinite_key_is_marked_for_its_head_alone(bad, box_dtype, dtype):
    keys = torch.randn(2, 3, 3, 8).to(dtype)
    keys[1, 1, 2, 5] = bad
    pages = _empty(keys, box_dtype)
    seal(pages, torch.arange(3))
    boxes = read_page(pages, 1, "boxes")[1]
    if box_dtype == "int8":
        assert read_page(pages, 1, "scales")[1].item() == math.inf
        assert not boxes.any()
    else:
        assert boxes[0].tolist() == [-math.inf] * 8
        assert boxes[1].tolist() == [math.inf] * 8
    q = torch.randn(1, 4, 8).to(dtype)
    scores = estimate(q, pages, torch.tensor([[0, 1, 2]]), torch.tensor([9]), scale=1.0)
    assert scores[0, 1, 1].item() == math.inf
    assert bool(scores[0, 0, :2].isfinite().all())
    assert bool(scores[0, 1, 0].isfinite())
    for page in (0, 2):
        _assert_box_is_tight(pages, page)


@given(arguments=case_arguments(), data=st.data())
def test_only_the_named_pages_boxes_are_written(arguments, data):
    case = build_case(**arguments)
    pages = case.pages
    named = data.draw(st.sets(st.integers(0, pages.num_pages - 1)))
    names = ("keys", "values", "boxes") if pages.segments[0].scales is None else ("keys", "values", "boxes", "scales")
    before = {(n, page): read_page(pages, page, n).clone() for n in names for page in range(pages.num_pages)}
    seal(pages, torch.tensor(list(named), dtype=torch.int64))
    for (name, page), old in before.items():
        if name in ("keys", "values") or page not in named:
            torch.testing.assert_close(read_page(pages, page, name), old, rtol=0, atol=0, equal_nan=True)


def test_sealing_again_after_a_page_was_overwritten_replaces_the_box():
    case = build_case(3, Shape(page_size=3), [10])
    page = case.tables[0][1]
    read_page(case.pages, page, "keys").mul_(0.125).add_(-40)
    seal(case.pages, torch.tensor([page]))
    _assert_box_is_tight(case.pages, page)


def test_pages_may_be_named_in_any_order_and_twice():
    case = build_case(4, Shape(page_size=3), [13], segments=4)
    full = case.tables[0][:4]
    seal(case.pages, torch.tensor([*reversed(full), full[0]]))
    for page in full:
        _assert_box_is_tight(case.pages, page)
