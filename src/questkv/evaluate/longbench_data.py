"""LongBench's records: from local JSONL files, or from the hub's archive."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from questkv.errors import DocumentError

HUB = "THUDM/LongBench"
_ARCHIVE = "data.zip"
_FIELDS = {"input": str, "context": str, "answers": list}


@dataclass(frozen=True)
class DataSet:
    """One data set's records.

    Attributes:
        name: Its name in LongBench.
        digest: SHA-256 of the file, so that a resumed run is known to read the same records.
        records: ``input``, ``context``, ``answers``, and what else a record has (``all_classes``, ``length``).
    """

    name: str
    digest: str
    records: tuple[Mapping[str, Any], ...] = field(repr=False)


def read_folder(folder: Path, names: tuple[str, ...]) -> tuple[DataSet, ...]:
    """Read ``NAME.jsonl`` for each name.

    Raises:
        DocumentError: A file is missing, or isn't in LongBench's format.
    """
    return tuple(_parse(name, str(folder / f"{name}.jsonl"), (folder / f"{name}.jsonl").read_bytes) for name in names)


def read_hub(names: tuple[str, ...]) -> tuple[DataSet, ...]:
    """Read them from the archive on the hub, which is downloaded once (about 110 MB).

    Raises:
        DocumentError: It can't be fetched, or isn't in LongBench's format.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        path = hf_hub_download(HUB, _ARCHIVE, repo_type="dataset")
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DocumentError(
            f"longbench: {_ARCHIVE} of {HUB} can't be fetched from the hub ({reason}); get its JSONL files another way "
            "and name their folder with --data"
        ) from None
    try:
        with zipfile.ZipFile(path) as archive:
            members = {Path(member).name: member for member in archive.namelist()}
            readers = {name: partial(_member, archive, members, f"{name}.jsonl") for name in names}
            return tuple(_parse(name, f"{HUB}/{name}.jsonl", read) for name, read in readers.items())
    except zipfile.BadZipFile:
        raise DocumentError(f"longbench: {path} is no archive; delete it and start again") from None


def _member(archive: zipfile.ZipFile, members: Mapping[str, str], name: str) -> bytes:
    return archive.read(members[name])


def _parse(name: str, label: str, read: Callable[[], bytes]) -> DataSet:
    try:
        content = read()
    except (FileNotFoundError, KeyError):
        raise DocumentError(f"longbench: expected {label}, got no such file") from None
    except OSError as error:
        raise DocumentError(f"longbench: {label} can't be read: {error.strerror or error}") from None
    records = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or any(not isinstance(record.get(key), kind) for key, kind in _FIELDS.items()):
            raise DocumentError(
                f"longbench: {label}, line {number}: expected a JSON object with {', '.join(_FIELDS)} (answers a list)"
            )
        records.append(record)
    if not records:
        raise DocumentError(f"longbench: {label} is empty")
    return DataSet(name, hashlib.sha256(content).hexdigest(), tuple(records))
