"""Looking into a cache: `QuestCache.keys_values` and `QuestCache.observe`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf.test_sparse_attention import SCALE, States, attend, new_cache, padded
from hf.tiny_models import pad_left, pair, tokens
from questkv import QuestCache, QuestConfig
from questkv.errors import CacheMismatchError
from questkv.kernels import Softmax

DENSE = QuestConfig(token_budget=1.0)


def same(found: tuple[torch.Tensor, torch.Tensor], states: States) -> bool:
    return torch.equal(found[0], states.k) and torch.equal(found[1], states.v)


def test_keys_and_values_come_back_in_token_order_over_segments_and_copied_pages() -> None:
    # 400 tokens in pages of 4 need two segments; the fork copies the page that both write into.
    states = States.random(413)
    cache = new_cache()
    for start, end in ((0, 300), (300, 401), (401, 402)):
        attend(cache, 0, [states.part(start, end)])
    other = cache.fork()
    attend(cache, 0, [states.part(402, 413)])
    elsewhere = States.random(413, seed=1).part(402, 413)
    attend(other, 0, [elsewhere])
    assert same(cache.keys_values(0), states)
    assert torch.equal(other.keys_values(0)[0], torch.cat([states.k[:, :402], elsewhere.k], dim=1))
    cache.crop(-11)
    assert same(cache.keys_values(0), states.part(0, 402))


def test_each_sequence_is_given_without_its_padding() -> None:
    batch = [States.random(length, seed=length) for length in (23, 9, 16)]
    mask = torch.zeros(3, 23, dtype=torch.bool)
    for row, states in enumerate(batch):
        mask[row, -states.q.shape[1] :] = True
    cache = new_cache()
    attend(cache, 0, [padded(states, 23) for states in batch], mask)
    for row, states in enumerate(batch):
        assert same(cache.keys_values(0, row), states)
    with pytest.raises(IndexError):
        cache.keys_values(0, 3)


def test_a_layer_without_tokens_or_pages_is_refused() -> None:
    cache = new_cache()
    with pytest.raises(CacheMismatchError, match="paged layer"):
        cache.keys_values(0)
    quest = pair("gemma3")
    cache = quest.cache(DENSE)
    quest.quest(tokens(1, 9), cache=cache, use_cache=True)
    with pytest.raises(CacheMismatchError, match="paged layer"):
        cache.keys_values(0)
    assert cache.keys_values(1)[0].shape == (2, 9, 8)


@pytest.mark.parametrize("steps", [[1, 1, 1], [30, 1, 5], [30, 40, 1]])
def test_the_observer_sees_each_layers_queries_and_all_that_they_may_read(steps: list[int]) -> None:
    states = States.random(sum(steps))
    cache = new_cache(DENSE)
    seen: list[tuple[int, torch.Tensor, tuple[torch.Tensor, torch.Tensor], Softmax]] = []

    def look(layer: int, query: torch.Tensor, softmax: Softmax) -> None:
        seen.append((layer, query, cache.keys_values(layer), softmax))

    at = 0
    with cache.observe(look):
        for step in steps:
            attend(cache, 0, [states.part(at, at + step)])
            at += step
            layer, query, held, softmax = seen[-1]
            assert layer == 0
            assert softmax == Softmax(SCALE)
            assert torch.equal(query[0], states.q[:, at - step : at])
            assert same(held, states.part(0, at))
    assert len(seen) == len(steps)


def test_every_paged_layer_is_seen_and_no_other() -> None:
    quest = pair("gemma2")
    ids, mask = pad_left([tokens(17), tokens(5)])
    cache = quest.cache(DENSE)
    seen: list[tuple[int, tuple[int, ...], float | None]] = []
    with cache.observe(lambda layer, query, softmax: seen.append((layer, tuple(query.shape), softmax.softcap))):
        quest.quest(ids, attention_mask=mask, cache=cache, use_cache=True)
    assert seen == [(1, (2, 6, 17, 8), 2.0), (3, (2, 6, 17, 8), 2.0)]


def test_observation_changes_nothing_and_ends_with_its_block() -> None:
    model = pair("llama").quest
    config = QuestConfig(token_budget=16, page_size=4, sink_tokens=4, recent_tokens=4)
    ids = tokens(1, 60)

    def run(cache: QuestCache) -> torch.Tensor:
        with torch.no_grad():
            model(ids[:, :50], cache=cache, use_cache=True)
            return model(ids[:, 50:], cache=cache, use_cache=True).logits

    calls: list[int] = []

    def count(layer: int, *_: Any) -> None:
        calls.append(layer)

    cache = QuestCache(model.config, config)
    with cache.observe(count):
        observed = run(cache)
        with cache.observe(lambda *_: None):
            run(cache)
        forked = cache.fork()
        run(forked)
    run(cache)
    assert calls == [0, 1, 2] * 2
    assert torch.equal(observed, run(QuestCache(model.config, config)))


def test_an_observer_that_fails_leaves_the_cache_as_it_was() -> None:
    model = pair("llama").quest
    cache = pair("llama").cache(DENSE)
    ids = tokens(1, 20)
    with torch.no_grad():
        model(ids[:, :12], cache=cache, use_cache=True)

    def fail(layer: int, *_: Any) -> None:
        if layer == 1:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"), cache.observe(fail):
        model(ids[:, 12:15], cache=cache, use_cache=True)
    assert cache.get_seq_length() == 12
    with torch.no_grad():
        after = model(ids[:, 12:], cache=cache, use_cache=True).logits
        whole = pair("llama").cache(DENSE)
        model(ids[:, :12], cache=whole, use_cache=True)
        assert torch.equal(after, model(ids[:, 12:], cache=whole, use_cache=True).logits)
