"""A run of `questkv bench prefill`: the model, the other engines that are installed, prompts one after another."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from questkv.benchmark.decode import MODEL_WEIGHTS
from questkv.benchmark.decode_contents import default_text, text_tokens
from questkv.benchmark.model_run import ModelPlan, Progress, Results, check_contexts, with_memory
from questkv.benchmark.prefill import Row, measure, summarise
from questkv.hf.linear_layers import make_linear_fast


@dataclass(frozen=True)
class Plan(ModelPlan):
    """What is timed.

    Attributes:
        weights: Types of light weights that we read with too, beside the model's own.
        chunk: Tokens of our forwards.
        rounds: Timed readings of each.
    """

    weights: tuple[str, ...]
    chunk: int
    rounds: int

    @property
    def title(self) -> str:
        """What a table and a figure are called."""
        pages = "" if self.config.kv_dtype == "model" else ", pages in eight bits"
        return f"{self.model}, reading a prompt, ours in chunks of {self.chunk:,}{pages}"


def run(plan: Plan, progress: Progress) -> Results[Row]:
    """Do what a plan says.

    Raises:
        ConfigError: A prompt doesn't fit the model.
        DisagreementError: Two that should agree don't.
        QuestKVError: The model can't be loaded, or a package is missing.
    """
    kinds = tuple(dict.fromkeys([MODEL_WEIGHTS, *plan.weights]))
    loaded = plan.load()
    check_contexts(plan, loaded.model.config)
    longest = plan.contexts[-1]
    ids = text_tokens(loaded.tokenizer, plan.text or default_text(), longest)
    models = {kind: plan.load(kind).model for kind in kinds}
    for model in models.values():
        make_linear_fast(model)
    rows = []
    with contextlib.ExitStack() as held, torch.inference_mode():
        llama_cpp, notes = plan.open_llama_cpp(loaded.model.dtype, tokens=longest, block=longest, held=held)
        vllm, not_timed = plan.open_vllm(loaded.model, tokens=longest + 1, held=held)
        notes += not_timed
        for context in plan.contexts:
            with progress(f"Reading {context:,} tokens", 100) as on_progress:
                rows += measure(
                    *(loaded.model, models, plan.config, ids[:context]),
                    chunk=plan.chunk,
                    rounds=plan.rounds,
                    others=[*llama_cpp, *vllm],
                    on_progress=on_progress,
                )
    del models, loaded
    if plan.memory:
        rows, failed = with_memory(rows, lambda name: plan.subject(name, chunk=plan.chunk), progress)
        notes += failed
    described = {**plan.describe(kinds), "chunk": plan.chunk, "rounds": plan.rounds}
    return Results(tuple(rows), summarise(rows), tuple(notes), described)
