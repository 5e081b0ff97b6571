"""Each eviction method against its rule in plain Python and float64, one token dropped at a time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from policies.trace import CONFIG, Trace, prefilled, traces
from questkv.policies import H2O, TOVA, SnapKV, StreamingLLM, decode, make_policy
from questkv.policies.eviction import EvictionPolicy, lowest

PROMPT, STEPS = 61, 23
MODELS = ("llama", "llama-mha", "gemma2", "gpt-oss", "llama-mixed")
EVICTION = ("streaming_llm", "h2o", "tova", "snapkv")
# Held tokens of every KV head, before a step's own token is added.
Held = list[list[int]]


def evicting(found: dict[int, Trace]) -> list[Trace]:
    return [trace for layer, trace in found.items() if not CONFIG.is_dense_layer(layer)]


def check_every_step(trace: Trace, make_room: Callable[[Held, int], Held], after: Callable[[int, Held], None]) -> None:
    """Replay the decode steps: make room, add the token, attend; `after` sees what was read."""
    held = [list(range(trace.prompt)) for _ in range(trace.kv_heads)]
    for step, seen in enumerate(trace.steps):
        held = [[*tokens, trace.prompt + step] for tokens in make_room(held, trace.prompt + step)]
        assert [sorted(positions) for positions in seen.positions] == held
        assert seen.tokens_read == len(held[0])
        trace.check_output(step, held)
        after(step, held)


def nothing(step: int, held: Held) -> None:
    """For methods whose rule doesn't look at the weights."""


@pytest.mark.parametrize("budget", [7, 20, 66])
@pytest.mark.parametrize("name", MODELS)
def test_streaming_llm_holds_the_first_and_the_last_tokens(name: str, budget: int) -> None:
    _, _, found = traces(name, StreamingLLM(budget=budget, dense_layers=1, sink_tokens=3), PROMPT, STEPS)

    def make_room(held: Held, position: int) -> Held:
        every = range(position)
        few = position < budget
        return [list(every) if few else [*every[:3], *every[position - budget + 4 :]] for _ in held]

    for trace in evicting(found):
        check_every_step(trace, make_room, nothing)


