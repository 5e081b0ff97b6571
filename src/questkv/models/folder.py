"""Loading a model folder or a hub id through transformers' own `from_pretrained`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from questkv.errors import ModelError
from questkv.models.context import stretch_context
from questkv.models.failures import foreign_files

if TYPE_CHECKING:
    import torch

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class LoadedModel(NamedTuple):
    """A model in evaluation mode and its tokenizer."""

    model: Any
    tokenizer: Any


def load_folder(
    name: str,
    dtype: torch.dtype,
    rope_factor: float,
    attention: str | None,
    *,
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a folder or hub id: safetensors weights only, and none of its Python code unless that is allowed.

    Raises:
        ModelError: It can't be loaded.
        MissingPackageError: A package is needed.
        ConfigError: `rope_factor` is impossible.
        UnsupportedError: The context can't be stretched.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    auto_model: Any = AutoModelForCausalLM  # its annotations don't know output_loading_info
    # None, transformers' default, would ask on standard input
    trust = {"trust_remote_code": trust_remote_code}
    _refuse_pickled(name)
    with foreign_files(name):
        config = AutoConfig.from_pretrained(name, **trust)
    stretch_context(config, rope_factor)
    # quantised layers choose their kernels where they are loaded, and some can't be moved
    place = {"device_map": device} if is_quantised(config) and not device.startswith("cpu") else {}
    with foreign_files(name):
        tokenizer = AutoTokenizer.from_pretrained(name, **trust)
        model, info = auto_model.from_pretrained(
            name,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            output_loading_info=True,
            **trust,
            **place,
        )
    refuse_missing_weights(name, info)
    return LoadedModel(model, tokenizer)


def is_quantised(config: Any) -> bool:
    """Whether a checkpoint's weights are quantised: GPTQ, AWQ and others say so in their config."""
    return getattr(config, "quantization_config", None) is not None


def refuse_missing_weights(name: str, info: Any) -> None:
    """Raise where the checkpoint left weights random: transformers only warns, and the answers would be noise."""
    missing = sorted(info["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"model {name}: the checkpoint lacks the weights {missing[0]}{more}")


def _refuse_pickled(name: str) -> None:
    """Refuse a local folder whose only weights are pickles: unpickling runs what the file says.

    Those of a hub id transformers itself refuses, being told to take safetensors only.
    """
    folder = Path(name)
    try:
        if not folder.is_dir() or any(folder.glob("*.safetensors")):
            return
        pickled = sorted(file for pattern in _PICKLED for file in folder.glob(pattern))
    except OSError as error:
        raise ModelError(f"model {name}: {error.strerror}") from None
    if pickled:
        raise ModelError(
            f"model {name}: expected weights as .safetensors, got {pickled[0].name}, a pickle, which can run code when "
            "it is read; convert it with save_pretrained, or use another copy of the model"
        )
