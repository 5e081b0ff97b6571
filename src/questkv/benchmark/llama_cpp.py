"""llama.cpp as another decoder, through llama-cpp-python's plain bindings (written for 0.3.36)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from questkv.errors import ModelError

NAME = "llama.cpp"
INSTALL = 'CMAKE_ARGS="-DGGML_NATIVE=ON" pip install llama-cpp-python --no-binary llama-cpp-python'
_RUN_TOKENS = 512
# llama.h's enum llama_ftype.
_FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}
_FLASH_ATTENTION_ON = 1
# The joined sequence; block i is prefilled as sequence i + 1.
_ALL = 0


def is_installed() -> bool:
    """Whether ``llama_cpp`` can be imported."""
    return importlib.util.find_spec("llama_cpp") is not None


def convert(file: Path, dtype: torch.dtype, folder: Path) -> Path:
    """A GGUF file with the same weights in `dtype`, made by llama.cpp itself and kept in `folder`.

    Raises:
        ModelError: It can't be made.
    """
    import llama_cpp

    name = str(dtype).removeprefix("torch.")
    target = folder / f"{file.stem}-{file.stat().st_size}-{name}.gguf"
    if target.is_file():
        return target
    _be_quiet()
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.allow_requantize = _FILE_TYPES[dtype], True
    folder.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}.partial")
    try:
        if llama_cpp.llama_model_quantize(bytes(file), bytes(partial), parameters):
            raise ModelError(f"model {file}: llama.cpp can't write it in {name} to {folder}")
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


class LlamaCpp:
    """A GGUF file in llama.cpp, with flash attention and a cache in 16 bits.

    A long context is made as `decode_contents.Contents` is: each block is prefilled as a sequence of its own at its own
    positions, and its cells are given to one sequence that holds all of them.

    Args:
        name: As in a row; None for `NAME`, a colon and the file's type.
        file: The GGUF file.
        tokens: Tokens that fit: the longest context and the steps.
        block: Tokens a block.
        threads: CPU threads.
        rope_factor: As in `load_model`: YaRN, from the context that the file names.

    Raises:
        ModelError: llama.cpp can't load the file or make room for the tokens.
    """

    def __init__(
        self, name: str | None, file: Path, *, tokens: int, block: int, threads: int, rope_factor: float = 1.0
    ) -> None:
        import llama_cpp

        _be_quiet()
        self._api: Any = llama_cpp
        llama_cpp.llama_backend_init()
        model_parameters = llama_cpp.llama_model_default_params()
        model_parameters.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(bytes(file), model_parameters)
        if not self._model:
            raise ModelError(f"model {file}: llama.cpp can't load it")
        self.name = name or f"{NAME}:{_type_name(llama_cpp, self._model)}"
        parameters = llama_cpp.llama_context_default_params()
        # llama.cpp rounds it up; blocks are sequences of one unified cache
        parameters.n_ctx = -(-tokens // 256) * 256
        parameters.n_seq_max = -(-tokens // block) + 1
        parameters.kv_unified = True
        parameters.n_batch = parameters.n_ubatch = _RUN_TOKENS
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.flash_attn_type = _FLASH_ATTENTION_ON
        if rope_factor > 1:
            parameters.rope_scaling_type = llama_cpp.LLAMA_ROPE_SCALING_TYPE_YARN
            parameters.rope_freq_scale = 1 / rope_factor
            parameters.yarn_orig_ctx = llama_cpp.llama_model_n_ctx_train(self._model)
            parameters.yarn_ext_factor = 1.0
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise ModelError(f"model {file}: llama.cpp can't make a context of {tokens} tokens")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocabulary: int = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(_RUN_TOKENS, 0, 1)
        self._block = block
        self._filled = 0
        self._position = 0

    def fill(self, ids: Sequence[int], on_progress: Callable[[int], None] | None = None) -> None:
        """Stand behind `ids`, which begin with what an earlier call filled; steps that were taken are forgotten."""
        self._api.llama_memory_seq_rm(self._memory, _ALL, self._filled, -1)
        while self._filled < len(ids):
            sequence = self._filled // self._block + 1
            end = min(len(ids), sequence * self._block, self._filled + _RUN_TOKENS)
            self._run(ids[self._filled : end], self._filled, sequence)
            self._api.llama_memory_seq_cp(self._memory, sequence, _ALL, self._filled, end)
            self._filled = end
            if on_progress is not None:
                on_progress(end)
        self._position = self._filled

    def prepare(self) -> None:
        """Nothing to do."""

    def step(self, token: int) -> torch.Tensor:
        """Take in a token; returns the next one's logits, [vocabulary]."""
        import numpy as np

        self._run([token], self._position, _ALL)
        self._position += 1
        logits = self._api.llama_get_logits_ith(self._context, -1)
        return torch.from_numpy(np.ctypeslib.as_array(logits, shape=(self._vocabulary,)))

    def close(self) -> None:
        """Give the memory back."""
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)

    def _run(self, ids: Sequence[int], position: int, sequence: int) -> None:
        batch = self._batch
        batch.n_tokens = len(ids)
        for index, token in enumerate(ids):
            batch.token[index], batch.pos[index] = token, position + index
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = index == len(ids) - 1
        if self._api.llama_decode(self._context, batch):
            raise ModelError(f"{self.name}: llama.cpp can't decode {len(ids)} tokens at {position}")


def _type_name(api: Any, model: Any) -> str:
    """The file's type as llama.cpp calls it, in small letters: ``q4_1``."""
    return str(api.llama_ftype_name(api.llama_model_ftype(model)).decode()).split()[0].lower()


_log: Any = None


def _be_quiet() -> None:
    """Turn off llama.cpp's log."""
    import llama_cpp

    global _log  # llama.cpp calls it later, so it must live
    _log = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(_log, None)
