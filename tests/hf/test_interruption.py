"""A forward that stops in the middle: Ctrl-C, an error in a layer, a full pool in one of two groups."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
import torch

from hf.tiny_models import HYBRID, NAMES, build, pair, teacher_forced, tokens
from questkv import QuestCache, QuestConfig
from questkv.errors import PoolFullError


@pytest.fixture(autouse=True)
def _alarms_are_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler) if hasattr(signal, "SIGALRM") else None
    yield
    if before is not None:
        signal.signal(signal.SIGALRM, before)


SPARSE = QuestConfig(token_budget=16, page_size=4, sink_tokens=4, recent_tokens=4, dense_layers=1)
PURE = tuple(name for name in NAMES if name not in HYBRID)


@contextmanager
def interrupted(model: Any, layer: int, part: str) -> Iterator[None]:
    """Raise KeyboardInterrupt before or after a layer's attention."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    attention = model.model.layers[layer]
    attention = attention.conv if hasattr(attention, "conv") else attention.self_attn
    before = part == "before"
    hook = attention.register_forward_pre_hook(stop) if before else attention.register_forward_hook(stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        hook.remove()


@pytest.mark.parametrize(("layer", "part"), [(0, "before"), (0, "after"), (1, "after"), (2, "before")])
@pytest.mark.parametrize("name", PURE)
def test_the_same_forward_again_gives_what_it_would_have_given(name: str, layer: int, part: str) -> None:
    model, ids = pair(name).quest, tokens(2, 60)
    whole, cache = pair(name).cache(SPARSE), pair(name).cache(SPARSE)
    at = 0
    for step in (41, 1, 6, 1, 4, 7):  # prefill, single tokens, sparse runs; pages open and sealed
        piece = ids[:, at : at + step]
        tokens_before = cache.report().tokens
        with interrupted(model, layer, part):
            teacher_forced(model, piece, cache, [step])
        assert cache.get_seq_length() == at
        assert sum(cache.report().tokens) == sum(tokens_before)
        got = teacher_forced(model, piece, cache, [step])
        assert torch.equal(got, teacher_forced(model, piece, whole, [step]))
        at += step
    assert cache.report().tokens == whole.report().tokens
    assert cache.report().bytes_held == whole.report().bytes_held


def test_a_forward_of_other_tokens_may_follow_an_interrupted_one() -> None:
    model, ids = pair("llama").quest, tokens(2, 50)
    whole, cache = pair("llama").cache(SPARSE), pair("llama").cache(SPARSE)
    for own in (whole, cache):
        teacher_forced(model, ids[:, :40], own, [40])
    with interrupted(model, 1, "after"):
        teacher_forced(model, tokens(2, 9, seed=4), cache, [9])
    assert torch.equal(
        teacher_forced(model, ids[:, 40:], cache, [1] * 10), teacher_forced(model, ids[:, 40:], whole, [1] * 10)
    )


@pytest.mark.parametrize("name", ["llama", "llama-mixed"])
def test_another_batch_may_follow_a_first_forward_that_was_interrupted(name: str) -> None:
    model, cache = pair(name).quest, pair(name).cache(SPARSE)
    with interrupted(model, 1, "after"):
        teacher_forced(model, tokens(3, 9), cache, [9])
    assert sum(cache.report().tokens) == 0
    ids = tokens(2, 40)
    got = teacher_forced(model, ids, cache, [30, *[1] * 10])
    assert torch.equal(got, teacher_forced(model, ids, pair(name).cache(SPARSE), [30, *[1] * 10]))


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.crop(-3),
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.fork(),
        lambda cache: cache.reset(),
    ],
)
def test_an_interrupted_cache_can_be_changed(change: Any) -> None:
    model, ids = pair("llama").quest, tokens(2, 40)
    whole, cache = pair("llama").cache(SPARSE), pair("llama").cache(SPARSE)
    for own in (whole, cache):
        teacher_forced(model, ids, own, [40])
    with interrupted(model, 1, "after"):
        teacher_forced(model, tokens(2, 9, seed=4), cache, [9])
    changed, expected = (change(own) or own for own in (cache, whole))
    rows = changed.state.batch_size or 2
    after = tokens(rows, 5, seed=2)
    assert torch.equal(teacher_forced(model, after, changed, [1] * 5), teacher_forced(model, after, expected, [1] * 5))


