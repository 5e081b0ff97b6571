"""Whole numbers of 32 bits: what they can't hold is summed otherwise, or refused with the limit."""

from __future__ import annotations

import pytest
import torch

from kernels.calls import dense, estimate
from questkv.errors import UnsupportedError
from questkv.kernels import Pages, PageSegment, seal
from questkv.kernels.triton.launch import check_page


@pytest.mark.parametrize("dim", [4096, 4128, 16384])
def test_a_page_of_many_channels_has_its_score(dim, every_fast_backend):
    """Every code and every weight is as large as it can be, and all products have one sign."""
    keys = torch.ones(1, 2, 2, dim)
    boxes, scales = torch.zeros(1, 2, 2, dim, dtype=torch.int8), torch.zeros(1, 2)
    pages = Pages((PageSegment(keys, keys.clone(), boxes, scales),))
    seal(pages, torch.tensor([0]), backend="reference")
    rows = torch.ones(1, 1, dim), pages, torch.tensor([[0, 1]]), torch.tensor([3])
    scores = estimate(*rows, scale=1.0, optimism=1.0, group="mean")
    # With optimism 1 the weight of a channel's highest value is its query, 1, and that of the lowest is 0.
    expected = float((boxes[0, 0, 1].double() * scales[0, 0].double()).sum())
    assert expected == pytest.approx(dim, rel=1e-6)
    # The terms are of one sign: a sum of them in float32, in any order, is off by 2^-24 of it a term at most.
    assert float(scores[0, 0, 0]) == pytest.approx(expected, rel=(2 * dim + 8) * 2**-24)


@pytest.mark.parametrize("size", [65536, 65540, 70000])
def test_a_coded_page_of_many_tokens_has_its_mean(size, every_fast_backend):
    """All tokens weigh the same and their codes are 255 but for one channel's, where they are 0."""
    tokens, box = (1, 1, size, 64), (1, 1, 2, 64)
    values = torch.ones(tokens, dtype=torch.bfloat16)
    values[..., 5] = -2.0
    plain = PageSegment(
        torch.zeros(tokens, dtype=torch.bfloat16), values, torch.zeros(box, dtype=torch.int8), torch.zeros(1, 1)
    )
    codes = torch.zeros(tokens, dtype=torch.uint8)
    coded = PageSegment(
        codes, codes.clone(), torch.zeros(box, dtype=torch.int8), torch.zeros(1, 1), torch.zeros(1, 1, size, 2)
    )
    pages = Pages((plain, coded))
    seal(pages, torch.tensor([0]), torch.tensor([1]), backend="reference")
    rows = torch.ones(1, 2, 64, dtype=torch.bfloat16), pages, torch.tensor([[1, 0]]), torch.tensor([size + 1])
    out = dense(*rows, scale=0.125)
    # Over one another, two sums of as many terms of at most 2, 2^-24 off a term; then the result in bfloat16.
    allowed = 2 * (2 * size * 2**-24 + 2**-9)
    assert torch.allclose(out[0].double(), values[0, 0, :2].double(), rtol=0, atol=allowed)


def long_row(size: int, pages: int) -> tuple[torch.Tensor, Pages, torch.Tensor, torch.Tensor]:
    """One row whose table has so many entries, all of the same page: they need no memory of their own."""
    keys = torch.zeros(1, 1, size, 1)
    segment = PageSegment(keys, keys, torch.zeros(1, 1, 2, 1, dtype=torch.int8), torch.zeros(1, 1))
    return torch.zeros(1, 1, 1), Pages((segment,)), torch.zeros(1, pages, dtype=torch.int64), torch.tensor([5])


@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize("operator", ["estimate", "dense"])
def test_triton_refuses_rows_whose_tokens_it_could_not_number(operator):
    """Tokens of a row are numbered in 32 bits, up to a tile behind the last."""
    size = 2**20
    run = {"estimate": lambda *row: estimate(*row, scale=1.0), "dense": lambda *row: dense(*row, scale=1.0)}[operator]
    assert not run(*long_row(size, 2047)).isnan().any()
    expected = (
        r"^\[\w+\] page_table: expected pages for at most 2146435072 tokens with backend 'triton', got 2147483648"
    )
    with pytest.raises(UnsupportedError, match=expected):
        run(*long_row(size, 2048))


@pytest.mark.usefixtures("triton_backend")
def test_triton_refuses_pages_whose_keys_it_could_not_number():
    check_page(2047, 2**20)
    with pytest.raises(UnsupportedError, match=r"page: expected at most 2146435072 numbers, .*got 2147483648$"):
        check_page(2048, 2**20)
