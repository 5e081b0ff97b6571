"""A run of `questkv bench decode`: the model, the other engines that are installed, contexts one after another."""

from __future__ import annotations

import contextlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from questkv.benchmark import llama_cpp, vllm_engine
from questkv.benchmark.decode import (
    MODEL_WEIGHTS,
    SDPA,
    UNTIMED_STEPS,
    Row,
    check_direction,
    measure,
    summarise,
)
from questkv.benchmark.decode_contents import Contents, default_text, make_contents, text_tokens
from questkv.benchmark.decoders import Decoder, ModelDecoder, dynamic_cache
from questkv.benchmark.model_run import ModelPlan, Progress, Results, check_contexts, with_memory
from questkv.hf.linear_layers import make_linear_fast
from questkv.models import context_length


@dataclass(frozen=True)
class Plan(ModelPlan):
    """What is timed.

    Attributes:
        weights: Types of light weights, beside the model's own; None for four bits where torchao is installed.
        steps: Timed tokens of each decoder.
        block: Tokens of the longest prefill.
        compiled: Whether our steps, and vLLM's, run as graphs of torch.compile.
    """

    weights: tuple[str, ...] | None
    steps: int
    block: int
    compiled: bool = False

    @property
    def title(self) -> str:
        """What a table and a figure are called."""
        pages = "" if self.config.kv_dtype == "model" else ", pages in eight bits"
        compiled = ", our steps compiled" if self.compiled else ""
        return f"{self.model}, budget {self.config.token_budget:,}{pages}{compiled}"


def run(plan: Plan, progress: Progress) -> Results[Row]:
    """Do what a plan says.

    Raises:
        ConfigError: A context doesn't fit the model.
        DisagreementError: Two that should agree don't.
        QuestKVError: The model can't be loaded, or a package is missing.
    """
    light = ("int4",) if plan.weights is None and _has_torchao() else plan.weights or ()
    kinds = tuple(dict.fromkeys([MODEL_WEIGHTS, *light]))
    loaded = plan.load()
    check_contexts(plan, loaded.model.config)
    longest = plan.contexts[-1]
    ids = text_tokens(loaded.tokenizer, plan.text or default_text(), longest + UNTIMED_STEPS + plan.steps)
    with torch.inference_mode(), progress("Filling caches", longest) as on_progress:
        contents = make_contents(loaded.model, ids[:longest], plan.block, on_progress)
    models = {kind: plan.load(kind).model for kind in kinds}
    for model in models.values():
        make_linear_fast(model)
    rows = []
    with contextlib.ExitStack() as held:
        room = longest + UNTIMED_STEPS + plan.steps
        others, notes = plan.open_llama_cpp(loaded.model.dtype, tokens=room, block=plan.block, held=held)
        vllm, said = _open_vllm(plan, loaded.model, contents, ids, held)
        notes += said
        filler = held.enter_context(contextlib.closing(llama_cpp.Filler(others))) if others else None
        for context in plan.contexts:
            if filler is not None:
                with progress(f"Filling {llama_cpp.NAME}", context) as on_progress:
                    filler.fill(ids[:context], on_progress)
            elsewhere = _fill_vllm(plan, vllm, loaded.model.config, ids[:context], progress)
            here: list[Decoder] = [*others, *(engine for engine in vllm if engine not in elsewhere)]
            tokens = ids[context : context + UNTIMED_STEPS + plan.steps]
            with progress(f"Decoding at {context:,}", 100) as on_progress:
                rows += measure(
                    *(loaded.model, models, contents, plan.config, context, tokens, here, on_progress),
                    elsewhere=elsewhere,
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
        work = {"block": plan.block, "compiled": plan.compiled}
        rows, failed = with_memory(rows, lambda name: plan.subject(name, **work), progress)
        notes += failed
    described = {**plan.describe(kinds), "steps": plan.steps, "block": plan.block, "compiled": plan.compiled}
    return Results(tuple(rows), summarise(rows), tuple(notes), described)


def _open_vllm(
    plan: Plan, model: Any, contents: Contents, ids: list[int], held: contextlib.ExitStack
) -> tuple[list[vllm_engine.Vllm], list[str]]:
    """VLLM, which says the same as the model behind a block; and what a reader must know of it."""
    engines, notes = plan.open_vllm(model, tokens=len(ids) + 1, held=held, compiled=plan.compiled)
    if not engines:
        return [], notes
    context = _vllm_context(plan, model.config, min(plan.block, plan.contexts[-1]))
    with torch.inference_mode():
        decoder = ModelDecoder(SDPA, model, "sdpa", dynamic_cache(model, contents.at(context)))
        expected = decoder.step(ids[context]).float()
    for engine in engines:
        check_direction(engine.name, engine.read(ids[: context + 1]), expected)
    if plan.contexts[-1] > plan.block:
        notes.append(
            f"{vllm_engine.NAME} reads whole contexts, since its cache can't be filled from outside; behind those "
            f"above {plan.block:,} tokens its logits weren't compared, but behind {context:,}"
        )
    return engines, notes


def _fill_vllm(
    plan: Plan, engines: list[vllm_engine.Vllm], model_config: Any, ids: list[int], progress: Progress
) -> list[vllm_engine.Vllm]:
    """Have vLLM stand behind `ids`; returns the engines that then stand behind other contents than everybody else."""
    context = _vllm_context(plan, model_config, len(ids))
    for engine in engines:
        with progress(f"Filling {engine.name}", len(ids)) as on_progress:
            engine.fill(ids[:context])
            on_progress(len(ids))
    return engines if len(ids) > plan.block or context < len(ids) else []


def _vllm_context(plan: Plan, model_config: Any, context: int) -> int:
    """Tokens behind which vLLM's steps fit the model's context: it has no positions past that."""
    limit = context_length(model_config)
    return context if limit is None else min(context, limit - UNTIMED_STEPS - plan.steps)


def _has_torchao() -> bool:
    return importlib.util.find_spec("torchao") is not None
