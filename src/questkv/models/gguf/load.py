"""Loading a GGUF file, by way of its kept copy where there is one or one can be made."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from questkv.models.context import stretch_context
from questkv.models.failures import first_line
from questkv.models.folder import LoadedModel, load_folder
from questkv.models.gguf import convert, copies
from questkv.models.place import model_cache_dir

if TYPE_CHECKING:
    import torch


def load_gguf(path: Path, dtype: torch.dtype, rope_factor: float, attention: str | None) -> LoadedModel:
    """Load a GGUF file from its converted copy, which is made first where there is none that is whole.

    Where none can be read or written, a warning says so, and the model is made in memory.

    Raises:
        ModelError: The file can't be read, is damaged, or is of an architecture that transformers doesn't know.
        MissingPackageError: The gguf package is missing.
        UnsupportedError: Its rotary embedding can't be computed or stretched.
    """
    name = copies.copy_name(path, str(dtype).removeprefix("torch."))
    kept: Path | None = None
    try:
        kept = model_cache_dir() / name
        whole = copies.is_whole(kept)
    except OSError as error:
        place = f" in {kept.parent}" if kept is not None else ""
        _warn(f"the model is converted in memory, since no converted one can be looked for{place}: {_reason(error)}")
        kept, whole = None, False
    if kept is not None and whole:
        return load_folder(str(kept), dtype, rope_factor, attention)
    config, weights, tokenizer = convert.convert(path, dtype)
    if kept is not None:
        model = convert.build(path, config, weights, dtype, attention=None)
        if _keep(kept, model, tokenizer):
            del model, weights
            return load_folder(str(kept), dtype, rope_factor, attention)
    stretch_context(config, rope_factor)
    return LoadedModel(convert.build(path, config, weights, dtype, attention), tokenizer)


def _keep(target: Path, model: Any, tokenizer: Any) -> bool:
    """Keep a converted model; False, after a warning, where that can't be done."""

    def write(folder: Path) -> None:
        try:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        except OSError:
            raise
        except Exception as error:  # for a full disk, safetensors and tokenizers each raise their own kind
            raise OSError(first_line(error)) from error

    try:
        copies.keep(target, write)
    except OSError as error:
        _warn(f"the converted model could not be kept in {target.parent}: {_reason(error)}")
        return False
    return True


def _reason(error: OSError) -> str:
    return error.strerror or first_line(error)


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=2)
