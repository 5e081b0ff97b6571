"""From a GGUF file to a config, weights and a tokenizer of transformers."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from questkv.errors import MissingPackageError, UnsupportedError
from questkv.models.failures import foreign_files
from questkv.models.folder import refuse_missing_weights
from questkv.models.gguf.header import damaged, read_header
from questkv.models.gguf.rope import apply_rope, check_rope

if TYPE_CHECKING:
    import torch

# Goes into a kept copy's name. To be raised whenever a file would be converted to something else than before.
CONVERSION = 2


def convert(path: Path, dtype: torch.dtype) -> tuple[Any, dict[str, Any], Any]:
    """Read a GGUF file into a config, weights of `dtype` and a tokenizer.

    `from_pretrained(gguf_file=...)` does the same but insists on the accelerate package, which nothing here uses, and
    drops what the file says about positions.

    Raises:
        ModelError: The file can't be read, is damaged, or transformers doesn't know its architecture.
        MissingPackageError: The gguf package is missing.
        UnsupportedError: Its rotary embedding can't be computed, or its biases aren't read.
    """
    if importlib.util.find_spec("gguf") is None:
        raise MissingPackageError(f"model {path}: reading GGUF files needs a package; run: pip install gguf")
    header = read_header(path)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils

    auto_model: Any = AutoModelForCausalLM
    read: Any = modeling_gguf_pytorch_utils.load_gguf_checkpoint
    file = {"gguf_file": path.name, "trust_remote_code": False}
    # transformers draws a progress bar of its own here, which no setting turns off
    with foreign_files(str(path)), contextlib.redirect_stderr(io.StringIO()):
        config = AutoConfig.from_pretrained(str(path.parent), **file)
    apply_rope(config, header)
    with foreign_files(str(path)), contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), **file)
        with torch.device("meta"):
            shapes_only = auto_model.from_config(config, trust_remote_code=False)
        check_rope(shapes_only, header)
        weights = read(str(path), return_tensors=True, model_to_load=shapes_only, torch_dtype=dtype)["tensors"]
    for name, expected in shapes_only.state_dict().items():
        if name in weights and weights[name].shape != expected.shape:
            shapes = f"{tuple(expected.shape)}, got {tuple(weights[name].shape)}"
            raise damaged(path, f"its sizes and its tensors don't fit: expected {name} of {shapes}")
    biases = sum(math.prod(tensor.shape) for name, tensor in header.tensors.items() if name.endswith(".bias"))
    if biases > sum(weight.numel() for name, weight in weights.items() if "bias" in name):
        raise UnsupportedError(
            f"model {path}: transformers leaves out biases that the file has for {header.architecture}; use a model "
            "folder in place of the GGUF file"
        )
    return config, weights, tokenizer


def build(path: Path, config: Any, weights: dict[str, Any], dtype: torch.dtype, attention: str | None) -> Any:
    """Make a model of a config and weights held in memory.

    Raises:
        ModelError: Weights are missing.
    """
    from transformers import AutoModelForCausalLM

    model_class: Any = AutoModelForCausalLM._model_mapping[type(config)]
    with foreign_files(str(path)):
        model, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
        )
    refuse_missing_weights(f"{path}: GGUF file", info)
    return model
