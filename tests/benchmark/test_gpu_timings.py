"""The GPU's timings, on the CPU with a clock that says what it is told: what is timed, in what order, until when."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark.gpu_cases import TINY, FakeMachine
from interpreter import patch_once
from questkv import QuestConfig
from questkv.benchmark import peers as torch_peers
from questkv.benchmark.attention import DENSE, PARTS, SPARSE, DisagreementError, Row
from questkv.benchmark.gpu import attention, offload, report
from questkv.benchmark.gpu.attention import EAGER, GpuAttention, layers_that_fit
from questkv.benchmark.gpu.compiling import compile_ahead
from questkv.benchmark.gpu.plan import Plan, Point
from questkv.benchmark.gpu.run import Timings, run
from questkv.benchmark.shapes import PRESETS, Shape
from questkv.pages import geometry

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton isn't installed")
SHAPE = Shape(heads=2, kv_heads=1, head_dim=16, batch=2, dtype="float32")
CONFIG = QuestConfig(token_budget=32, page_size=8, sink_tokens=8, recent_tokens=8, backend="triton")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> GpuAttention:
    patch_once()
    monkeypatch.setattr(attention, "_FEWEST_STEPS", 1)
    return GpuAttention(SHAPE, CONFIG, 64, FakeMachine(milliseconds=[2.0]), layers=1)


@needs_triton
def test_everything_is_checked_captured_and_timed_in_turn(measured: GpuAttention) -> None:
    rows = measured.measure_until(seconds=0.001, until=0.0)
    names = [row.name for row in rows]
    assert names[:2] == [SPARSE, DENSE]
    assert {"torch-matmul", *PARTS, SPARSE + EAGER, DENSE + EAGER} <= set(names)
    assert names[-2:] == ["memory-read", "memory-copy"]
    graphs = len(rows) - 2
    assert measured.machine.captured == graphs
    # Three turns of the graphs and three of the eager steps; the first of each turn is called once more before it.
    assert measured.machine.timed == [graphs + 1] * 3 + [3] * 3
    assert all(row.median_ms == row.min_ms == 2.0 for row in rows)
    errors = {row.name: row.max_error for row in rows}
    assert max(errors.values()) < 1e-5
    assert any(note.startswith("torch-sdpa-cudnn: not timed: RuntimeError: ") for note in measured.notes)
    by_name = {row.name: row for row in rows}
    assert by_name[DENSE].gb_per_s == pytest.approx(2 * 2 * 64 * 16 * 4 / 2e-3 / 1e9)


@needs_triton
def test_a_wrong_result_of_ours_stops_the_timings(measured: GpuAttention, monkeypatch: pytest.MonkeyPatch) -> None:
    right = measured.decode
    monkeypatch.setattr(measured, "decode", lambda *args, **kwargs: right(*args, **kwargs) + 1e-3)
    with pytest.raises(DisagreementError, match=r"\[bench\] questkv-sparse: expected float64's output"):
        measured.measure_until(1.0, 0.0)
    assert measured.machine.timed == []


@needs_triton
def test_a_wrong_result_of_another_is_noted_and_not_timed(
    measured: GpuAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_peers, "matmul", lambda query, layer: torch.zeros_like(query))
    assert "torch-matmul" not in [candidate.name for candidate in measured.checked()]
    assert any(note.startswith("torch-matmul: not timed: DisagreementError") for note in measured.notes)


@needs_triton
@pytest.mark.parametrize(("group", "kv_dtype"), [("per_head", "model"), ("mean", "int8")])
def test_other_rules_and_eight_bits_are_right(group: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_once()
    monkeypatch.setattr(attention, "_FEWEST_STEPS", 1)
    config = dataclasses.replace(CONFIG, group=group, kv_dtype=kv_dtype)
    candidates = GpuAttention(SHAPE, config, 64, FakeMachine(), layers=1).checked()
    ours = [candidate for candidate in candidates if candidate.name.startswith("questkv")]
    assert len(ours) == (4 if kv_dtype == "int8" else 2)
    assert max(candidate.max_error for candidate in ours) < 1e-3


@pytest.fixture(autouse=True)
def _host_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "_host_without_gpu", True)
    monkeypatch.setattr(offload, "_TIMED_PAGES", 10)


def test_a_step_of_several_layers_counts_for_one() -> None:
    timed = attention.Timed(attention.Candidate("x", lambda q, x: None, 4_000_000), lambda: None, steps=4)
    measured = GpuAttention.__new__(GpuAttention)
    measured.context, measured.budget, measured.machine = 1, 1, FakeMachine(milliseconds=[9.0, 8.0, 9.0, 4.0])
    (row,) = measured._turns([timed], seconds=0.0, until=0.0)
    assert (row.median_ms, row.min_ms) == (2.0, 1.0)
    assert row.gb_per_s == pytest.approx(2.0)


def test_turns_go_on_for_their_seconds_or_until_the_time_is_over() -> None:
    measured = GpuAttention.__new__(GpuAttention)
    measured.context, measured.budget = 1, 1
    timed = attention.Timed(attention.Candidate("x", lambda q, x: None, 1), lambda: None)
    for seconds, until, turns in ((0.01, 1e9, 10), (1e9, 3.5, 7), (0.0, 1e9, 3)):
        measured.machine = FakeMachine()  # the clock says 0 after three turns, and one more after each
        measured._turns([timed], seconds, until)
        assert len(measured.machine.timed) == turns


def test_layers_are_as_many_as_no_cache_holds_and_the_memory_does() -> None:
    machine = FakeMachine(free_bytes=140 * 10**9)
    machine.cache_bytes = 50 * 2**20
    shape, config = PRESETS["llama2-7b"], QuestConfig()
    boxes = 2048 * 32 * 260
    assert layers_that_fit(shape, config, 32768, machine) == -(-3 * machine.cache_bytes // boxes) == 10
    # One of 69 GB and its boxes fits, and is more than any cache holds.
    large = dataclasses.replace(shape, batch=16)
    assert layers_that_fit(large, config, 262144, machine) == 1
    small = FakeMachine(free_bytes=24 * 10**9)
    small.cache_bytes = machine.cache_bytes
    assert layers_that_fit(large, config, 262144, small) == 0


def plan(**changes: Any) -> Plan:
    values = {
        "presets": ("llama2-7b", "llama3-8b"),
        "contexts": (8192, 32768),
        "batches": (4, 1),
        "dtype": "float16",
        "config": CONFIG,
        "seconds": 1e9,
        "seed": 0,
    }
    return Plan(**{**values, **changes})


def test_what_tells_most_is_timed_first() -> None:
    points = plan().points()
    assert [str(point) for point in points[:3]] == [
        "llama2-7b, 32,768 tokens, batch 1",
        "llama3-8b, 32,768 tokens, batch 1",
        "llama2-7b, 8,192 tokens, batch 1",
    ]
    assert len(points) == 8
    assert {point.shape.dtype for point in points} == {"float16"}


def some_rows(context: int) -> list[Row]:
    rates = {
        SPARSE: (0.02, 1000.0),
        DENSE: (0.2, 3000.0),
        "torch-sdpa-flash": (0.18, 3200.0),
        "torch-matmul": (0.9, 500.0),
        "estimate": (0.006, 2000.0),
        "select": (0.004, 10.0),
        "attend": (0.01, 2400.0),
        SPARSE + EAGER: (0.1, 200.0),
        DENSE + EAGER: (0.2, 3000.0),
        "memory-read": (0.3, 4000.0),
        "memory-copy": (0.6, 3900.0),
    }
    return [Row(name, context, 2048, ms, ms, rate, 0.0) for name, (ms, rate) in rates.items()]


def test_the_summary_compares_with_the_best_of_all_and_with_the_memory() -> None:
    line = report.summary(plan().points()[0], some_rows(32768))
    assert line["best_dense"] == "torch-sdpa-flash"
    assert line["speedup_over_dense"] == pytest.approx(10)
    assert line["speedup_over_best_dense"] == line["speedup_over_best_peer"] == pytest.approx(9)
    assert line["attend_share"] == pytest.approx(0.6)
    assert line["bandwidth_share"] == pytest.approx(0.75)
    words = report.sentence(line)
    assert words.startswith("sparse 20.0 us in a graph (100 eager), 10.00x over our dense, 9.00x over torch-sdpa-flash")
    assert "attend reads at 60% of the memory's 4,000 GB/s" in words


def rows_at_once(patch: pytest.MonkeyPatch, failing: Callable[[Point], None] = lambda point: None) -> None:
    def rows(self: Timings, point: Point, *args: object) -> list[Row]:
        failing(point)
        return some_rows(point.context)

    patch.setattr(Timings, "_rows", rows)


@pytest.mark.slow
def test_a_run_writes_rows_summaries_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    rows_at_once(monkeypatch)
    machine = FakeMachine(free_bytes=10**12)
    said: list[object] = []
    files = {"json": str(tmp_path / "gpu.json"), "plot": str(tmp_path / "gpu.svg")}
    assert run(plan(), machine, (), said.append, started=0.0, widths=(), **files) == 0
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert len(written["rows"]) == 8 * len(some_rows(1))
    assert written["rows"][0] == {
        "preset": "llama2-7b",
        "batch": 1,
        "dtype": "float16",
        **dataclasses.asdict(some_rows(32768)[0]),
    }
    assert len(written["by_context"]) == 8
    assert written["environment"]["gpu"] == "none"
    assert written["checks"] == {"checked": ["select", "pages in host memory"], "not_checked": [], "wrong": []}
    assert written["host_pages_gb_per_s"] > 0
    names = {f"gpu-{preset}-b{batch}.svg" for preset in ("llama2-7b", "llama3-8b") for batch in (1, 4)}
    assert names == {file.name for file in tmp_path.glob("*.svg")}


def test_points_without_memory_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(point: Point) -> None:
        if point.preset == "llama3-8b":
            raise torch.OutOfMemoryError("no")

    rows_at_once(monkeypatch, out_of_memory)
    machine = FakeMachine(free_bytes=20 * 10**9)
    timings = Timings(machine, plan(contexts=(32768, 262144), batches=(16,)), lambda line: None)
    timings.run(until=1e9, after=lambda: None)
    assert [str(point) for point in timings.results] == ["llama2-7b, 32,768 tokens, batch 16"]
    assert timings.notes == [
        "llama3-8b, 32,768 tokens, batch 16: not timed: memory ran out",
        "llama2-7b, 262,144 tokens, batch 16: not timed: no memory",
        "llama3-8b, 262,144 tokens, batch 16: not timed: no memory",
    ]


def test_points_without_time_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    rows_at_once(monkeypatch)
    timings = Timings(FakeMachine(free_bytes=10**12), plan(), lambda line: None)
    # The clock goes on by a second at each look, so every point takes one, and the fourth starts at 6.
    timings.run(until=7.0, after=lambda: None)
    assert len(timings.results) == 3
    assert [note.endswith("not timed: no time") for note in timings.notes] == [True] * 5


@pytest.mark.slow
def test_a_wrong_step_makes_the_run_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def disagree(point: Point) -> None:
        raise DisagreementError("[bench] questkv-sparse: expected x, got y")

    rows_at_once(monkeypatch, disagree)
    said: list[object] = []
    assert run(plan(), FakeMachine(10**12), (), said.append, started=0.0, widths=()) == 1
    assert said[-1] == (
        "WRONG   llama2-7b, 32,768 tokens, batch 1: DisagreementError: [bench] questkv-sparse: expected x, got y"
    )


@needs_triton
def test_kernels_are_compiled_ahead_and_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import JITFunction

    from questkv.benchmark.gpu import compiling

    asked: list[bool] = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, grid, warmup: asked.append(warmup))
    untouched = JITFunction.run
    monkeypatch.setattr(compiling, "_call", lambda case, device: JITFunction.run(None, case, grid=(1,), warmup=False))
    compile_ahead(TINY, torch.device("cpu"))
    assert asked == [True] * len(TINY)
    assert JITFunction.run is untouched


def test_without_a_gpu_the_script_says_so_and_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main = runpy.run_path(str(SCRIPT))["main"]
    assert main([]) == 0
    said = capsys.readouterr()
    assert said.out == "no GPU: PyTorch finds none here, so there is nothing to check or time\n"
    assert said.err == ""


@pytest.mark.parametrize("arguments", [["--dtype", "int4"], ["--contexts", "many"], ["--contexts", "0"]])
def test_bad_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(SCRIPT))["main"]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_a_run_that_hangs_is_ended() -> None:
    hang = "threading.Event().wait()"
    code = f"import runpy, threading; runpy.run_path({str(SCRIPT)!r})['stop_at'](0.0, ['right   select']); {hang}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "stopped after 0 s, behind: right   select\n"
