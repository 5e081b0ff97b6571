"""linear: against float64, row by row the same, and nothing read past the weights."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from questkv.errors import UnsupportedError
from questkv.kernels import dispatch, linear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 3, 15, 16, 17, 33, 64, 100)


def tolerance(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[..., N] of the result: float32 sums of K products in any order, then one rounding to the dtype.

    AVX512-BF16 rounds odd intermediate sums to odd, and takes subnormal products for zero.
    """
    sizes = x.double().abs() @ weight.double().abs().T
    summing = 2 * (weight.shape[1] + 2) * torch.finfo(torch.float32).eps
    subnormal = weight.shape[1] * torch.finfo(torch.float32).tiny
    return sizes * (summing + torch.finfo(x.dtype).eps) + subnormal + torch.finfo(x.dtype).smallest_normal


@given(
    rows=st.integers(0, 9),
    outputs=st.sampled_from(SIZES),
    channels=st.sampled_from(SIZES),
    dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_it_is_the_product_of_float64(every_fast_backend, rows, outputs, channels, dtype, biased, seed):
    gen = torch.Generator().manual_seed(seed)
    x, weight, bias = (
        torch.randn(shape, generator=gen).to(dtype) for shape in ((rows, channels), (outputs, channels), (outputs,))
    )
    got = linear(x, weight, bias if biased else None)
    expected = x.double() @ weight.double().T + (bias.double() if biased else 0)
    assert got.dtype == dtype
    assert got.shape == (rows, outputs)
    allowed = tolerance(x, weight) + bias.double().abs() * torch.finfo(dtype).eps
    assert bool(((got.double() - expected).abs() <= allowed).all())


@given(
    rows=st.integers(0, 9),
    outputs=st.sampled_from(SIZES),
    channels=st.sampled_from(SIZES),
    dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_codes_stand_for_multiples_of_their_rows_scale(
    every_fast_backend, rows, outputs, channels, dtype, biased, seed
):
    gen = torch.Generator().manual_seed(seed)
    x, scales, bias = (torch.randn(shape, generator=gen).to(dtype) for shape in ((rows, channels), outputs, outputs))
    codes = torch.randint(-128, 128, (outputs, channels), generator=gen, dtype=torch.int8)
    scales = scales / 64
    got = linear(x, codes, bias if biased else None, scales=scales)
    weight = codes.double() * scales.double()[:, None]
    expected = x.double() @ weight.T + (bias.double() if biased else 0)
    assert got.dtype == dtype
    # The scale is one more product in float32.
    allowed = tolerance(x, weight) + bias.double().abs() * torch.finfo(dtype).eps
    assert bool(((got.double() - expected).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_depends_neither_on_its_batch_nor_on_the_threads(every_native, dtype, threads):
    x, weight = torch.randn(7, 70).to(dtype), torch.randn(1003, 70).to(dtype)
    alone = torch.cat([linear(x[i : i + 1], weight) for i in range(7)])
    torch.set_num_threads(threads)
    assert torch.equal(linear(x, weight), alone)


def test_rows_may_have_any_leading_shape(every_fast_backend):
    x, weight = torch.randn(2, 1, 3, 20), torch.randn(5, 20)
    assert torch.equal(linear(x, weight), linear(x.view(6, 20), weight).view(2, 1, 3, 5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_lies_behind_the_weights_is_not_read(every_fast_backend, dtype):
    store = torch.full((19 * 37 + 64,), math.nan, dtype=dtype)
    weight = store[: 19 * 37].view(19, 37)
    weight.copy_(torch.randn(19, 37))
    assert bool(linear(torch.randn(3, 37).to(dtype), weight).isfinite().all())


def test_nan_and_infinity_reach_their_own_outputs_only(every_fast_backend):
    x, weight = torch.randn(1, 40), torch.randn(50, 40)
    weight[7, 39], weight[20, 0] = math.nan, math.inf
    got = linear(x, weight)[0]
    assert bool(got[7].isnan())
    assert bool(got[20].isinf())
    others = torch.ones(50, dtype=torch.bool)
    others[[7, 20]] = False
    assert bool(got[others].isfinite().all())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(2, 9)}, ValueError, "x: expected [..., K] for a weight [N, K], got [2, 9], [4, 8]"),
        ({"weight": torch.zeros(8)}, ValueError, "x: expected [..., K] for a weight [N, K]"),
        ({"bias": torch.zeros(5)}, ValueError, "bias: expected None or [N=4], got [5]"),
        ({"x": torch.zeros(2, 8, dtype=torch.int32)}, TypeError, "x: expected float32, bfloat16 or float16"),
        ({"weight": torch.zeros(4, 8).half()}, TypeError, "weight: expected torch.float32 like x"),
        ({"bias": torch.zeros(4).half()}, TypeError, "bias: expected torch.float32 like x"),
        ({"scales": torch.zeros(5)}, ValueError, "scales: expected None or [N=4], got [5]"),
        ({"scales": torch.zeros(4)}, TypeError, "weight: expected torch.int8 where there are scales"),
        (
            {"weight": torch.zeros(4, 8, dtype=torch.int8), "scales": torch.zeros(4).half()},
            TypeError,
            "scales: expected torch.float32 like x",
        ),
        ({"weight": torch.zeros(4, 8, dtype=torch.int8)}, TypeError, "weight: expected torch.float32 like x"),
        ({"weight": torch.zeros(8, 4).T}, ValueError, "x, weight: expected contiguous tensors"),
    ],
)
def test_bad_input_is_named(every_fast_backend, change, error, message):
    arguments = {"x": torch.zeros(2, 8), "weight": torch.zeros(4, 8), "bias": None} | change
    with pytest.raises(error) as raised:
        linear(**arguments)
    assert str(raised.value).startswith(f"[linear] {message}")


def test_the_compiled_module_takes_no_sizes_that_do_not_fit(every_native):
    with pytest.raises(ValueError, match=r"\[linear\] x: expected"):
        torch.ops.questkv.linear(torch.zeros(2, 9), torch.zeros(4, 8), None, None, "native")
    with pytest.raises(ValueError, match=r"\[linear\] x: expected"):
        torch.ops.questkv.linear(torch.zeros(2, 8), torch.zeros(4, 8), torch.zeros(3), None, "native")
    codes = torch.zeros(4, 8, dtype=torch.int8)
    for scales in (None, torch.zeros(3), torch.zeros(4).half()):
        with pytest.raises(ValueError, match=r"\[linear\] x: expected"):
            torch.ops.questkv.linear(torch.zeros(2, 8), codes, None, scales, "native")


def test_a_backend_without_it_is_refused(monkeypatch):
    monkeypatch.setattr(dispatch, "resolve", lambda backend, device: object())
    with pytest.raises(UnsupportedError, match=r"\[linear\] backend: expected 'native' or 'reference', got 'auto'"):
        linear(torch.zeros(1, 8), torch.zeros(4, 8))


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_torch_accepts_the_operator(backend):
    codes = torch.randint(-128, 128, (4, 8), dtype=torch.int8)
    for weight, bias, scales in (
        (torch.randn(4, 8), None, None),
        (torch.randn(4, 8), torch.randn(4), None),
        (codes, None, torch.randn(4)),
    ):
        arguments = (torch.randn(1, 2, 8), weight, bias, scales, backend)
        assert set(torch.library.opcheck(torch.ops.questkv.linear.default, arguments).values()) == {"SUCCESS"}
