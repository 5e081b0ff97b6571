"""A results folder: what a run leaves, what a killed one leaves, and who may go on with it."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from questkv.errors import ConfigError, ResultsError
from questkv.evaluate.results import Results, folder_name, prepare_folder, read_results

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


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder", encoding="utf-8")
    for folder in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(ResultsError, match=f"results {tmp_path}/file.*: (File exists|Not a directory)"):
            prepare_folder(folder)
    with pytest.raises(ResultsError, match=r"expected a folder with run\.json and rows\.jsonl, got none"):
        read_results(tmp_path)
