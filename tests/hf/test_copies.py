"""Copies of a cache: forks with another configuration, copy, deepcopy; pickle is refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from hf.tiny_models import pair, teacher_forced, tokens
from questkv import QuestCache, QuestConfig
from questkv.errors import ConfigError, UnsupportedError
from questkv.pages import geometry

SMALL = QuestConfig(token_budget=20, page_size=4, sink_tokens=4, recent_tokens=4, dense_layers=1)
# What a fork may change: every value decodes as a cache that had it from the start.
MAY_DIFFER: dict[str, Any] = {
    "token_budget": 0.5,
    "sink_tokens": 8,
    "recent_tokens": 8,
    "dense_layers": (0, 2),
    "optimism": 1.0,
    "group": "per_head",
    "dense_below": 45,
    "sparse_prefill": 1,
    "backend": "reference",
    "offload_cache": 3.0,
}
# What the pages themselves depend on.
MUST_NOT: dict[str, Any] = {
    "page_size": 2,
    "box_dtype": "model",
    "kv_dtype": "int8",
    "span_pages": 2,
    "offload": "host",
}


def fed(config: QuestConfig, ids: torch.Tensor) -> QuestCache:
    cache = pair("llama").cache(config)
    teacher_forced(pair("llama").quest, ids, cache, [ids.shape[1]])
    return cache


def test_every_field_is_in_one_of_the_tables() -> None:
    assert sorted([*MAY_DIFFER, *MUST_NOT]) == sorted(field.name for field in fields(QuestConfig))


@pytest.mark.parametrize("name", MAY_DIFFER)
def test_a_fork_decodes_with_the_configuration_it_was_given(name: str) -> None:
    ids, new, steps = tokens(1, 40), tokens(1, 8, seed=1), [1, 3, 1, 1, 1, 1]
    config = replace(SMALL, **{name: MAY_DIFFER[name]})
    fork = fed(SMALL, ids).fork(config)
    got = teacher_forced(pair("llama").quest, new, fork, steps)
    whole = fed(config, ids)
    assert torch.equal(got, teacher_forced(pair("llama").quest, new, whole, steps))
    assert fork.report().pages_read == whole.report().pages_read


@pytest.mark.parametrize("dense_layers", [0, 3, (0, 2)])
def test_a_fork_of_a_cache_in_host_memory_may_have_other_dense_layers(
    monkeypatch: pytest.MonkeyPatch, dense_layers: Any
) -> None:
    """A layer stays where it was: which one is dense says what is read."""
    monkeypatch.setattr(geometry, "_host_without_gpu", True)
    ids, new = tokens(1, 40), tokens(1, 8, seed=1)
    host = replace(SMALL, offload="host", backend="reference")
    config = replace(host, dense_layers=dense_layers)
    got = teacher_forced(pair("llama").quest, new, fed(host, ids).fork(config), [1] * 8)
    none = replace(config, offload="none")
    assert torch.equal(got, teacher_forced(pair("llama").quest, new, fed(none, ids), [1] * 8))


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("name", MUST_NOT)
def test_a_fork_with_other_pages_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, back: bool) -> None:
    monkeypatch.setattr(geometry, "_host_without_gpu", True)
    configs = [
        replace(SMALL, **{"backend": "reference", name: value}) for value in (getattr(SMALL, name), MUST_NOT[name])
    ]
    if back:
        configs.reverse()
    ids = tokens(1, 40)
    cache = fed(configs[0], ids)
    with pytest.raises(ConfigError, match=rf"^\[fork\] {name}: expected .* as in the shared pages, got "):
        cache.fork(configs[1])
    assert cache.report().tokens == (40,)


def test_a_fork_with_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match=r"\[fork\] config: expected a QuestConfig, got dict"):
        fed(SMALL, tokens(1, 9)).fork({"token_budget": 20})  # type: ignore[arg-type]


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
def test_a_copy_shares_nothing_that_is_written(name: str, how: Callable[[QuestCache], QuestCache]) -> None:
    model, ids, new = pair(name).quest, tokens(2, 30), tokens(2, 6, seed=1)
    cache, whole = pair(name).cache(SMALL), pair(name).cache(SMALL)
    for own in (cache, whole):
        teacher_forced(model, ids, own, [30])
    handle = cache.handle
    other = how(cache)
    assert int(other.handle) != int(handle)
    teacher_forced(model, tokens(2, 5, seed=2), other, [1] * 5)
    assert torch.equal(teacher_forced(model, new, cache, [1] * 6), teacher_forced(model, new, whole, [1] * 6))


@pytest.mark.parametrize("steps", [[], [30], [30, 1]])
@pytest.mark.parametrize(
    "save",
    [
        pickle.dumps,
        lambda cache: torch.save(cache, io.BytesIO()),
        lambda cache: pickle.dumps(cache.layers),
    ],
)
def test_a_cache_refuses_to_be_pickled_before_and_after_a_step(save: Callable[[Any], Any], steps: list[int]) -> None:
    cache = pair("llama").cache(SMALL)
    teacher_forced(pair("llama").quest, tokens(1, sum(steps)), cache, steps) if steps else None
    with pytest.raises(UnsupportedError, match=r"^\[QuestCache\] pickle: expected a cache to stay in its process"):
        save(cache)
    if steps:
        assert cache.report().tokens == (sum(steps),)


@pytest.mark.parametrize("repeats", [1, 3])
def test_linear_attention_layers_are_repeated_and_selected_with_the_pages(repeats: int) -> None:
    models, ids = pair("lfm2"), tokens(3, 30)
    cache = models.cache(SMALL)
    teacher_forced(models.quest, ids, cache, [30])
    cache.batch_repeat_interleave(repeats)
    chosen = torch.tensor([2, 0])
    cache.batch_select_indices(chosen)
    rows = ids.repeat_interleave(repeats, dim=0)[chosen]
    whole = models.cache(SMALL)
    teacher_forced(models.quest, rows, whole, [30])
    new = tokens(2, 6, seed=1)
    got, expected = (teacher_forced(models.quest, new, own, [1] * 6) for own in (cache, whole))
    # Rows of other batches: float32 roundings of the linear layers.
    assert (got - expected).abs().max() < 1e-4 * expected.abs().max()