@pytest.mark.parametrize("fed", [0, 5, 30])
@pytest.mark.parametrize("layer", range(6))
@pytest.mark.parametrize("part", ["before", "after"])
@pytest.mark.parametrize("name", ["gemma3", "lfm2"])
def test_an_interrupted_hybrid_goes_on_as_if_nothing_had_been(name: str, layer: int, part: str, fed: int) -> None:
    models, ids = pair(name), tokens(2, 40)  # layers 1 and 4 are paged, the others aren't
    cache, whole = models.cache(SPARSE), models.cache(SPARSE)
    for own in (cache, whole):
        teacher_forced(models.quest, ids[:, : max(fed, 1)], own, [max(fed, 1)])  # from here on the model is watched
        if not fed:
            own.reset()
    with interrupted(models.quest, layer, part):
        teacher_forced(models.quest, ids[:, fed : fed + 4], cache, [4])
    assert cache.get_seq_length() == fed
    steps = [4, *[1] * (36 - fed)]
    got = teacher_forced(models.quest, ids[:, fed:], cache, steps)
    assert torch.equal(got, teacher_forced(models.quest, ids[:, fed:], whole, steps))


@pytest.mark.parametrize("name", ["gemma3", "lfm2"])
@pytest.mark.parametrize("layer", range(4))
def test_the_first_forward_of_a_model_can_be_interrupted(name: str, layer: int) -> None:
    """Nobody watches it yet."""
    model, ids = build(name, "questkv"), tokens(2, 40)
    cache = QuestCache(model.config, SPARSE)
    with interrupted(model, layer, "after"):
        teacher_forced(model, tokens(2, 20, seed=3), cache, [20])
    got = teacher_forced(model, ids, cache, [30, *[1] * 10])
    assert torch.equal(got, teacher_forced(model, ids, QuestCache(model.config, SPARSE), [30, *[1] * 10]))


@pytest.mark.parametrize("name", HYBRID)
def test_a_hybrid_whose_pool_is_full_keeps_what_it_holds(name: str) -> None:
    models, ids = pair(name), tokens(1, 40)
    cache = models.cache(SPARSE, max_tokens=32)
    teacher_forced(models.quest, ids[:, :8], models.cache(SPARSE), [8])
    teacher_forced(models.quest, ids[:, :31], cache, [31])
    for _ in range(2):
        with pytest.raises(PoolFullError):
            teacher_forced(models.quest, ids[:, 31:34], cache, [3])
        assert cache.report().tokens == (31,)
    whole = models.cache(SPARSE)
    teacher_forced(models.quest, ids[:, :31], whole, [31])
    last = ids[:, 31:32]
    assert torch.equal(teacher_forced(models.quest, last, cache, [1]), teacher_forced(models.quest, last, whole, [1]))


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no interval timer")
@pytest.mark.parametrize("signals", [20, pytest.param(300, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
def test_signals_at_any_time_lose_no_token_and_mix_none(name: str, signals: int) -> None:
    """Decoding goes on at the column that the cache says, as often as Ctrl-C comes."""
    model, ids, random = pair(name).quest, tokens(2, 120), Random(0)
    expected = teacher_forced(model, ids, pair(name).cache(SPARSE), [30, *[1] * 90])[:, 29:]
    begun = time.perf_counter()
    teacher_forced(model, ids, pair(name).cache(SPARSE), [30, *[1] * 90])
    step = (time.perf_counter() - begun) / 91
    came = 0
    while came < signals:
        cache = pair(name).cache(SPARSE)
        teacher_forced(model, ids[:, :30], cache, [30])
        while (at := cache.get_seq_length()) < 120:
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(step / 50, 4 * step))
                while at < 120:
                    got = teacher_forced(model, ids[:, at : at + 1], cache, [1])
                    assert torch.equal(got[:, 0], expected[:, at - 29])
                    at += 1
            except KeyboardInterrupt:
                came += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        assert cache.report().tokens == (120, 120)
