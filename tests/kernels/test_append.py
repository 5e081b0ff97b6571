"""append writes each token into its slot and nothing else."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.cases import Shape, build_case, case_arguments, read_page
from questkv.kernels import Pages, append

pytestmark = pytest.mark.usefixtures("every_backend")


def _snapshot(pages: Pages) -> dict[str, list[torch.Tensor]]:
    return {
        name: [getattr(segment, name).clone() for segment in pages.segments if getattr(segment, name) is not None]
        for name in ("keys", "values", "boxes", "scales")
    }


def _same(pages: Pages, before: dict[str, list[torch.Tensor]], names: tuple[str, ...]) -> bool:
    after = _snapshot(pages)
    return all(
        torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0))
        for name in names
        for a, b in zip(after[name], before[name], strict=True)
    )


@given(arguments=case_arguments(), data=st.data())
def test_each_token_lands_in_its_slot_and_nothing_else_changes(arguments, data):
    case = build_case(**arguments)
    shape, pages = case.shape, case.pages
    before = _snapshot(pages)
    places = [(page, slot) for page in range(pages.num_pages) for slot in range(shape.page_size)]
    chosen = data.draw(st.lists(st.sampled_from(places), unique=True, max_size=12))
    tokens = [
        torch.randn(len(chosen), shape.kv_heads, dim).to(shape.dtype) for dim in (shape.head_dim, shape.value_dim)
    ]
    expected = {
        name: [read_page(pages, page, name).clone() for page in range(pages.num_pages)] for name in ("keys", "values")
    }
    for i, (page, slot) in enumerate(chosen):
        expected["keys"][page][:, slot] = tokens[0][i]
        expected["values"][page][:, slot] = tokens[1][i]

    slots = torch.tensor([page * shape.page_size + slot for page, slot in chosen], dtype=torch.int64)
    append(pages, slots, tokens[0], tokens[1])

    for name in ("keys", "values"):
        for page in range(pages.num_pages):
            torch.testing.assert_close(
                read_page(pages, page, name), expected[name][page], rtol=0, atol=0, equal_nan=True
            )
    assert _same(pages, before, ("boxes", "scales"))


@pytest.mark.parametrize("segments", [1, 3])
def test_strided_tokens_are_written_by_value(segments):
    shape = Shape(kv_heads=3, head_dim=8, page_size=3)
    pages = build_case(0, shape, [7, 4], segments=segments).pages
    # As transformers hands them over: [Hkv, T, D] and every second token.
    strided = torch.randn(2, 3, 10, 8)[:, :, ::2].transpose(1, 2)
    slots = torch.tensor(random.Random(0).sample(range(pages.num_pages * 3), 5))
    append(pages, slots, strided[0], strided[1])
    for i, slot in enumerate(slots.tolist()):
        assert read_page(pages, slot // 3, "keys")[:, slot % 3].tolist() == strided[0, i].tolist()
        assert read_page(pages, slot // 3, "values")[:, slot % 3].tolist() == strided[1, i].tolist()


@pytest.mark.parametrize("slot", [-1, 10**6])
def test_a_refused_append_writes_nothing(slot):
    case = build_case(0, Shape(), [7])
    before = _snapshot(case.pages)
    tokens = torch.zeros(2, 2, 16)
    with pytest.raises(ValueError, match="expected slots 0 to"):
        append(case.pages, torch.tensor([0, slot]), tokens, tokens)
    assert _same(case.pages, before, ("keys", "values", "boxes", "scales"))


def test_nan_and_infinity_are_stored_as_they_are():
    case = build_case(0, Shape(kv_heads=1, head_dim=8), [4])
    token = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, 2.0, 3.0])
    append(case.pages, torch.tensor([2]), token.view(1, 1, 8), token.view(1, 1, 8))
    stored = read_page(case.pages, 0, "keys")[0, 2]
    assert torch.equal(stored.view(torch.int32), token.view(torch.int32))
