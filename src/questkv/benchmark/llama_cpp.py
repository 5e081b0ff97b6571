"""llama.cpp as another decoder, through llama-cpp-python's plain bindings (written for 0.3.36)."""

from __future__ import annotations

import ctypes
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
# The joined sequence; block i is also sequence i + 1.
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
    """A GGUF file in llama.cpp, with flash attention and a cache in 16 bits; `Filler` fills it.

    Args:
        name: As in a row; None for `NAME`, a colon and the file's type.
        file: The GGUF file.
        tokens: Tokens that fit: the longest context and the steps.
        block: Tokens a block of a context.
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
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(bytes(file), parameters)
        if not self.model:
            raise ModelError(f"model {file}: llama.cpp can't load it")
        self.name = name or f"{NAME}:{_type_name(llama_cpp, self.model)}"
        # asked for once: a context that YaRN stretches changes the model's answer
        self.trained_tokens: int = llama_cpp.llama_model_n_ctx_train(self.model)
        self.block, self.threads, self.rope_factor = block, threads, rope_factor
        self.room = Room(self, tokens, sequences=-(-tokens // block) + 1)
        self._vocabulary: int = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.position = 0

    def prepare(self) -> None:
        """Nothing to do."""

    def step(self, token: int) -> torch.Tensor:
        """Take in a token; returns the next one's logits, [vocabulary]."""
        self.room.run([token], self.position, _ALL)
        self.position += 1
        return self._logits()

    def read(self, ids: Sequence[int]) -> torch.Tensor:
        """Read a prompt and forget what was read before; returns the next token's logits, [vocabulary]."""
        self.room.forget(_ALL)
        for start in range(0, len(ids), _RUN_TOKENS):
            self.room.run(ids[start : start + _RUN_TOKENS], start, _ALL)
        self.position = len(ids)
        return self._logits()

    def close(self) -> None:
        """Give the memory back."""
        self.room.close()
        self._api.llama_model_free(self.model)

    def _logits(self) -> torch.Tensor:
        """The last token's, [vocabulary]; llama.cpp's own memory, until its next run."""
        import numpy as np

        logits = self._api.llama_get_logits_ith(self.room.context, -1)
        return torch.from_numpy(np.ctypeslib.as_array(logits, shape=(self._vocabulary,)))


class Room:
    """One of llama.cpp's contexts: a cache for some tokens, which its sequences share.

    Args:
        engine: The model and its settings.
        tokens: Tokens that fit.
        sequences: Sequences that fit.

    Raises:
        ModelError: llama.cpp can't make it.
    """

    def __init__(self, engine: LlamaCpp, tokens: int, sequences: int) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        self._name = engine.name
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = -(-tokens // 256) * 256  # it would round up by itself, with a warning
        parameters.n_seq_max = sequences
        parameters.kv_unified = True
        parameters.n_batch = parameters.n_ubatch = _RUN_TOKENS
        parameters.n_threads = parameters.n_threads_batch = engine.threads
        parameters.flash_attn_type = _FLASH_ATTENTION_ON
        if engine.rope_factor > 1:
            parameters.rope_scaling_type = llama_cpp.LLAMA_ROPE_SCALING_TYPE_YARN
            parameters.rope_freq_scale = 1 / engine.rope_factor
            parameters.yarn_orig_ctx = engine.trained_tokens
            parameters.yarn_ext_factor = 1.0
        self.context = llama_cpp.llama_init_from_model(engine.model, parameters)
        if not self.context:
            raise ModelError(f"{engine.name}: llama.cpp can't make a context of {tokens} tokens")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self._batch = llama_cpp.llama_batch_init(_RUN_TOKENS, 0, 1)

    def run(self, ids: Sequence[int], position: int, sequence: int) -> None:
        """Take in tokens of a sequence from a position on; the last one's logits are made."""
        batch = self._batch
        batch.n_tokens = len(ids)
        for index, token in enumerate(ids):
            batch.token[index], batch.pos[index] = token, position + index
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = index == len(ids) - 1
        if self._api.llama_decode(self.context, batch):
            raise ModelError(f"{self._name}: llama.cpp can't decode {len(ids)} tokens at {position}")

    def forget(self, sequence: int, start: int = -1) -> None:
        """Forget a sequence's tokens from a position on."""
        self._api.llama_memory_seq_rm(self.memory, sequence, start, -1)

    def state(self, sequence: int) -> Any:
        """A sequence's keys and values with their positions, for `restore`."""
        size = self._api.llama_state_seq_get_size(self.context, sequence)
        state = (ctypes.c_uint8 * size)()
        if self._api.llama_state_seq_get_data(self.context, state, size, sequence) != size:
            raise ModelError(f"{self._name}: llama.cpp can't hand out its cache")
        return state

    def restore(self, state: Any, sequence: int) -> None:
        """Put a state into a sequence, in the place of what it held, and add its tokens to the joined sequence."""
        if not self._api.llama_state_seq_set_data(self.context, state, len(state), sequence):
            raise ModelError(f"{self._name}: llama.cpp can't take in a cache")
        self._api.llama_memory_seq_cp(self.memory, sequence, _ALL, -1, -1)

    def close(self) -> None:
        """Give the memory back."""
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self.context)


class Filler:
    """Fills the caches of engines of one model as `decode_contents.Contents` is made.

    Each block is prefilled in a small cache of its own at its own positions, and its state goes into every engine,
    where it joins one sequence that holds all blocks.

    Args:
        engines: Engines of the same model, whose weights may have different types; the first one prefills.
    """

    def __init__(self, engines: Sequence[LlamaCpp]) -> None:
        self._engines = engines
        self._block = engines[0].block
        self._room = Room(engines[0], self._block, sequences=1)
        self._filled = 0

    def fill(self, ids: Sequence[int], on_progress: Callable[[int], None] | None = None) -> None:
        """Have every engine stand behind `ids`, which begin with what an earlier call filled; steps are forgotten."""
        for engine in self._engines:
            engine.room.forget(_ALL, self._filled)
        while self._filled < len(ids):
            index = self._filled // self._block
            start, end = index * self._block, min((index + 1) * self._block, len(ids))
            if self._filled == start:
                self._room.forget(_ALL)
            while self._filled < end:
                stop = min(end, self._filled + _RUN_TOKENS)
                self._room.run(ids[self._filled : stop], self._filled, _ALL)
                self._filled = stop
                if on_progress is not None:
                    on_progress(stop)
            state = self._room.state(_ALL)
            for engine in self._engines:
                # a part of this block may be there from the last call, and must not be there twice
                engine.room.forget(_ALL, start)
                engine.room.restore(state, index + 1)
        for engine in self._engines:
            engine.position = len(ids)

    def close(self) -> None:
        """Give its memory back; the engines stay."""
        self._room.close()


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
