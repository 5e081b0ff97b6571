"""The GPU's checks, on the CPU: what is right passes and what is wrong is named, on the reference and interpreted."""

from __future__ import annotations

import dataclasses
import importlib.util
import math

import pytest
import torch

from benchmark.gpu_cases import TINY, FakeMachine
from interpreter import patch_once
from questkv import QuestConfig
from questkv.benchmark.gpu import formulas, offload
from questkv.benchmark.gpu.cases import CASES, Case, Inputs
from questkv.benchmark.gpu.findings import finding
from questkv.benchmark.gpu.operators import poisoned_outputs
from questkv.benchmark.gpu.plan import Plan
from questkv.benchmark.gpu.run import Checks, run
from questkv.kernels import Pages, reference
from questkv.pages import geometry

WIDTHS = (16, 64, 1100)
HOST = "pages in host memory"
LATER = math.inf


@pytest.fixture(autouse=True)
def _host_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "_host_without_gpu", True)


def check(cases: tuple[Case, ...], backend: str = "reference", seed: int = 0) -> Checks:
    checks = Checks(FakeMachine(), seed, lambda line: None, backend)
    checks.run(cases, WIDTHS, LATER)
    return checks


@pytest.mark.slow
def test_the_reference_is_right_on_every_case() -> None:
    cases = (*TINY, *(dataclasses.replace(case, pages=14) for case in CASES))
    checks = check(cases)
    assert checks.wrong == []
    assert checks.done == ["select", *map(str, cases), HOST]
    assert checks.left == []


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton isn't installed")
def test_the_kernels_are_right_under_the_interpreter() -> None:
    patch_once()
    checks = check(tuple(dataclasses.replace(case, pages=10) for case in TINY[:3]), "triton", seed=1)
    assert checks.wrong == []
    assert len(checks.done) == 5


def test_the_cases_hold_what_the_kernels_must_handle() -> None:
    assert {case.dtype for case in CASES} == {"float32", "bfloat16", "float16"}
    assert {1, 4, 7, 8} <= {case.group for case in CASES}
    assert {case.dtype for case in CASES if case.coded} == {"float32", "bfloat16", "float16"}
    assert {case.rule for case in CASES if case.coded} == {"mean", "softmax_mean", "per_head"}
    inputs = Inputs(TINY[0], 3, torch.device("cpu"))
    assert inputs.lengths[:3] == [1, 4, 5]
    assert inputs.lengths[3] < inputs.lengths[4]
    assert bool(inputs.keys[3].isnan().any())
    for segment in inputs.pages.segments:
        assert bool(segment.keys.isnan().all())
        assert bool(segment.values.isnan().all())


def test_another_seed_gives_other_inputs() -> None:
    one, other, again = (Inputs(TINY[0], seed, torch.device("cpu")) for seed in (1, 2, 1))
    assert not torch.equal(one.q, other.q)
    assert torch.equal(one.q, again.q)
    assert torch.equal(one.page_table, again.page_table)


def test_what_is_allocated_is_poisoned() -> None:
    with poisoned_outputs():
        floats, ints = torch.empty(3), torch.empty(3, dtype=torch.int64)
    assert bool(floats.isnan().all())
    assert bool((ints == 2**63 - 1).all())
    assert not torch.are_deterministic_algorithms_enabled()


