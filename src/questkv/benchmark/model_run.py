"""What the benchmarks of whole models do around their measurement: the model, other engines, memory, results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from questkv.benchmark import decode, llama_cpp, peak_memory, prefill, vllm_engine
from questkv.benchmark.attention import DENSE
from questkv.benchmark.decode import MODEL_WEIGHTS, SDPA
from questkv.benchmark.peak_memory import Subject
from questkv.config import QuestConfig
from questkv.environment import environment
from questkv.errors import ConfigError
from questkv.models import LoadedModel, context_length, find_model, load_model, model_cache_dir, pick_dtype

# What something takes, and how far it is: `output.token_progress` of the command line.
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
R = TypeVar("R", decode.Row, prefill.Row)


@dataclass(frozen=True)
class ModelPlan:
    """Which model is timed, and behind what.

    Attributes:
        model: As for `load_model`.
        contexts: Ascending.
        config: Ours.
        dtype: As for `load_model`.
        rope_factor: Likewise.
        text: What the model reads; None for Python's documentation.
        memory: Whether peak memory is measured.
        trust_remote_code: As for `load_model`.
    """

    model: str
    contexts: tuple[int, ...]
    config: QuestConfig
    dtype: str
    rope_factor: float
    text: str | None
    memory: bool
    trust_remote_code: bool = field(default=False, kw_only=True)

    def load(self, weights: str = MODEL_WEIGHTS) -> LoadedModel:
        """The model with transformers' own attention, on the CPU.

        Raises:
            QuestKVError: It can't be loaded, or a package is missing.
        """
        return load_model(
            self.model,
            dtype=self.dtype,
            rope_factor=self.rope_factor,
            attention="sdpa",
            device="cpu",
            weights=weights,
            trust_remote_code=self.trust_remote_code,
        )

    def subject(self, name: str, **work: Any) -> Subject:
        """A row's implementation as the subject of `peak_memory.measure`; `work` is what it does there."""
        implementation, _, weights = name.partition(":")
        model, config = self.model, self.config
        if implementation == DENSE:
            config = replace(config, token_budget=1.0)
        if implementation == llama_cpp.NAME:
            file = self._gguf_file()
            assert file is not None
            dtype = pick_dtype(self.dtype, "cpu")
            model = str(file if weights else llama_cpp.convert(file, dtype, model_cache_dir()))
        kinds = {SDPA: "transformers", llama_cpp.NAME: "llama.cpp"}
        return Subject(
            kind=kinds.get(implementation, "questkv"),
            model=model,
            contexts=self.contexts,
            dtype=self.dtype,
            rope_factor=self.rope_factor,
            weights=weights or MODEL_WEIGHTS,
            config=config.to_dict(),
            threads=torch.get_num_threads(),
            trust_remote_code=self.trust_remote_code,
            **work,
        )

    def open_llama_cpp(
        self, dtype: torch.dtype, *, tokens: int, block: int, held: contextlib.ExitStack
    ) -> tuple[list[llama_cpp.LlamaCpp], list[str]]:
        """Llama.cpp with the model's type and with the file's own, closed with `held`; or a note why not."""
        file = self._gguf_file()
        if not llama_cpp.is_installed():
            return [], [f"llama.cpp isn't installed and wasn't timed: {llama_cpp.INSTALL}"]
        if file is None:
            return [], ["llama.cpp wasn't timed: it reads .gguf files only"]
        files = {llama_cpp.NAME: llama_cpp.convert(file, dtype, model_cache_dir()), None: file}
        engines = []
        for name, path in files.items():
            engine = llama_cpp.LlamaCpp(
                name,
                path,
                tokens=tokens,
                block=block,
                threads=torch.get_num_threads(),
                rope_factor=self.rope_factor,
            )
            engines.append(held.enter_context(contextlib.closing(engine)))
        return engines, []

    def open_vllm(
        self, model: Any, *, tokens: int, held: contextlib.ExitStack, compiled: bool = False
    ) -> tuple[list[vllm_engine.Vllm], list[str]]:
        """VLLM with the same weights, eager or compiled, closed with `held`; or a note why not."""
        if not vllm_engine.is_installed():
            return [], [f"vLLM for the CPU isn't installed and wasn't timed: {vllm_engine.INSTALL}"]
        engine = vllm_engine.Vllm(model, tokens=tokens, threads=torch.get_num_threads(), compiled=compiled)
        return [held.enter_context(contextlib.closing(engine))], []

    def describe(self, kinds: tuple[str, ...]) -> dict[str, Any]:
        """What the rows depend on; `kinds` are the types of weights."""
        return {
            "model": {"name": self.model, "dtype": self.dtype, "rope_factor": self.rope_factor, "weights": list(kinds)},
            "config": self.config.to_dict(),
            "environment": environment(self.config.backend),
        }

    def _gguf_file(self) -> Path | None:
        """The file of a model that is a GGUF file."""
        found = find_model(self.model)
        return found if isinstance(found, Path) and found.suffix.lower() == ".gguf" else None


@dataclass(frozen=True)
class Results(Generic[R]):
    """What a run found.

    Attributes:
        rows: Context after context.
        by_context: What follows from them.
        notes: What a reader must know: how contexts were made, what wasn't timed and why.
        described: What the rows depend on.
    """

    rows: tuple[R, ...]
    by_context: list[dict[str, Any]]
    notes: tuple[str, ...]
    described: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """What ``--json`` writes."""
        rows = [asdict(row) for row in self.rows]
        return {"rows": rows, "by_context": self.by_context, "notes": self.notes, **self.described}


def check_contexts(plan: ModelPlan, model_config: Any) -> None:
    """Refuse contexts that the model isn't made for.

    Raises:
        ConfigError: One of them.
    """
    limit = context_length(model_config)
    longest = plan.contexts[-1]
    # the steps themselves may go past it: their positions are ones the rotary embedding has, and nobody reads the text
    if limit is not None and longest > limit:
        factor = -(-longest * plan.rope_factor // limit)
        raise ConfigError(
            f"[bench] --contexts: expected at most the model's {limit:,} tokens, got {longest:,}; stretch it with "
            f"--rope-factor {factor:g}"
        )


def with_memory(rows: list[R], subject: Callable[[str], Subject], progress: Progress) -> tuple[list[R], list[str]]:
    """Rows with their peak memory, each implementation's from a process of its own; or as they are and a note why.

    Args:
        rows: With every name at every context; vLLM's stay as they are, since it takes as much memory as it is told to.
        subject: What is measured for a name.
        progress: Draws how far it is.
    """
    if not peak_memory.is_possible():
        return rows, []
    names = [name for name in dict.fromkeys(row.name for row in rows) if name != vllm_engine.NAME]
    found: dict[str, dict[int, float]] = {}
    try:
        with progress("Measuring memory", len(names)) as on_progress:
            for done, name in enumerate(names):
                found[name] = peak_memory.measure(subject(name))
                on_progress(done + 1)
    except peak_memory.MeasurementError as error:
        return rows, [f"peak memory wasn't measured: {error}"]
    return [
        replace(row, peak_mib=round(found[row.name][row.context], 1)) if row.name in found else row for row in rows
    ], []
