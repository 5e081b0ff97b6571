"""The Triton backend, interpreted where there is no GPU: shapes of its own, fixed launches, and who may ask for it."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from interpreter import has_triton
from kernels.all_operators import assert_all_operators_are_right
from kernels.calls import attend, decode, dense, select
from kernels.cases import DTYPES, GROUP_RULES, Case, Shape, build_case, read_page
from kernels.coded_cases import code_pages
from questkv.errors import MissingPackageError, UnsupportedError
from questkv.kernels import Pages, PageSegment, Rows, Scoring, Softmax, append, dispatch, seal

pytestmark = pytest.mark.skipif(not has_triton(), reason="triton isn't installed")


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 16, 71])
def test_every_group_size(triton_backend, group):
    shape = Shape(kv_heads=1, group=group, head_dim=40, page_size=16, dtype=torch.bfloat16)
    assert_all_operators_are_right(shape, [16 * 9 + 1, 16, 16 * 4 + 5], GROUP_RULES[group % 3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "head_dim", "value_dim", "page_size"),
    [
        (torch.float16, 64, 64, 32),
        (torch.float32, 80, 80, 16),
        (torch.bfloat16, 96, 96, 64),
        (torch.float16, 256, 256, 16),
        (torch.bfloat16, 192, 128, 16),
        (torch.float32, 24, 16, 17),
        (torch.float16, 33, 70, 3),
    ],
    ids=str,
)
def test_head_dims_and_page_sizes(triton_backend, dtype, head_dim, value_dim, page_size):
    shape = Shape(2, 2, head_dim, page_size, dtype, "model", value_dim)
    assert_all_operators_are_right(shape, [4 * page_size + 3, page_size, page_size + 1], "mean")


def test_a_wider_head_is_refused():
    keys = torch.zeros(1, 2, 3, 264)
    pages = Pages((PageSegment(keys, keys, torch.zeros(1, 2, 2, 264, dtype=torch.int8), torch.zeros(1, 2)),))
    args = (torch.zeros(1, 1, 264), pages, torch.tensor([[0]]), torch.tensor([2]))
    with pytest.raises(UnsupportedError, match=r"^\[attend\] head dim: expected at most 256 .*, got 264"):
        dense(*args, scale=1.0, backend="triton")
    with pytest.raises(UnsupportedError, match=r"^\[decode\] head dim: expected at most 256 .*, got 264"):
        decode(*args, torch.tensor([0]), scale=1.0, backend="triton")
    boxes = torch.zeros(1, 2, 2, 8, dtype=torch.int8)
    wide_values = Pages((PageSegment(torch.zeros(1, 2, 3, 8), keys, boxes, torch.zeros(1, 2)),))
    with pytest.raises(UnsupportedError, match=r"^\[attend\] values' head dim: expected at most 256 .*, got 264"):
        dense(torch.zeros(1, 1, 8), wide_values, *args[2:], scale=1.0, backend="triton")


# ------------------------------------------------------------------------------------------------- writing


def _stored(pages: Pages) -> list[torch.Tensor]:
    names = ("keys", "values", "boxes", "scales", "value_scales")
    return [t for s in pages.segments for name in names if (t := getattr(s, name)) is not None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("page_size", "head_dim", "value_dim"), [(16, 64, 64), (17, 33, 33), (16, 24, 16), (3, 8, 20)])
def test_boxes_and_codes_are_the_references_bit_for_bit(dtype, page_size, head_dim, value_dim):
    gen = torch.Generator().manual_seed(page_size)
    keys, values = (
        torch.randn((2, 4, page_size, dim), generator=gen).mul(50).to(dtype) for dim in (head_dim, value_dim)
    )
    keys[1, 2, 2, 4], values[0, 1, 2, 3], values[0, 0, 1] = math.nan, math.inf, 2.5
    results = []
    for backend in ("triton", "reference"):
        boxes, scales = torch.full((2, 4, 2, head_dim), 99, dtype=torch.int8), torch.full((2, 4), math.nan)
        codes = [torch.full((2, 5, page_size, dim), 200, dtype=torch.uint8) for dim in (head_dim, value_dim)]
        pages = Pages(
            (
                PageSegment(keys.clone(), values.clone(), boxes, scales),
                PageSegment(
                    *codes,
                    torch.full((2, 5, 2, head_dim), 99, dtype=torch.int8),
                    torch.full((2, 5), math.nan),
                    torch.full((2, 5, page_size, 2), math.nan),
                ),
            )
        )
        seal(pages, torch.tensor([0, 2]), backend=backend)
        seal(pages, torch.tensor([2, 0, 1, 3]), torch.tensor([8, 4, 7, 5]), backend=backend)
        results.append(_stored(pages))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_negative_slots_and_pages_write_nothing():
    """Padding that a captured step needs: how many tokens it appends and pages it seals can't change."""
    from questkv.kernels import triton

    case = build_case(0, Shape(page_size=3), [7, 4])
    before = [tensor.clone() for tensor in _stored(case.pages)]
    tokens = torch.ones(2, 2, 16)
    triton.append(case.pages, torch.tensor([-1, -1]), tokens, tokens)
    triton.seal(case.pages, torch.tensor([-1]))
    for tensor, old in zip(_stored(case.pages), before, strict=True):
        torch.testing.assert_close(tensor, old, rtol=0, atol=0, equal_nan=True)


