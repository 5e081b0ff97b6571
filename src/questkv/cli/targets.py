"""The files that a command is to write, checked before its work: each can be written, and none is read or another's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import typer

from questkv import files
from questkv.cli.output import STDOUT
from questkv.errors import OutputError
from questkv.models import find_model, model_cache_dir


def check_targets(
    targets: Mapping[str, str | None],
    *,
    model: str | None = None,
    inputs: Mapping[str, str | Path | None] | None = None,
) -> None:
    """Refuse targets that can't be written or would destroy something.

    Args:
        targets: Files by their options, ``--json`` among them; None where one wasn't given.
        model: ``--model``: its file or folder isn't written to, nor are the folders that models are kept in.
        inputs: What else is read, by what the message calls it; None and ``-`` are no files.

    Raises:
        OutputError: One can't be written, is read, or is named by two options.
        typer.BadParameter: Another option than ``--json`` has ``-``.
        ModelError: The model can't be found.
    """
    named = {option: target for option, target in targets.items() if target is not None}
    for option, target in named.items():
        if target == STDOUT and option != "--json":
            raise typer.BadParameter(f"{option}: expected a file, got -")
    written = {option: target for option, target in named.items() if target != STDOUT}
    if not written:
        return
    for option, target in written.items():
        files.check_writable(target, option)
    read = {name: source for name, source in (inputs or {}).items() if source is not None and str(source) != STDOUT}
    read = {name: os.path.expanduser(source) for name, source in read.items()}
    if model is not None:
        read.update(_places_of(model))
    places: dict[str, str] = {}
    for option, target in written.items():
        files.refuse_inputs(target, option, read)
        place = os.path.realpath(target)
        if place in places and place != os.devnull:
            raise OutputError(f"{option} {target}: is the file of {places[place]} too; choose another file")
        places[place] = option


def _places_of(model: str) -> dict[str, str]:
    """Where a model lies, and where models are kept, by what a message calls them."""
    found = find_model(model)
    places = {"questkv's folder of models": str(model_cache_dir())}
    if isinstance(found, Path):
        places["the model"] = str(found)
    else:
        from huggingface_hub.constants import HF_HUB_CACHE

        places["the hub's folder of models"] = HF_HUB_CACHE
    return places