@pytest.mark.parametrize("budget", [2, 9, 20, 66])
@pytest.mark.parametrize("name", MODELS)
def test_h2o_holds_the_heaviest_and_the_last_tokens(name: str, budget: int) -> None:
    _, _, found = traces(name, H2O(budget=budget, dense_layers=1), PROMPT, STEPS)
    for trace in evicting(found):
        mass = [dict(enumerate(trace.prompt_mass(head, 0).tolist())) for head in range(trace.kv_heads)]

        def make_room(held: Held, position: int, mass: list[dict[int, float]] = mass) -> Held:
            for head, tokens in enumerate(held):
                while len(tokens) > budget - 1:
                    old = [token for token in tokens if token <= position - budget // 2]
                    tokens.remove(min(old, key=mass[head].__getitem__))
            return held

        def accumulate(step: int, held: Held, trace: Trace = trace, mass: list[dict[int, float]] = mass) -> None:
            for head, tokens in enumerate(held):
                weights = trace.mean_weights(head, step, tokens).tolist()
                for token, weight in zip(tokens, weights, strict=True):
                    mass[head][token] = mass[head].get(token, 0.0) + weight

        check_every_step(trace, make_room, accumulate)


@pytest.mark.parametrize("budget", [1, 9, 20, 66])
@pytest.mark.parametrize("name", MODELS)
def test_tova_drops_what_the_latest_query_heeds_least(name: str, budget: int) -> None:
    _, _, found = traces(name, TOVA(budget=budget, dense_layers=1), PROMPT, STEPS)
    for trace in evicting(found):
        last = [trace.prompt_mass(head, trace.prompt - 1) for head in range(trace.kv_heads)]
        weight = dict(enumerate(torch.stack(last).mean(dim=0).tolist()))

        def make_room(held: Held, position: int, weight: dict[int, float] = weight) -> Held:
            tokens = held[0]
            while len(tokens) > budget - 1:
                tokens.remove(min(tokens, key=weight.__getitem__))
            return [list(tokens) for _ in held]

        def look(step: int, held: Held, trace: Trace = trace, weight: dict[int, float] = weight) -> None:
            heads = [trace.mean_weights(head, step, tokens) for head, tokens in enumerate(held)]
            weight.clear()
            weight.update(zip(held[0], torch.stack(heads).mean(dim=0).tolist(), strict=True))

        check_every_step(trace, make_room, look)


@pytest.mark.parametrize("budget", [2, 9, 40, 66, 70])
@pytest.mark.parametrize("name", MODELS)
def test_snapkv_chooses_once_and_then_lets_its_window_slide(name: str, budget: int) -> None:
    # 70 leaves room for the window (32 of 61 prompt tokens) in full, the others cut it.
    length = 61 if budget != 70 else 75
    _, _, found = traces(name, SnapKV(budget=budget, dense_layers=1), length, STEPS)
    window = min(32, (budget - 1) // 2)
    for trace in evicting(found):
        chosen = []
        for head in range(trace.kv_heads):
            mass = trace.prompt_mass(head, length - 32)[: length - window].tolist()
            pooled = {token: max(mass[max(token - 3, 0) : token + 4]) for token in range(len(mass))}
            # A pooled maximum is shared by neighbours: of equals the older goes.
            best = sorted(pooled, key=lambda token: (pooled[token], token), reverse=True)
            chosen.append(sorted(best[: max(budget - 1 - window, 0)]))

        def make_room(held: Held, position: int, chosen: Held = chosen) -> Held:
            if position < budget:
                return held
            return [
                [*tokens, *list(range(length - window, position))[len(tokens) - budget + 1 :]]
                if len(tokens) < budget - 1
                else tokens
                for tokens in chosen
            ]

        check_every_step(trace, make_room, nothing)


@pytest.mark.parametrize("method", EVICTION)
def test_dropped_tokens_leave_the_memory(method: str) -> None:
    model, context = prefilled("llama", 250)
    cache = make_policy(method, 16, CONFIG).decode_cache(context)
    prompt = weakref.ref(context.cache)
    bytes_per_token = 2 * 2 * 8 * 4
    del context
    gc.collect()
    assert prompt() is None
    logits = decode(model, cache, torch.full((1, 40), 5))
    assert logits.isfinite().all()
    dense, *evicting_layers = cache.held_layers.values()
    assert len(dense.tokens) == 290
    for layer in evicting_layers:
        assert layer.tokens.keys.shape == layer.tokens.values.shape == (2, 16, 8)
        assert layer.tokens.bytes_held == 16 * bytes_per_token


@pytest.mark.parametrize("method", EVICTION)
def test_a_prompt_shorter_than_the_budget_is_held_whole_until_it_is_full(method: str) -> None:
    model, context = prefilled("llama", 10)
    cache = make_policy(method, 16, CONFIG).decode_cache(context)
    lengths = []
    for _ in range(9):
        decode(model, cache, torch.tensor([[7]]))
        lengths.append(len(cache.held_layers[2].tokens))
    assert lengths == [11, 12, 13, 14, 15, 16, 16, 16, 16]
    assert cache.get_seq_length() == 19


def test_of_equal_priorities_the_older_token_is_the_lowest() -> None:
    priorities = torch.tensor([[2.0, 1.0, 1.0, 0.5, 1.0], [3.0, 3.0, 3.0, 3.0, 3.0]])
    positions = torch.tensor([[0, 9, 4, 7, 5], [5, 4, 3, 1, 2]])
    assert lowest(priorities, positions, 4).tolist() == [[3, 2, 4, 1], [3, 4, 2, 1]]
    assert lowest(priorities[:, [0, 1, 2, 4]], positions[:, [0, 1, 2, 4]], 1).tolist() == [[2], [3]]


def test_eviction_policies_share_their_settings() -> None:
    policy = make_policy("h2o", 64, CONFIG)
    assert isinstance(policy, EvictionPolicy)
    assert policy.fields() == {"budget": 64, "dense_layers": 1}