def test_segments_that_lie_anywhere_are_found(triton_backend):
    """Views into one tensor at odd offsets: rows don't start at multiples of 16 bytes."""
    from questkv.kernels.triton.storage import storage_of

    shape = Shape(kv_heads=1, group=2, head_dim=33, page_size=1, dtype=torch.float16)
    case = build_case(0, shape, [40], segments=1)
    whole = case.pages.segments[0]
    cuts = [(0, 7), (7, 8), (8, whole.keys.shape[1])]
    parts = [
        PageSegment(*(t[:, a:b] for t in (whole.keys, whole.values, whole.boxes, whole.scales) if t is not None))
        for a, b in cuts
    ]
    pages = Pages(tuple(parts))
    assert storage_of(pages).unit == 1
    views = Case(**{**vars(case), "pages": pages})
    assert torch.equal(dense(*views.args, scale=1.0), dense(*case.args, scale=1.0))


# ------------------------------------------------------------------------------------------------- reading


@pytest.mark.slow
def test_select_agrees_with_the_reference_at_a_hundred_thousand_pages():
    scores = torch.randn(1, 2, 100_000)
    scores[0, 1] = scores[0, 1].mul(4).round()  # many ties
    args = (scores, torch.tensor([99_999]), torch.tensor([2048]))
    forced = {"sink_pages": 1, "recent_pages": 4}
    assert torch.equal(select(*args, **forced, backend="triton"), select(*args, **forced, backend="reference"))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bad_value_reaches_only_the_heads_that_read_its_page(triton_backend, bad, dtype):
    case = build_case(0, Shape(kv_heads=1, group=3, page_size=3, dtype=dtype), [17])
    page = case.tables[0][2]
    read_page(case.pages, page, "values")[0, 1, 5] = bad
    out = attend(*case.args, torch.tensor([[[0, 2], [0, 1], [2, 3]]]), scale=1.0)[0]
    read_page(case.pages, page, "values")[0, 1, 5] = 0
    without = attend(*case.args, torch.tensor([[[0, 2], [0, 1], [2, 3]]]), scale=1.0)[0]
    assert out.isfinite().all(dim=1).tolist() == [False, True, False]
    assert torch.equal(out[1], without[1])


def test_values_in_float16_whose_steps_are_large_overflow_nothing(triton_backend):
    case = build_case(3, Shape(kv_heads=1, group=2, page_size=16, dtype=torch.float16), [16 * 5 + 3])
    for segment in case.pages.segments:
        segment.values.mul_(12_000)
    large = code_pages(Case(**{**vars(case), "values": [v * 12_000 for v in case.values]}), share=0.6)
    steps = [s.value_scales for s in large.pages.segments if s.value_scales is not None]
    assert max(float(step[..., 0].nan_to_num(0).max()) for step in steps) > 100
    out = dense(*large.args, scale=large.scale)
    expected = dense(*large.args, scale=large.scale, backend="reference")
    assert bool(out.isfinite().all())
    # Weights go in with 22 bits, so what is left is the rounding of two outputs to float16.
    assert bool(((out - expected).abs() <= 2.0**-10 * expected.abs().clamp(min=12_000 * 2.0**-10)).all())


