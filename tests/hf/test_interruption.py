"""A forward that stops in the middle: Ctrl-C, an error in a layer, a full pool in one of two groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hf.tiny_models import HYBRID, NAMES, pair, teacher_forced, tokens
from questkv import QuestConfig
from questkv.errors import CacheMismatchError, PoolFullError

SPARSE = QuestConfig(token_budget=16, page_size=4, sink_tokens=4, recent_tokens=4, dense_layers=1)
PURE = tuple(name for name in NAMES if name not in HYBRID)


@contextmanager
def interrupted(model: Any, layer: int, part: str) -> Iterator[None]:
    """Raise KeyboardInterrupt before or after a layer's attention."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    attention = model.model.layers[layer].self_attn
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
# Not before the first layer and not after the last: nothing is cached then, or everything.
@pytest.mark.parametrize(
    ("layer", "part"),
    [
        (0, "after"),
        (1, "before"),
        (1, "after"),
        (2, "after"),
        (3, "before"),
        (4, "before"),
        (4, "after"),
        (5, "before"),
    ],
)
def test_an_interrupted_hybrid_says_so_instead_of_answering_wrongly(layer: int, part: str, fed: int) -> None:
    models, ids = pair("gemma3"), tokens(2, 40)  # layers 1 and 4 are paged, the others slide
    cache = models.cache(SPARSE)
    if fed:
        teacher_forced(models.quest, ids[:, :fed], cache, [fed])
    with interrupted(models.quest, layer, part):
        teacher_forced(models.quest, ids[:, fed : fed + 4], cache, [4])
    with pytest.raises(CacheMismatchError, match=r"interrupted; call cache.reset\(\)"):
        teacher_forced(models.quest, ids[:, fed : fed + 4], cache, [4])
    cache.reset()
    got = teacher_forced(models.quest, ids, cache, [30, *[1] * 10])
    assert torch.equal(got, teacher_forced(models.quest, ids, models.cache(SPARSE), [30, *[1] * 10]))


@pytest.mark.parametrize("name", HYBRID)
def test_a_hybrid_whose_pool_is_full_says_so_instead_of_answering_wrongly(name: str) -> None:
    models, ids = pair(name), tokens(1, 40)
    cache = models.cache(SPARSE, max_tokens=32)
    teacher_forced(models.quest, ids[:, :32], cache, [32])
    with pytest.raises(PoolFullError):
        teacher_forced(models.quest, ids[:, 32:33], cache, [1])
    with pytest.raises(CacheMismatchError, match="interrupted"):
        teacher_forced(models.quest, ids[:, 32:33], cache, [1])
    cache.reset()
    teacher_forced(models.quest, ids[:, :32], cache, [32])
    assert cache.report().tokens == (32,)
