"""Reading a prompt: ours and others', in turn, after a check that they agree on the next token."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from questkv.benchmark.attention import DENSE
from questkv.benchmark.decode import (
    MODEL_WEIGHTS,
    PAUSE_S,
    SDPA,
    check_direction,
    check_logits,
    row_name,
    tolerance,
)
from questkv.benchmark.readers import Reader, quest_reader, sdpa_reader
from questkv.config import QuestConfig


@dataclass(frozen=True)
class Row:
    """One implementation at one length.

    Attributes:
        name: The implementation, with the weights' type after a colon where it isn't the model's own.
        context: Tokens of the prompt.
        ms: Median of the timed readings.
        tokens_per_s: 1000 times `context` over `ms`.
        peak_mib: Largest resident memory of a process that does nothing else; None where it wasn't measured.
    """

    name: str
    context: int
    ms: float
    tokens_per_s: float
    peak_mib: float | None = None


def measure(
    plain: Any,
    models: Mapping[str, Any],
    config: QuestConfig,
    ids: Sequence[int],
    *,
    chunk: int,
    rounds: int,
    others: Sequence[Reader] = (),
    on_progress: Callable[[int], None] = lambda percent: None,
) -> list[Row]:
    """Check, then time everything on one prompt.

    Args:
        plain: The model as transformers has it, timed with transformers' cache.
        models: The model as we run it, by its weights' type.
        config: Ours. Reading a prompt is dense, whatever the budget.
        ids: The prompt.
        chunk: Tokens of our forwards.
        rounds: Timed readings of each.
        others: Readers of other engines.
        on_progress: Called with how much is done, in percent.

    Raises:
        DisagreementError: Two that should agree don't; nothing is timed then.
    """
    readers = [*_checked(plain, models, config, ids, chunk, others), *others]
    on_progress(100 // (rounds + 1))
    times: dict[str, list[float]] = {reader.name: [] for reader in readers}
    for turn in range(rounds):
        for reader in readers:
            times[reader.name].append(_timed_reading(reader, ids))
        on_progress(100 * (turn + 2) // (rounds + 1))
    return [_row(name, len(ids), spent) for name, spent in times.items()]


def _timed_reading(reader: Reader, ids: Sequence[int]) -> float:
    """Seconds from a prompt to its next token, chosen greedily."""
    time.sleep(PAUSE_S)
    start = time.perf_counter()
    int(reader.read(ids).argmax())
    return time.perf_counter() - start


def _row(name: str, context: int, spent: list[float]) -> Row:
    median = statistics.median(spent)
    return Row(name, context, median * 1e3, context / median)


def _checked(
    plain: Any,
    models: Mapping[str, Any],
    config: QuestConfig,
    ids: Sequence[int],
    chunk: int,
    others: Sequence[Reader],
) -> list[Reader]:
    """Our readers and transformers', which say the same next token, as the others do."""
    found: list[Reader] = []
    for weights, model in models.items():
        ours = quest_reader(row_name(DENSE, weights), model, config, chunk)
        theirs = sdpa_reader(row_name(SDPA, weights), plain if weights == MODEL_WEIGHTS else model)
        expected = theirs.read(ids).float()
        check_logits(ours.name, ours.read(ids).float(), expected, tolerance(expected, model.dtype, config))
        found.append(ours)
        if weights == MODEL_WEIGHTS:
            found.append(theirs)
            for other in others:
                check_direction(other.name, other.read(ids).float(), expected)
    return found


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Per length: by how much each of our rows is faster than every other row."""
    lines = []
    for context in dict.fromkeys(row.context for row in rows):
        here = {row.name: row.ms for row in rows if row.context == context}
        speedups = {
            name: {other: there / ms for other, there in here.items() if other != name}
            for name, ms in here.items()
            if name.startswith(DENSE)
        }
        lines.append({"context": context, "questkv_is_faster_by": speedups})
    return lines