# ------------------------------------------------------------------------------------------------- CUDA graphs


class _NoReading(TorchDispatchMode):
    """Refuses what would have the host wait for a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value is read back"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any]]]:
    """Names and grids of the kernels that were launched."""
    from triton.runtime.interpreter import InterpretedFunction

    made: list[tuple[str, Any]] = []
    run = InterpretedFunction.run

    def recorded(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        made.append((self.__name__, grid))
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", recorded)
    return made


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches are recorded in the interpreter")
@pytest.mark.parametrize("group", GROUP_RULES)
def test_a_step_launches_the_same_whatever_the_lengths_and_reads_nothing_back(launches, triton_backend, group):
    from questkv.kernels import triton

    case = build_case(0, Shape(page_size=3, group=2), [40, 31])
    read = torch.zeros(2, dtype=torch.int64)
    made = []
    for lengths, counts in (([40, 31], [5, 4]), ([2, 31], [5, 40]), ([1, 1], [0, 0])):
        args = (case.q, case.pages, case.page_table, torch.tensor(lengths), torch.tensor(counts))
        step = (case.q, case.pages, Rows(*args[2:]), Softmax(case.scale), Scoring(0.5, group, 1, 1))
        with _NoReading():
            out = triton.decode(*step, None, read)
        made.append(launches.copy())
        launches.clear()
        expected = decode(*args, scale=case.scale, optimism=0.5, group=group, sink_pages=1, recent_pages=1)
        launches.clear()
        assert torch.equal(out, expected)
    assert made[0] == made[1] == made[2]


@pytest.mark.slow
def test_a_wide_page_table_gives_the_bits_of_a_narrow_one(triton_backend):
    """The table of a captured step is as wide as its capacity."""
    case = build_case(0, Shape(page_size=16, group=2), [300, 31])
    wide = torch.cat([case.page_table, torch.full((2, 200), -1)], dim=1)
    counts = torch.tensor([9, 1])
    rest = {"scale": case.scale, "sink_pages": 1, "recent_pages": 1}
    q, pages, table, lengths = case.args
    assert torch.equal(
        decode(q, pages, wide, lengths, counts.clamp(min=2), **rest),
        decode(q, pages, table, lengths, counts.clamp(min=2), **rest),
    )
    assert torch.equal(dense(q, pages, wide, lengths, scale=1.0), dense(q, pages, table, lengths, scale=1.0))


# ------------------------------------------------------------------------------------------------- who may ask


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find(name))


def test_auto_on_a_gpu_is_triton_and_never_the_reference(monkeypatch):
    assert dispatch.automatic(torch.device("cuda", 1)) == "triton"
    assert dispatch.automatic(torch.device("meta")) == "reference"


def test_without_the_package_a_gpu_is_told_what_to_install(without_triton):
    message = r"^\[kernels\] backend: expected the package triton .*pip install 'questkv\[triton\]'"
    with pytest.raises(MissingPackageError, match=message):
        dispatch.automatic(torch.device("cuda"))
    with pytest.raises(MissingPackageError, match=message):
        dispatch.resolve("triton", torch.device("cuda"))
    assert "triton" not in dispatch.available_backends()
    assert dispatch.automatic(torch.device("cpu")) in ("native", "reference")


@pytest.mark.slow
def test_on_the_cpu_it_works_only_interpreted():
    code = (
        "import torch; from questkv.kernels import select; n = torch.ones(1, dtype=torch.int64)\n"
        "try: select(torch.zeros(1, 1, 2), n, n, backend='triton')\n"
        "except ValueError as error: print(error)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.startswith("[kernels] backend: expected tensors on a GPU for 'triton' ")
    assert done.stdout.endswith(", got cpu\n")


def test_append_takes_strided_tokens(triton_backend):
    case = build_case(0, Shape(kv_heads=2, head_dim=8, page_size=3), [7])
    tokens = torch.randn(2, 8, 2, 2).transpose(1, 3)  # the channels' stride isn't 1
    append(case.pages, torch.tensor([0, 4]), tokens[0], tokens[1])
    assert read_page(case.pages, 1, "keys")[:, 1].tolist() == tokens[0, 1].tolist()