def off_by(operator: str, patch: pytest.MonkeyPatch) -> None:
    """Make one operator of the reference wrong, a little and in one place."""
    right = getattr(reference, operator)

    def wrong(*args: object) -> object:
        result = right(*args)
        if operator == "append":
            pages, slots = args[:2]
            pages.segments[0].keys[0, int(slots[0]) // pages.page_size, 0, 0] = 9.0
        elif operator == "seal":
            args[0].segments[0].boxes[:, args[1][0], 0] += 1
        elif operator == "select":
            result[-1, 0, 0] += 1
        else:
            result[-1, 0, 0] += 0.05
        return result

    patch.setattr(reference, operator, wrong)


@pytest.mark.parametrize("operator", ["append", "seal", "estimate", "select", "attend", "dense", "decode"])
def test_a_wrong_kernel_is_named_with_its_case_and_error(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("float32", 16, 2, 1, page_size=4, pages=16)
    off_by(operator, monkeypatch)
    said: list[str] = []
    plan = Plan((), (), (), "float32", QuestConfig(backend="reference"), 1e9, 0)
    code = run(plan, FakeMachine(), (case,), lambda line: said.append(str(line)), started=0.0, widths=WIDTHS)
    assert code == 1
    wrong = [line for line in said if line.startswith("WRONG")]
    assert any(f"{case}: {operator}: " in line and "off by" in line for line in wrong)


@pytest.mark.parametrize("operator", ["append", "seal", "estimate", "select", "attend", "dense", "decode"])
def test_a_kernel_that_fails_is_named(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("an illegal memory access\nand more")

    monkeypatch.setattr(reference, operator, fail)
    checks = Checks(FakeMachine(), 0, lambda line: None, "reference")
    checks.run(TINY[:1], (), LATER)
    # Pages in host memory are scored and written by the same operators.
    wrong = [line for line in checks.wrong if not line.startswith(HOST)]
    assert wrong == [f"{TINY[0]}: {operator}: failed: RuntimeError: an illegal memory access"]


def test_a_token_that_is_left_out_is_seen() -> None:
    gen = torch.Generator().manual_seed(0)
    q, keys, values = (torch.randn(*shape, 64, generator=gen) for shape in ((2,), (1, 3000), (1, 3000)))
    seen = torch.ones(2, 3000, dtype=torch.bool)
    out, bound = formulas.attention(q, keys, values, seen, 0.125, coded=False)
    seen[:, 1234] = False
    without, _ = formulas.attention(q, keys, values, seen, 0.125, coded=False)
    assert finding("attend", "", out.float(), out, bound).ok
    assert not finding("attend", "", without.float(), out, bound).ok


def test_selection_takes_the_lower_page_where_scores_are_equal() -> None:
    scores = torch.tensor([[0.0, 5.0, 2.0, 2.0, math.nan, 2.0, 0.0, 0.0]])
    assert formulas.chosen(scores, 5, 1, 1).tolist() == [[0, 1, 2, 4, 7]]
    assert formulas.chosen(scores, 6, 1, 1).tolist() == [[0, 1, 2, 3, 4, 7]]


def test_findings_want_nan_and_infinity_in_the_same_places() -> None:
    one = torch.tensor([1.0, math.nan, math.inf])
    assert finding("k", "w", one, one.clone()).ok
    assert not finding("k", "w", one, torch.tensor([1.0, 2.0, math.inf]), 10.0).ok
    assert not finding("k", "w", one, torch.tensor([1.0, math.nan, -math.inf]), 10.0).ok
    near = finding("k", "w", one, torch.tensor([1.25, math.nan, math.inf]), torch.tensor([0.2, 0.0, 0.0]))
    assert (near.ok, near.error) == (False, 0.25)
    assert not finding("k", "w", one, one[:2]).ok


def test_what_there_is_no_time_for_is_said() -> None:
    said: list[str] = []
    checks = Checks(FakeMachine(), 0, lambda line: said.append(str(line)), "reference")
    checks.run(TINY[:2], (), until=1.0)  # the clock says 0, 1 and 2
    assert checks.done == ["select", str(TINY[0])]
    assert checks.left == [str(TINY[1]), HOST]
    assert said[-1] == f"no time to check: {TINY[1]}; {HOST}"


@pytest.mark.parametrize("place", [0, -1])
def test_a_page_that_came_wrong_from_host_memory_is_named(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference.transfer

    def wrong(source: object, page_ids: torch.Tensor, target: Pages, into: torch.Tensor) -> None:
        right(source, page_ids, target, into)
        copied = (page_ids[0] >= 0).nonzero().flatten()
        if len(copied):
            target.segments[-1].keys[0, int(into[0, copied[place]]) - target.starts[-2], 0, 0] = 2

    monkeypatch.setattr(reference, "transfer", wrong)
    checks = check(())
    assert checks.wrong
    assert all(line.startswith(f"{HOST}: transfer: ") and "attention: off by" in line for line in checks.wrong)


def test_the_bus_is_timed_by_the_bytes_of_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_TIMED_PAGES", 10)
    machine = FakeMachine(milliseconds=[5.0, 2.0, 4.0, 3.0, 6.0])
    # Of eight heads: keys and values, 16 tokens of 128 16-bit channels, two bounds of 128 bytes and their scale.
    assert offload.bus_gb_per_s(machine, "reference") == pytest.approx(10 * 8 * (2 * 16 * 256 + 260) / 2e6)
