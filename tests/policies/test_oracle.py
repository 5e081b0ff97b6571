"""The oracles against the true attention in float64."""

from __future__ import annotations

import pytest

from policies.trace import CONFIG, Trace, traces
from questkv.policies import Oracle, OracleTokens

MODELS = ("llama", "llama-mha", "gemma2", "gpt-oss")
PROMPT, STEPS = 57, 13
SIZE = CONFIG.page_size


def choosing(found: dict[int, Trace]) -> list[Trace]:
    return [trace for layer, trace in found.items() if not CONFIG.is_dense_layer(layer)]


def best_pages(mass: list[float], budget: int) -> list[int]:
    """Tokens of the pages: one sink page, two recent ones and the open page forced, as CONFIG says."""
    length = len(mass)
    sealed = (length - 1) // SIZE
    if length <= budget:
        return list(range(length))
    count = (budget - (length - sealed * SIZE)) // SIZE
    between = range(1, sealed - 2)
    heaviest = sorted(between, key=lambda page: -sum(mass[page * SIZE : (page + 1) * SIZE]))[: count - 3]
    pages = sorted({0, sealed - 2, sealed - 1, *heaviest})
    return [page * SIZE + slot for page in pages for slot in range(SIZE)] + list(range(sealed * SIZE, length))


@pytest.mark.parametrize("budget", [16, 29, 65])
@pytest.mark.parametrize("name", MODELS)
def test_the_oracle_reads_the_pages_of_highest_mass(name: str, budget: int) -> None:
    _, _, found = traces(name, Oracle(budget=budget, config=CONFIG), PROMPT, STEPS)
    for trace in choosing(found):
        for step, seen in enumerate(trace.steps):
            every = list(range(PROMPT + step + 1))
            read = [
                best_pages(trace.mean_weights(head, step, every).tolist(), budget) for head in range(trace.kv_heads)
            ]
            assert seen.tokens_read == len(read[0]) <= budget or len(every) <= budget
            trace.check_output(step, read)


@pytest.mark.parametrize("budget", [1, 6, 33, 65])
@pytest.mark.parametrize("name", MODELS)
def test_the_token_oracle_reads_the_tokens_of_highest_mass(name: str, budget: int) -> None:
    _, _, found = traces(name, OracleTokens(budget=budget, dense_layers=1), PROMPT, STEPS)
    for trace in choosing(found):
        for step, seen in enumerate(trace.steps):
            every = list(range(PROMPT + step + 1))
            read = []
            for head in range(trace.kv_heads):
                mass = trace.mean_weights(head, step, every).tolist()
                read.append(sorted(every, key=lambda token: -mass[token])[:budget])
            assert seen.tokens_read == min(budget, len(every))
            trace.check_output(step, read)


def test_dense_layers_read_everything() -> None:
    _, _, found = traces("llama", Oracle(budget=16, config=CONFIG), PROMPT, STEPS)
    for step, seen in enumerate(found[0].steps):
        assert seen.tokens_read == PROMPT + step + 1
        found[0].check_output(step, [list(range(PROMPT + step + 1))] * 2)
