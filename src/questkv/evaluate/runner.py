"""Running a task: each prompt is prefilled once, and every method and budget decodes behind it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from questkv.environment import environment
from questkv.errors import ConfigError, ResultsError
from questkv.evaluate.plan import Plan, Planned
from questkv.evaluate.results import Results
from questkv.evaluate.task import Row, Sample, Task
from questkv.hf.rotary import read_as
from questkv.models import LoadedModel, context_length
from questkv.policies import Context, prefill_context

# Progress is counted in prefilled tokens; a decoded one takes about as long as so many (SmolLM2-135M on two cores).
_DECODED = 16

Progress = Callable[[float, str], None]
"""Called with the share of the work that is done, in [0, 1], and what is being done."""


def describe(task: Task, plan: Plan, loaded: LoadedModel, model: Mapping[str, Any]) -> dict[str, Any]:
    """``run.json``: everything that the results depend on.

    Args:
        task: The task.
        plan: Methods and budgets.
        loaded: The model, for the dtype it really has.
        model: How it was found: ``name``, ``rope_factor``, and ``weights`` where they are light.
    """
    return {
        "task": task.name,
        "settings": task.settings(),
        "model": {**model, "dtype": str(loaded.model.dtype).removeprefix("torch.")},
        "methods": list(plan.methods),
        "budgets": list(plan.budgets),
        "quest": {key: value for key, value in plan.quest.to_dict().items() if key != "token_budget"},
        "environment": environment(plan.quest.backend, loaded.model.device),
    }


def list_samples(task: Task, loaded: LoadedModel) -> list[Sample]:
    """Every prompt of a task, checked before any of them is run.

    Raises:
        ConfigError: There is none, or one doesn't fit the model's context.
    """
    limit = context_length(loaded.model.config)
    asked = max(getattr(task, "lengths", (0,)))
    if limit is not None and asked > limit:  # before a prompt is made that fills the memory
        raise _too_long(task, limit, asked, "tokens")
    samples = list(task.samples(loaded))
    if not samples:
        raise ConfigError(f"[{task.name}] samples: expected at least one, got none")
    assert len({sample.id for sample in samples}) == len(samples)
    longest = max(samples, key=lambda sample: len(sample.ids) + sample.decoded)
    needed = len(longest.ids) + longest.decoded
    if limit is not None and needed > limit:
        raise _too_long(task, limit, needed, "with the question and the answer")
    return samples


def _too_long(task: Task, limit: int, needed: int, what: str) -> ConfigError:
    return ConfigError(
        f"[{task.name}] lengths: expected at most the model's context of {limit:,} tokens, got {needed:,} {what}; "
        f"stretch it with --rope-factor {math.ceil(needed / limit)}, or shorten the prompt"
    )


def run(
    task: Task,
    loaded: LoadedModel,
    plan: Plan,
    samples: Sequence[Sample],
    results: Results,
    on_progress: Progress = lambda share, what: None,
) -> None:
    """Run what isn't done yet; each row is on the disk before the next one is begun.

    Args:
        task: The task.
        loaded: A model whose attention is ``questkv``.
        plan: Methods and budgets.
        samples: What `list_samples` gave.
        results: Where finished rows are and go.
        on_progress: Called often.
    """
    entries = list(plan.entries())
    work = [(sample, [e for e in entries if not results.is_done(sample.id, e.method, e.budget)]) for sample in samples]
    work = [(sample, todo) for sample, todo in work if todo]
    total = sum(_cost(sample, len(todo)) for sample, todo in work)
    done = 0
    for number, (sample, todo) in enumerate(work, start=1):
        label = f"{task.name} {number}/{len(work)}"

        def prefilled(tokens: int, before: int = done, label: str = label) -> None:
            on_progress((before + tokens) / total, f"{label}: prefill")

        prefilled(0)
        # The prompt, the question and every answer are one sequence to a rotary embedding that asks for its length.
        with read_as(loaded.model, len(sample.ids) + sample.decoded):
            context = prefill_context(
                loaded.model,
                torch.tensor([list(sample.ids)]),
                plan.quest,
                observe=any(planned.policy.observes for planned in todo),
                on_progress=prefilled,
            )
            done += _cost(sample, 0)
            for planned in todo:
                on_progress(done / total, f"{label}: {planned.method}{f' {planned.budget}' if planned.budget else ''}")
                results.add(_row(task, loaded, context, sample, planned))
                done += _cost(sample, 1) - _cost(sample, 0)
        del context  # before the next one is made: two would not fit where one does
    on_progress(1.0, task.name)


def _row(task: Task, loaded: LoadedModel, context: Context, sample: Sample, planned: Planned) -> Row:
    began = time.perf_counter()
    scored = task.score(loaded, context, sample, planned.policy)
    if not math.isfinite(scored["score"]):
        raise ResultsError(
            f"[{task.name}] score: expected a finite number, got {scored['score']} ({planned.method}, budget "
            f"{planned.budget}, sample {sample.id}); try --dtype float32"
        )
    return {
        "method": planned.method,
        "budget": planned.budget,
        "length": sample.length,
        "sample": sample.id,
        **scored,
        "prompt_tokens": len(sample.ids),
        **({"lowered": planned.lowered} if planned.lowered else {}),
        "policy": planned.policy.fields(),
        "kv_dtype": context.cache.config.kv_dtype,
        "seconds": round(time.perf_counter() - began, 3),
    }


def _cost(sample: Sample, entries: int) -> int:
    """A sample's work in prefilled tokens: its prompt, and `entries` methods decoding behind it."""
    return len(sample.ids) + entries * _DECODED * max(sample.decoded, 1)
