"""A folder of results: ``run.json`` says what was run, ``rows.jsonl`` gets one line per finished sample, at once.

A run that is killed leaves whole lines and at most one torn one at the end, which the next run cuts off. A folder that
holds something else is refused and left as it is.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from questkv.errors import ConfigError, ResultsError
from questkv.evaluate.task import Row
from questkv.files import PARTIAL, encoded, write_whole

RUN, ROWS = "run.json", "rows.jsonl"
# What a resumed run may change: where it runs and what the text's file is called, not what comes out beyond rounding.
_MAY_DIFFER = ("environment.cpu", "environment.threads", "environment.python", "environment.instruction_set") + (
    "settings.text.name",
)


class Results:
    """An open results folder; made by `Results.open`.

    Attributes:
        folder: Where it is.
        rows: Finished rows, oldest first.
    """

    def __init__(self, folder: Path, rows: list[Row], file: FileIO) -> None:
        self.folder = folder
        self.rows = rows
        self._file = file
        self._done = {_key(row) for row in rows}

    @classmethod
    @contextmanager
    def open(cls, folder: Path, run: Mapping[str, Any], *, resume: bool) -> Iterator[Results]:
        """Start a folder, or continue one that holds the same run.

        Args:
            folder: Made if it isn't there.
            run: What is run, as JSON values; becomes ``run.json``.
            resume: Continue what is there; a folder without results is started all the same.

        Raises:
            ConfigError: The folder holds another run; the message names the first field that differs.
            ResultsError: It holds rows and `resume` is False, something that isn't a run's results, or a row that
                isn't whole; it can't be read or written; or another process is writing there.
        """
        with _one_line(folder):
            folder.mkdir(parents=True, exist_ok=True)
            _refuse_foreign(folder)
            file = FileIO(folder / ROWS, "a+")
        with file:
            with _one_line(folder):
                _lock(file, folder)
                rows = _read_rows(file, folder)
                _check_run(folder, run, rows, resume=resume)
            yield cls(folder, rows, file)

    def is_done(self, sample: str, method: str, budget: int | None) -> bool:
        """Whether a sample's row is here."""
        return (sample, method, budget) in self._done

    def add(self, row: Row) -> None:
        """Append a finished row and wait until it is on the disk.

        Raises:
            ResultsError: It can't be written; the rows before it stay.
        """
        line = encoded(json.dumps(row, ensure_ascii=False, allow_nan=False)) + b"\n"
        with _one_line(self.folder):
            size = os.fstat(self._file.fileno()).st_size
            try:
                while line:  # a nearly full disk takes a part
                    line = line[self._file.write(line) :]
                os.fsync(self._file.fileno())
            except OSError:
                self._file.truncate(size)
                raise
        self.rows.append(row)
        self._done.add(_key(row))


