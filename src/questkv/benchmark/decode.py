"""Whole tokens: a model's decode step on our caches and on others', in turn, after a check that they agree."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from questkv.benchmark.attention import DENSE, SPARSE, DisagreementError
from questkv.benchmark.decode_contents import Contents
from questkv.benchmark.decoders import Decoder, ModelDecoder, dynamic_cache, quest_cache
from questkv.config import QuestConfig

SDPA = "transformers-sdpa"
MODEL_WEIGHTS = "model"
# One token for the check, one that nobody times.
UNTIMED_STEPS = 2
# Threads that finished a step spin a while before they sleep, and would take the next one's cores.
PAUSE_S = 0.005
# Eight bits change an attention output by .007 (docs/method.md); over some 30 layers that adds up like a random walk.
_CODED = 0.05
# Others round weights, keys and products in their own ways; a wrong position or scale gives less than .9.
_SAME_DIRECTION = 0.98


@dataclass(frozen=True)
class Row:
    """One implementation at one context.

    Attributes:
        name: The implementation, with the weights' type after a colon where it isn't the model's own.
        context: Tokens before the first step.
        ms_per_token: Median of the timed steps.
        min_ms: The fastest of them.
        tokens_per_s: 1000 over `ms_per_token`.
        peak_mib: Largest resident memory of a process that does nothing else; None where it wasn't measured.
    """

    name: str
    context: int
    ms_per_token: float
    min_ms: float
    tokens_per_s: float
    peak_mib: float | None = None


def row_name(implementation: str, weights: str) -> str:
    """A row's name."""
    return implementation if weights == MODEL_WEIGHTS else f"{implementation}:{weights}"


def measure(
    plain: Any,
    models: Mapping[str, Any],
    contents: Contents,
    config: QuestConfig,
    context: int,
    tokens: Sequence[int],
    others: Sequence[Decoder] = (),
    on_progress: Callable[[int], None] = lambda percent: None,
    *,
    elsewhere: Sequence[Decoder] = (),
    compiled: bool = False,
) -> list[Row]:
    """Check, then time everything at one context.

    Args:
        plain: The model as transformers has it, which made the contents and is timed with transformers' cache.
        models: The model as we run it, by its weights' type.
        contents: What the caches hold.
        config: Ours; its budget is the sparse steps'.
        context: Tokens before the first step.
        tokens: The tokens to decode, `UNTIMED_STEPS` and at least one more: every step has another one.
        others: Decoders that stand at `context` already.
        on_progress: Called with how much is done, in percent.
        elsewhere: Decoders that stand at `context`, behind other contents, and were checked by the caller.
        compiled: Whether our steps run as graphs of torch.compile.

    Raises:
        DisagreementError: Two that should agree don't; nothing is timed then.
    """
    with torch.inference_mode():
        decoders = [*_checked(plain, models, contents, config, context, tokens[0], others, compiled), *others]
        for decoder in elsewhere:
            decoder.step(tokens[0])
        decoders += elsewhere
        times: dict[str, list[float]] = {decoder.name: [] for decoder in decoders}
        for turn, token in enumerate(tokens[1:]):
            for decoder in decoders:
                seconds = _timed_step(decoder, token)
                if turn:
                    times[decoder.name].append(seconds)
            on_progress(100 * (turn + 1) // (len(tokens) - 1))
    return [_row(name, context, spent) for name, spent in times.items()]


def _timed_step(decoder: Decoder, token: int) -> float:
    """Seconds from a token to the next one, chosen greedily."""
    decoder.prepare()
    time.sleep(PAUSE_S)
    start = time.perf_counter()
    int(decoder.step(token).argmax())
    return time.perf_counter() - start


def _row(name: str, context: int, spent: list[float]) -> Row:
    median = statistics.median(spent)
    return Row(name, context, median * 1e3, min(spent) * 1e3, 1 / median)


def _checked(
    plain: Any,
    models: Mapping[str, Any],
    contents: Contents,
    config: QuestConfig,
    context: int,
    token: int,
    others: Sequence[Decoder],
    compiled: bool,
) -> list[Decoder]:
    """Our decoders and transformers', each one checked token further than `context`."""
    layers = contents.at(context)
    held = quest_cache(plain, replace(config, token_budget=1.0), layers)
    found: list[Decoder] = []
    for weights, model in models.items():
        dense = ModelDecoder(row_name(DENSE, weights), model, "questkv", held.fork(), compiled=compiled)
        whole = ModelDecoder(
            f"{row_name(SPARSE, weights)} with a budget of everything",
            model,
            "questkv",
            held.fork(replace(config, token_budget=context + config.page_size)),
            compiled=compiled,
        )
        own = plain if weights == MODEL_WEIGHTS else model
        theirs = ModelDecoder(row_name(SDPA, weights), own, "sdpa", dynamic_cache(own, layers))
        expected = _logits(theirs, token)
        ours = _logits(dense, token)
        check_logits(dense.name, ours, expected, tolerance(expected, model.dtype, config))
        check_logits(whole.name, _logits(whole, token), ours, 0.0)
        sparse = ModelDecoder(row_name(SPARSE, weights), model, "questkv", dense.cache.fork(config), compiled=compiled)
        found += [sparse, dense]
        if weights == MODEL_WEIGHTS:
            found.append(theirs)
            for other in others:
                check_direction(other.name, _logits(other, token), expected)
    return found


def _logits(decoder: Decoder, token: int) -> torch.Tensor:
    decoder.prepare()
    return decoder.step(token).float()


def tolerance(expected: torch.Tensor, dtype: torch.dtype, config: QuestConfig) -> float:
    """What our dense logits may differ from transformers'.

    Each of some 30 layers rounds its output to the dtype, which adds up like a random walk over a few roundings each.
    """
    largest = float(expected.abs().max())
    coded = _CODED * largest if config.kv_dtype == "int8" else 0.0
    return 16 * torch.finfo(dtype).eps * largest + coded


def check_logits(name: str, logits: torch.Tensor, expected: torch.Tensor, allowed: float) -> None:
    """Compare logits [vocabulary].

    Raises:
        DisagreementError: They differ by more than is allowed.
    """
    error = float((logits - expected).abs().max())
    if not error <= allowed:
        raise DisagreementError(f"[bench] {name}: expected the same logits within {allowed:.1e}, got {error:.1e} off")


def check_direction(name: str, logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare another engine's logits [vocabulary] with transformers': the cosine between them, means taken off.

    Raises:
        DisagreementError: They point elsewhere.
    """
    cosine = float(torch.cosine_similarity(logits - logits.mean(), expected - expected.mean(), dim=0))
    if not cosine >= _SAME_DIRECTION:
        raise DisagreementError(
            f"[bench] {name}: expected transformers' logits (cosine at least {_SAME_DIRECTION}), got {cosine:.3f}"
        )


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Per context: by how much each of our sparse rows is faster than every other row."""
    lines = []
    for context in dict.fromkeys(row.context for row in rows):
        here = {row.name: row.ms_per_token for row in rows if row.context == context}
        speedups = {
            name: {other: there / ms for other, there in here.items() if not other.startswith(SPARSE)}
            for name, ms in here.items()
            if name.startswith(SPARSE)
        }
        lines.append({"context": context, "sparse_is_faster_by": speedups})
    return lines
