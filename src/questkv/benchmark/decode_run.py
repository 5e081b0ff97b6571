"""A run of `questkv bench decode`: the model, the other engines that are installed, contexts one after another."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from questkv.benchmark import decode_memory, llama_cpp
from questkv.benchmark.attention import DENSE
from questkv.benchmark.decode import MODEL_WEIGHTS, SDPA, UNTIMED_STEPS, Row, as_json, measure, summarise
from questkv.benchmark.decode_contents import default_text, make_contents, text_tokens
from questkv.benchmark.decode_memory import Subject
from questkv.config import QuestConfig
from questkv.environment import environment
from questkv.errors import ConfigError
from questkv.hf.linear_layers import make_linear_fast
from questkv.models import LoadedModel, context_length, find_model, load_model, model_cache_dir, pick_dtype

# What something takes, and how far it is: `output.token_progress` of the command line.
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True)
class Plan:
    """What is timed.

    Attributes:
        model: As for `load_model`.
        contexts: Ascending.
        config: Ours.
        weights: Types of light weights, beside the model's own; None for four bits where torchao is installed.
        dtype: As for `load_model`.
        rope_factor: Likewise.
        steps: Timed tokens of each decoder.
        block: Tokens of the longest prefill.
        text: What the model reads; None for Python's documentation.
        memory: Whether peak memory is measured.
        compiled: Whether our steps run as graphs of torch.compile.
    """

    model: str
    contexts: tuple[int, ...]
    config: QuestConfig
    weights: tuple[str, ...] | None
    dtype: str
    rope_factor: float
    steps: int
    block: int
    text: str | None
    memory: bool
    compiled: bool = False

    @property
    def title(self) -> str:
        """What a table and a figure are called."""
        pages = "" if self.config.kv_dtype == "model" else ", pages in eight bits"
        compiled = ", our steps compiled" if self.compiled else ""
        return f"{self.model}, budget {self.config.token_budget:,}{pages}{compiled}"


@dataclass(frozen=True)
class Results:
    """What a run found.

    Attributes:
        rows: Context after context.
        notes: What a reader must know: how contexts were made, what wasn't timed and why.
        described: What the rows depend on.
    """

    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    described: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """What ``--json`` writes."""
        return {"rows": as_json(self.rows), "by_context": summarise(self.rows), "notes": self.notes, **self.described}


def run(plan: Plan, progress: Progress) -> Results:
    """Do what a plan says.

    Raises:
        ConfigError: A context doesn't fit the model.
        DisagreementError: Two that should agree don't.
        QuestKVError: The model can't be loaded, or a package is missing.
    """
    light = ("int4",) if plan.weights is None and _has_torchao() else plan.weights or ()
    kinds = tuple(dict.fromkeys([MODEL_WEIGHTS, *light]))
    loaded = _load(plan, MODEL_WEIGHTS)
    check_contexts(plan, loaded.model.config)
    longest = plan.contexts[-1]
    ids = text_tokens(loaded.tokenizer, plan.text or default_text(), longest + UNTIMED_STEPS + plan.steps)
    with torch.inference_mode(), progress("Filling caches", longest) as on_progress:
        contents = make_contents(loaded.model, ids[:longest], plan.block, on_progress)
    models = {kind: _load(plan, kind).model for kind in kinds}
    for model in models.values():
        make_linear_fast(model)
    rows = []
    with contextlib.ExitStack() as held:
        others, notes = _other_engines(plan, loaded.model.dtype, held)
        filler = held.enter_context(contextlib.closing(llama_cpp.Filler(others))) if others else None
        for context in plan.contexts:
            if filler is not None:
                with progress(f"Filling {llama_cpp.NAME}", context) as on_progress:
                    filler.fill(ids[:context], on_progress)
            tokens = ids[context : context + UNTIMED_STEPS + plan.steps]
            with progress(f"Decoding at {context:,}", 100) as on_progress:
                rows += measure(
                    *(loaded.model, models, contents, plan.config, context, tokens, others, on_progress),
                    compiled=plan.compiled,
                )
    if longest > plan.block:
        notes.insert(
            0,
            f"contexts above {plan.block:,} tokens are synthetic: blocks of {plan.block:,}, each prefilled on its own "
            "at its own positions",
        )
    del models, contents, loaded
    if plan.memory:
        try:
            rows = _with_memory(plan, rows, progress)
        except decode_memory.MeasurementError as error:
            notes.append(f"peak memory wasn't measured: {error}")
    return Results(tuple(rows), tuple(notes), _described(plan, kinds))


def check_contexts(plan: Plan, model_config: Any) -> None:
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


def _load(plan: Plan, weights: str) -> LoadedModel:
    return load_model(
        plan.model,
        dtype=plan.dtype,
        rope_factor=plan.rope_factor,
        attention="sdpa",
        device="cpu",
        weights=weights,
    )


def _has_torchao() -> bool:
    return importlib.util.find_spec("torchao") is not None


def _gguf_file(plan: Plan) -> Path | None:
    """The file of a model that is a GGUF file."""
    found = find_model(plan.model)
    return found if isinstance(found, Path) and found.suffix.lower() == ".gguf" else None


def _other_engines(
    plan: Plan, dtype: torch.dtype, held: contextlib.ExitStack
) -> tuple[list[llama_cpp.LlamaCpp], list[str]]:
    """Llama.cpp with the model's type and with the file's own, closed with `held`; or a note why not."""
    file = _gguf_file(plan)
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
            tokens=plan.contexts[-1] + UNTIMED_STEPS + plan.steps,
            block=plan.block,
            threads=torch.get_num_threads(),
            rope_factor=plan.rope_factor,
        )
        engines.append(held.enter_context(contextlib.closing(engine)))
    return engines, []


def _with_memory(plan: Plan, rows: list[Row], progress: Progress) -> list[Row]:
    """Rows with their peak memory, each implementation's from a process of its own."""
    if not decode_memory.is_possible():
        return rows
    names = list(dict.fromkeys(row.name for row in rows))
    found: dict[str, dict[int, float]] = {}
    with progress("Measuring memory", len(names)) as on_progress:
        for done, name in enumerate(names):
            found[name] = decode_memory.measure(_subject(plan, name))
            on_progress(done + 1)
    return [replace(row, peak_mib=round(found[row.name][row.context], 1)) for row in rows]


def _subject(plan: Plan, name: str) -> Subject:
    implementation, _, weights = name.partition(":")
    model, config = plan.model, plan.config
    if implementation == DENSE:
        config = replace(config, token_budget=1.0)
    if implementation == llama_cpp.NAME:
        file = _gguf_file(plan)
        assert file is not None
        dtype = pick_dtype(plan.dtype, "cpu")
        model = str(file if weights else llama_cpp.convert(file, dtype, model_cache_dir()))
    kinds = {SDPA: "transformers", llama_cpp.NAME: "llama.cpp"}
    return Subject(
        kind=kinds.get(implementation, "questkv"),
        model=model,
        contexts=plan.contexts,
        block=plan.block,
        dtype=plan.dtype,
        rope_factor=plan.rope_factor,
        weights=weights or MODEL_WEIGHTS,
        config=config.to_dict(),
        threads=torch.get_num_threads(),
        compiled=plan.compiled,
    )


def _described(plan: Plan, kinds: tuple[str, ...]) -> dict[str, Any]:
    return {
        "model": {"name": plan.model, "dtype": plan.dtype, "rope_factor": plan.rope_factor, "weights": list(kinds)},
        "steps": plan.steps,
        "block": plan.block,
        "compiled": plan.compiled,
        "config": plan.config.to_dict(),
        "environment": environment(plan.config.backend),
    }
