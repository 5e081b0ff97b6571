"""A results folder: what a run leaves, what a killed one leaves, and who may go on with it."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from questkv.errors import ConfigError, ResultsError
from questkv.evaluate.results import Results, check_folder, check_rows, folder_name, read_results

RUN: dict[str, Any] = {
    "task": "passkey",
    "settings": {"lengths": (500,), "seed": 0},
    "environment": {"torch": "2.13", "cpu": "a CPU", "threads": 2},
}


def row(sample: str, method: str = "full", budget: int | None = None) -> dict[str, Any]:
    return {"sample": sample, "method": method, "budget": budget, "score": 1.0}


def fill(folder: Path, *samples: str) -> None:
    with Results.open(folder, RUN, resume=True) as results:
        for sample in samples:
            results.add(row(sample))


def test_a_row_is_on_the_disk_as_soon_as_it_is_added(tmp_path: Path) -> None:
    with Results.open(tmp_path / "a" / "b", RUN, resume=False) as results:
        results.add(row("0"))
        run, rows = read_results(tmp_path / "a" / "b")
    assert run == json.loads(json.dumps(RUN))
    assert rows == [row("0")]


@pytest.mark.parametrize("torn", [b'{"sample": "2", "meth', b'{"sample": "2"', b"\0\0\0\0", b"\0\0\0\n", b"{"])
def test_a_torn_last_line_is_cut_off_and_the_next_row_stands_alone(tmp_path: Path, torn: bytes) -> None:
    fill(tmp_path, "0", "1")
    whole = (tmp_path / "rows.jsonl").read_bytes()
    (tmp_path / "rows.jsonl").write_bytes(whole + torn)
    assert [found["sample"] for found in read_results(tmp_path)[1]] == ["0", "1"]
    with Results.open(tmp_path, RUN, resume=True) as results:
        assert [found["sample"] for found in results.rows] == ["0", "1"]
        assert results.is_done("1", "full", None)
        assert not results.is_done("2", "full", None)
        assert not results.is_done("1", "quest", 64)
        results.add(row("2"))
    assert (tmp_path / "rows.jsonl").read_bytes() == whole + json.dumps(row("2")).encode() + b"\n"


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    fill(tmp_path, "0")
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(rows.read_bytes() + b"oops\n" + json.dumps(row("1")).encode() + b"\n")
    with (
        pytest.raises(ResultsError, match=r"rows.jsonl: line 2 is no row; the file was changed"),
        Results.open(tmp_path, RUN, resume=True),
    ):
        pass


def test_finished_rows_are_neither_overwritten_nor_mixed_with_another_run(tmp_path: Path) -> None:
    fill(tmp_path, "0")
    with (
        pytest.raises(ResultsError, match="holds 1 finished rows; continue with --resume, or choose another --output"),
        Results.open(tmp_path, RUN, resume=False),
    ):
        pass
    other = {**RUN, "settings": {"lengths": (500,), "seed": 1}}
    with (
        pytest.raises(ConfigError, match=r"--resume: expected the run that .* holds, with settings.seed = 0, got 1"),
        Results.open(tmp_path, other, resume=True),
    ):
        pass
    assert read_results(tmp_path)[1] == [row("0")]


def test_another_machine_may_continue_and_another_version_may_not(tmp_path: Path) -> None:
    fill(tmp_path, "0")
    moved = {**RUN, "environment": {"torch": "2.13", "cpu": "another", "threads": 8}}
    with Results.open(tmp_path, moved, resume=True) as results:
        assert len(results.rows) == 1
    assert folder_name(moved) == folder_name(RUN)
    newer = {**RUN, "environment": {"torch": "2.14", "cpu": "a CPU", "threads": 2}}
    with (
        pytest.raises(ConfigError, match=r'environment.torch = "2.13", got "2.14"'),
        Results.open(tmp_path, newer, resume=True),
    ):
        pass
    assert folder_name(newer) != folder_name(RUN)


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    with (
        Results.open(tmp_path, RUN, resume=False),
        pytest.raises(ResultsError, match="another run is writing there"),
        Results.open(tmp_path, RUN, resume=True),
    ):
        pass


def test_a_full_disk_keeps_the_rows_before(tmp_path: Path) -> None:
    fill(tmp_path, "0")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Results.open(tmp_path, RUN, resume=True) as results:
        # room for a part of the next line only
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "rows.jsonl").stat().st_size + 10, hard))
        try:
            with pytest.raises(ResultsError, match=r"File too large; the rows before are kept: make room") as error:
                results.add(row("1"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "\n" not in str(error.value)
        results.add(row("2"))
    assert [found["sample"] for found in read_results(tmp_path)[1]] == ["0", "2"]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("held", "says"),
    [
        ({"run.json": b"make run\n"}, "run.json: was not written by questkv eval"),
        ({"run.json": b'{"name": "mine"}'}, "run.json: was not written by questkv eval"),
        ({"run.json": b"[" * 100_000}, "run.json: was not written by questkv eval"),
        ({"run.json": b"[]", "rows.jsonl": b'{"a": 1}\n'}, "run.json: was not written by questkv eval"),
        ({"rows.jsonl": b"my only copy"}, "got one with rows.jsonl"),
        ({"rows.jsonl": b'{"sample": "0"}\n'}, "got one with rows.jsonl"),
        ({"rows.jsonl": b"", "thesis.txt": b"words"}, "got one with rows.jsonl"),
        ({"thesis.txt": b"words"}, "got one with thesis.txt; choose another --output"),
        ({".hidden": b"words"}, "got one with .hidden"),
    ],
)
def test_a_folder_of_something_else_is_refused_and_left_as_it_is(
    tmp_path: Path, held: dict[str, bytes], says: str
) -> None:
    for name, raw in held.items():
        (tmp_path / name).write_bytes(raw)
    for resume in (False, True):
        with pytest.raises(ResultsError) as refused, Results.open(tmp_path, RUN, resume=resume):
            pass
        assert says in str(refused.value)
        with pytest.raises(ResultsError) as unprepared:
            check_folder(tmp_path)
        assert says in str(unprepared.value)
        assert content(tmp_path) == held


def test_what_a_run_leaves_that_was_killed_as_it_began_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / ".questkv-partial-abc").write_bytes(b'{"task"')
    fill(tmp_path, "0")
    assert read_results(tmp_path)[1] == [row("0")]


def test_other_files_beside_a_runs_results_are_nobodys_business(tmp_path: Path) -> None:
    fill(tmp_path, "0")
    (tmp_path / "table.md").write_text("a table", encoding="utf-8")
    fill(tmp_path, "1")
    assert [found["sample"] for found in read_results(tmp_path)[1]] == ["0", "1"]
    assert (tmp_path / "table.md").read_text(encoding="utf-8") == "a table"


@pytest.mark.parametrize(
    "line",
    [
        {"sample": "1", "method": "full", "budget": None},
        {"sample": "1", "method": "full", "score": 1.0},
        {"sample": 1, "method": "full", "budget": None, "score": 1.0},
        {"sample": ["1"], "method": "full", "budget": None, "score": 1.0},
        {"sample": "1", "method": {}, "budget": None, "score": 1.0},
        {"sample": "1", "method": "full", "budget": "64", "score": 1.0},
        {"sample": "1", "method": "full", "budget": True, "score": 1.0},
        {"sample": "1", "method": "full", "budget": None, "score": "1"},
        {"sample": "1", "method": "full", "budget": None, "score": None},
        ["1", "full", None, 1.0],
        "1",
        None,
    ],
)
def test_an_incomplete_row_is_named(tmp_path: Path, line: Any) -> None:
    fill(tmp_path, "0")
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(rows.read_bytes() + json.dumps(line).encode() + b"\n" + json.dumps(row("2")).encode() + b"\n")
    before = content(tmp_path)
    with pytest.raises(ResultsError, match="line 2 is no row; the file was changed"):
        read_results(tmp_path)
    with pytest.raises(ResultsError, match="line 2 is no row"), Results.open(tmp_path, RUN, resume=True):
        pass
    assert content(tmp_path) == before


def test_a_repeated_row_is_not_counted_twice(tmp_path: Path) -> None:
    fill(tmp_path, "0", "1")
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(rows.read_bytes() + json.dumps({**row("0"), "score": 0.0}).encode() + b"\n")
    says = r"line 3 repeats line 1 \(sample 0, method full, budget None\)"
    with pytest.raises(ResultsError, match=says):
        read_results(tmp_path)
    with pytest.raises(ResultsError, match=says), Results.open(tmp_path, RUN, resume=True):
        pass


def test_rows_of_another_plan_or_without_what_its_tables_need_are_named(tmp_path: Path) -> None:
    def fields(budget: int | None) -> tuple[str, ...]:
        return ("length",) if budget is None else ("length", "nll")

    runs: list[tuple[str, int | None]] = [("full", None), ("quest", 64)]
    good = [{**row("0"), "length": 5}, {**row("0", "quest", 64), "length": 5, "nll": [1.0]}]
    check_rows(good, tmp_path, ["0"], runs, fields)
    for bad, says in (
        ({**row("9"), "length": 5}, r"line 3 is no row of this run \(sample 9, method full, budget None\)"),
        (
            {**row("0", "quest", 128), "length": 5},
            r"line 3 is no row of this run \(sample 0, method quest, budget 128\)",
        ),
        (row("0"), "line 3 lacks length"),
        (row("0", "quest", 64), "line 3 lacks length, nll"),
    ):
        with pytest.raises(ResultsError, match=says):
            check_rows([*good, bad], tmp_path, ["0"], runs, fields)


def test_a_name_that_is_no_text_can_be_kept(tmp_path: Path) -> None:
    run = {**RUN, "settings": {"text": {"name": "a\udcff.txt"}}}
    with Results.open(tmp_path, run, resume=False) as results:
        results.add(row("a\udcff"))
    assert read_results(tmp_path) == (json.loads(json.dumps(run)), [row("a\udcff")])


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder", encoding="utf-8")
    for folder in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(ResultsError, match=f"results {tmp_path}/file.*: (File exists|Not a directory)"):
            check_folder(folder)
    with pytest.raises(ResultsError, match=r"expected a folder with run\.json and rows\.jsonl, got none"):
        read_results(tmp_path)


def test_a_folder_that_is_looked_at_is_not_left_behind(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for folder in (tmp_path / "there", tmp_path / "new", tmp_path / "there" / "a" / "b"):
        check_folder(folder)
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "there"]
