"""The whole run: every kernel checked, then timed, within a time that is set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from questkv.benchmark.attention import Row
from questkv.benchmark.gpu import report
from questkv.benchmark.gpu.attention import GpuAttention, layers_that_fit
from questkv.benchmark.gpu.cases import Case, Inputs
from questkv.benchmark.gpu.checks import check_select, compare
from questkv.benchmark.gpu.findings import Finding
from questkv.benchmark.gpu.graphs import check_graph
from questkv.benchmark.gpu.machine import Machine
from questkv.benchmark.gpu.offload import bus_gb_per_s, check_offload
from questkv.benchmark.gpu.operators import call_operators, poisoned_outputs
from questkv.benchmark.gpu.plan import Plan, Point
from questkv.benchmark.report import attention_table

Say = Callable[[object], None]
SELECT_WIDTHS = (64, 1000, 16384, 100_000)
# Of the GPU, for one point's graphs.
_SECONDS_A_POINT = 1.0


class Checks:
    """Checks every kernel on every case, and says what it finds.

    Args:
        machine: What they run on.
        seed: Of their inputs.
        say: Takes a line.
        backend: Whose.

    Attributes:
        done: Cases that were checked.
        left: Cases for which there was no time.
        wrong: What was wrong, a line each.
    """

    def __init__(self, machine: Machine, seed: int, say: Say, backend: str = "triton") -> None:
        self.machine, self.seed, self.say, self.backend = machine, seed, say, backend
        self.done: list[str] = []
        self.left: list[str] = []
        self.wrong: list[str] = []
        self._operator = ""

    def run(self, cases: Sequence[Case], widths: tuple[int, ...], until: float) -> None:
        """Check `select` alone on many pages, every case, then pages in host memory, while there is time."""
        device = self.machine.device
        todo: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
            ("select", lambda: check_select(device, self.seed, widths, self.backend)),
            *((str(case), lambda case=case: self._case(case)) for case in cases),
            ("pages in host memory", self._offload),
        ]
        for name, check in todo:
            if self.machine.now() > until:
                self.left.append(name)
                continue
            self._operator = "select"
            try:
                with poisoned_outputs():
                    found = list(check())
            # Whatever a kernel dies of is what was looked for.
            except Exception as failure:
                self._report(name, f"{self._operator}: failed: {_one_line(failure)}")
                continue
            for one in found:
                if not one.ok:
                    self._report(name, f"{one.kernel}: {one.what}: off by {one.error:.2e}, allowed {one.allowed:.2e}")
            self.done.append(name)
            if all(one.ok for one in found):
                self.say(f"right   {name}: {len(found)} comparisons{_largest(found)}")
        if self.left:
            self.say(f"no time to check: {'; '.join(self.left)}")

    def _case(self, case: Case) -> Iterator[Finding]:
        inputs, again = (Inputs(case, self.seed, self.machine.device, self.backend) for _ in range(2))
        results = call_operators(inputs, self._entering)
        self._entering("decode in a graph")
        yield from compare(inputs, results)
        yield from check_graph(again, results, self.machine)

    def _offload(self) -> Iterator[Finding]:
        self._entering("transfer")
        yield from check_offload(self.machine.device, self.seed, self.backend)

    def _entering(self, operator: str) -> None:
        # What the operator before did wrong on the GPU is raised here.
        self.machine.synchronize()
        self._operator = operator

    def _report(self, name: str, what: str) -> None:
        self.wrong.append(f"{name}: {what}")
        self.say(f"WRONG   {self.wrong[-1]}")

    def as_json(self) -> dict[str, Any]:
        """What was checked and found."""
        return {"checked": self.done, "not_checked": self.left, "wrong": self.wrong}


def _one_line(failure: Exception) -> str:
    lines = str(failure).strip().splitlines() or [""]
    return f"{type(failure).__name__}: {lines[0][:300]}"


def _largest(found: list[Finding]) -> str:
    """The largest share of what an output may differ that one did."""
    shares = [one.error / one.allowed for one in found if one.kernel in ("attend", "decode", "dense") and one.allowed]
    return f", outputs off by {max(shares):.0%} of what is allowed at most" if shares else ""


class Timings:
    """Times every point of a plan while there is time and memory.

    Attributes:
        results: Rows of every point.
        notes: What was left out, and why.
        at: The point that is timed.
        bus_gb_per_s: Of pages in host memory, None before it is known.
    """

    def __init__(self, machine: Machine, plan: Plan, say: Say) -> None:
        self.machine, self.plan, self.say = machine, plan, say
        self.results: dict[Point, list[Row]] = {}
        self.notes: list[str] = []
        self.at: Point | None = None
        self.bus_gb_per_s: float | None = None
        self._spent: list[float] = []
        self._said: set[str] = set()

    def run(self, until: float, after: Callable[[], None]) -> None:
        """Time the points in order; `after` is called behind each.

        Raises:
            DisagreementError: One of our results is wrong.
            RuntimeError: One of our kernels failed.
        """
        flex = set(self.plan.presets) if self.plan.with_flex else set()
        for point in self.plan.points():
            self.at, started = point, self.machine.now()
            # The points before tell how long one takes; the first of each preset compiles flex_attention.
            if started + 1.5 * max(self._spent[-3:], default=0.0) > until:
                self._note(f"{point}: not timed: no time")
                continue
            layers = layers_that_fit(point.shape, self.plan.config, point.context, self.machine)
            if not layers:
                self._note(f"{point}: not timed: no memory")
                continue
            try:
                rows = self._rows(point, layers, point.preset in flex, until)
            except torch.OutOfMemoryError:
                self._note(f"{point}: not timed: memory ran out")
                continue
            flex.discard(point.preset)
            self._spent.append(self.machine.now() - started)
            self.results[point] = rows
            self.say(f"{point}: {report.sentence(report.summary(point, rows))}")
            after()

    def _rows(self, point: Point, layers: int, with_flex: bool, until: float) -> list[Row]:
        measured = GpuAttention(
            point.shape, self.plan.config, point.context, self.machine, layers=layers, with_flex=with_flex
        )
        rows = measured.measure_until(_SECONDS_A_POINT, until)
        for note in measured.notes:
            self.notes.append(f"{point}: {note}")
            # The same one at every point is said once.
            if note not in self._said:
                self.say(self.notes[-1])
            self._said.add(note)
        return rows

    def _note(self, note: str) -> None:
        self.notes.append(note)
        self.say(note)


def run(
    plan: Plan,
    machine: Machine,
    cases: Sequence[Case],
    say: Say,
    *,
    started: float,
    json: str | None = None,
    plot: str | None = None,
    widths: tuple[int, ...] = SELECT_WIDTHS,
) -> int:
    """Check, then time.

    Args:
        plan: What to do.
        machine: What to do it on.
        cases: To check.
        say: Takes lines and tables.
        started: When the time began to count, on the machine's clock.
        json: Where results are written, behind every point.
        plot: Where figures are drawn.
        widths: Pages that `select` is checked with.

    Returns:
        0, or 1 where something is wrong; nothing is timed then.
    """
    checks, timings = Checks(machine, plan.seed, say, plan.config.backend), Timings(machine, plan, say)

    def write() -> None:
        if json is not None and json != "-":
            report.write_json(json, values())

    def values() -> dict[str, Any]:
        return report.as_json(plan, machine.describe(), checks.as_json(), timings.results, timings.notes) | {
            "host_pages_gb_per_s": timings.bus_gb_per_s
        }

    checks.run(cases, widths, started + plan.check_seconds)
    write()
    failed = bool(checks.wrong)
    if plan.timings and not failed:
        try:
            with torch.inference_mode():
                timings.bus_gb_per_s = bus_gb_per_s(machine, plan.config.backend)
                say(f"pages in host memory come at {timings.bus_gb_per_s:.1f} GB/s")
                timings.run(started + plan.seconds, write)
        # A wrong result, or whatever a kernel dies of: both are what this looks for.
        except Exception as failure:
            say(f"WRONG   {timings.at}: {_one_line(failure)}")
            failed = True
    for preset, shape, rows in report.grouped(timings.results):
        say(attention_table(rows, report.title(shape, preset, plan)))
    write()
    if json == "-":
        report.write_json(json, values())
    if plot is not None and timings.results:
        say(f"figures: {', '.join(report.plot(plot, plan, timings.results))}")
    return int(failed)
