"""Loading a model, wherever it lies, in the type and with the attention that are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from questkv.errors import ConfigError
from questkv.models.find import DEFAULT_MODEL, find_model
from questkv.models.folder import LoadedModel, is_quantised, load_folder

if TYPE_CHECKING:
    import torch

DTYPES = ("auto", "float32", "bfloat16", "float16")
WEIGHTS = ("model", "int8", "int4")


def load_model(
    name: str = DEFAULT_MODEL,
    *,
    dtype: str = "auto",
    rope_factor: float = 1.0,
    attention: str | None = None,
    device: str | None = None,
    weights: str = "model",
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a causal language model and its tokenizer.

    A checkpoint that is quantised already (GPTQ, AWQ and others) is loaded as transformers loads it, which needs the
    package and often the GPU that its method needs. Weights are read from safetensors and GGUF files only: a pickle
    can run code.

    Args:
        name: An alias (`ALIASES`), a ``.gguf`` file, a local model folder, or a Hugging Face hub id.
        dtype: ``auto``, ``float32``, ``bfloat16`` or ``float16``; see `pick_dtype`.
        rope_factor: Stretch the context this many times with YaRN; 1 leaves the model as it is.
        attention: Name of a registered attention function; None is transformers' choice.
        device: A torch device; None is the GPU where there is one, else the CPU.
        weights: ``model`` for weights of `dtype`, or ``int8`` or ``int4``: see `questkv.weights.lighten`.
        trust_remote_code: Run the Python code that a folder or hub id brings, where its config names some. False
            refuses a model that needs it; nothing is ever asked on standard input.

    Raises:
        ConfigError: `dtype`, `rope_factor` or `weights` holds an impossible value.
        ModelError: The model can't be found, read or used.
        MissingPackageError: A package is needed; the message holds the command that installs it.
        UnsupportedError: `rope_factor` on a model whose rotary embedding can't be stretched, `weights` on a GPU or
            a checkpoint that is quantised already, or a GGUF file whose rotary embedding transformers can't compute.
    """
    import torch

    if weights not in WEIGHTS:
        raise ConfigError(f"[load_model] weights: expected one of {', '.join(WEIGHTS)}, got {weights}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch_dtype = pick_dtype(dtype, device)
    source = find_model(name)
    if isinstance(source, Path) and source.suffix.lower() == ".gguf":
        from questkv.models.gguf.load import load_gguf

        loaded = load_gguf(source, torch_dtype, rope_factor, attention)
    else:
        loaded = load_folder(
            str(source), torch_dtype, rope_factor, attention, device=device, trust_remote_code=trust_remote_code
        )
    model = loaded.model.eval() if is_quantised(loaded.model.config) else loaded.model.to(device).eval()
    if weights != "model":
        from questkv.weights import lighten

        lighten(model, weights)
    return LoadedModel(model, loaded.tokenizer)


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