def check_folder(folder: Path) -> None:
    """See that a results folder can be made and written, before the work whose results it is to hold.

    Raises:
        ResultsError: It can't be made or written, or holds something that isn't a run's results.
    """
    made: list[Path] = []
    try:
        with _one_line(folder):
            made = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            _refuse_foreign(folder)
            if not os.access(folder, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    finally:
        with suppress(OSError):  # the first one that wasn't made, or isn't empty, ends it
            for path in made:
                path.rmdir()


def folder_name(run: Mapping[str, Any]) -> str:
    """A name that only the same run has: the task's, and a digest of what a resumed run must share."""
    shared = json.dumps(_must_agree(dict(run)), sort_keys=True)
    return f"{run['task']}-{hashlib.sha256(shared.encode()).hexdigest()[:10]}"


def read_results(folder: Path) -> tuple[dict[str, Any], list[Row]]:
    """``run.json`` and the rows of a folder, which isn't changed.

    Raises:
        ResultsError: It holds no results, or what it holds can't be read.
    """
    with _one_line(folder):
        if not (folder / RUN).is_file():
            raise ResultsError(f"results {folder}: expected a folder with {RUN} and {ROWS}, got none")
        run = _read_run(folder)
        with FileIO(folder / ROWS, "r") as file:
            rows = [row for row, _ in _whole_lines(file.read(), folder)]
    _refuse_repeated(rows, folder)
    return run, rows


def check_rows(
    rows: Sequence[Row],
    folder: Path,
    samples: Collection[str],
    runs: Collection[tuple[str, int | None]],
    fields: Callable[[int | None], Collection[str]],
) -> None:
    """Refuse rows that a run's plan doesn't have, or that lack what its tables are made of.

    Args:
        rows: What a folder held.
        folder: Where.
        samples: Names of the run's samples.
        runs: (method, budget) of its rows.
        fields: Names that a row of that budget must hold.

    Raises:
        ResultsError: The first of them.
    """
    for number, row in enumerate(rows, start=1):
        sample, method, budget = _key(row)
        what = f"results {folder / ROWS}: line {number}"
        if sample not in samples or (method, budget) not in runs:
            raise ResultsError(
                f"{what} is no row of this run (sample {sample}, method {method}, budget {budget}); the file was "
                "changed: take the line out, or choose another --output"
            )
        if lacking := [name for name in fields(budget) if name not in row]:
            raise ResultsError(
                f"{what} lacks {', '.join(lacking)}; the file was changed: take the line out, and --resume measures it "
                "anew"
            )


def _refuse_foreign(folder: Path) -> None:
    """Refuse a folder that is neither empty nor a run's; nothing in it is touched."""
    held = sorted(path.name for path in folder.iterdir() if not path.name.startswith(PARTIAL))
    run, rows = folder / RUN, folder / ROWS
    for path in (run, rows):
        if path.exists() and not path.is_file():
            raise ResultsError(f"results {path}: is no file; choose another --output")
    if run.is_file():
        if not _is_run(run):
            raise ResultsError(f"results {run}: was not written by questkv eval; choose another --output")
    elif held and (held != [ROWS] or rows.stat().st_size):  # a run that was killed as it began leaves no row
        raise ResultsError(
            f"results {folder}: expected an empty folder or one that questkv eval made, got one with {held[0]}; choose "
            "another --output"
        )


def _is_run(path: Path) -> bool:
    """Whether a file is the ``run.json`` of a run: one object that says what was run, and with what."""
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return False
    kinds = {"task": str, "settings": dict, "environment": dict}
    return isinstance(run, dict) and all(isinstance(run.get(name), kind) for name, kind in kinds.items())


def _key(row: Row) -> tuple[str, str, int | None]:
    return row["sample"], row["method"], row["budget"]


def _lock(file: FileIO, folder: Path) -> None:
    """Keep a second run out; the system lets go when the process ends, however it ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ResultsError(f"results {folder}: another run is writing there; wait for it or choose another") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP):  # some network file systems know no locks
            raise


def _read_rows(file: FileIO, folder: Path) -> list[Row]:
    """The whole rows; what a killed run left behind the last of them is cut off."""
    file.seek(0)
    content = file.read()
    found = list(_whole_lines(content, folder))
    end = found[-1][1] if found else 0
    if end < len(content):
        file.truncate(end)
    rows = [row for row, _ in found]
    _refuse_repeated(rows, folder)
    return rows


def _refuse_repeated(rows: Sequence[Row], folder: Path) -> None:
    """Refuse a row that is there twice and would be counted twice."""
    lines: dict[tuple[str, str, int | None], int] = {}
    for number, row in enumerate(rows, start=1):
        if _key(row) in lines:
            raise ResultsError(
                f"results {folder / ROWS}: line {number} repeats line {lines[_key(row)]} (sample {row['sample']}, "
                f"method {row['method']}, budget {row['budget']}); the file was changed: take one of them out"
            )
        lines[_key(row)] = number


def _is_row(row: Any) -> bool:
    """Whether a line holds what every finished row has."""
    return (
        isinstance(row, dict)
        and isinstance(row.get("sample"), str)
        and isinstance(row.get("method"), str)
        and "budget" in row
        and (row["budget"] is None or type(row["budget"]) is int)
        and type(row.get("score")) in (int, float)
    )


def _whole_lines(content: bytes, folder: Path) -> Iterator[tuple[Row, int]]:
    """Each row and the offset behind its line; a torn last line is left out."""
    end = 0
    lines = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if number == len(lines):
            return  # what follows the last line break: nothing, or a line that was cut short
        end += len(line) + 1
        try:
            row = json.loads(line)
            whole = _is_row(row)
        except (ValueError, RecursionError):
            whole = False
        if not whole:
            # after a power cut a file system may leave zeros where the last line was to be
            if number == len(lines) - 1 and not lines[-1]:
                return
            raise ResultsError(f"results {folder / ROWS}: line {number} is no row; the file was changed") from None
        yield row, end


def _check_run(folder: Path, run: Mapping[str, Any], rows: list[Row], *, resume: bool) -> None:
    """Write ``run.json`` in a new folder; in one with rows, insist that it is the same run."""
    path = folder / RUN
    if not rows:
        write_whole(path, encoded(json.dumps(run, indent=2, ensure_ascii=False) + "\n"), "results")
        return
    if not resume:
        raise ResultsError(
            f"results {folder}: holds {len(rows)} finished rows; continue with --resume, or choose another --output"
        )
    for name, (before, now) in _differences(_must_agree(_read_run(folder)), _must_agree(json.loads(json.dumps(run)))):
        raise ConfigError(
            f"[eval] --resume: expected the run that {folder} holds, with {name} = {before}, got {now}; choose another "
            "--output"
        )


def _read_run(folder: Path) -> dict[str, Any]:
    try:
        run = json.loads((folder / RUN).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        run = None
    if not isinstance(run, dict):
        raise ResultsError(f"results {folder / RUN}: expected one JSON object; the file was changed")
    return run


def _must_agree(value: Any, name: str = "") -> Any:
    """A run without the fields in which a resumed one may differ."""
    if not isinstance(value, dict):
        return value
    named = {key: f"{name}.{key}" if name else key for key in value}
    return {key: _must_agree(value[key], named[key]) for key in value if named[key] not in _MAY_DIFFER}


def _differences(before: Any, now: Any, name: str = "") -> Iterator[tuple[str, tuple[str, str]]]:
    """Fields that differ, by their dotted names."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in dict.fromkeys((*before, *now)):
            yield from _differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif before != now:
        yield name, (json.dumps(before), json.dumps(now))


@contextmanager
def _one_line(folder: Path) -> Iterator[None]:
    """Turn the system's errors into one line with the place and what to do."""
    try:
        yield
    except ResultsError:
        raise
    except OSError as error:
        text = f"results {error.filename or folder}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            text += "; the rows before are kept: make room and continue with --resume"
        raise ResultsError(text) from None
