"""Models whose sealed pages lie in host memory give the bits of models whose pages lie with them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf.tiny_models import NAMES, pad_left, pair, teacher_forced, tokens
from interpreter import has_triton, patch_once
from pages.lru import Lru
from questkv import QuestCache, QuestConfig
from questkv.errors import ConfigError, UnsupportedError
from questkv.pages import geometry
from questkv.pages.fetched import FetchedPages

S = 4
NONE = QuestConfig(
    token_budget=20, page_size=S, sink_tokens=4, recent_tokens=4, dense_layers=1, sparse_prefill=6, backend="reference"
)
CONFIGS = {
    "a budget": NONE,
    "the smallest budget": replace(NONE, token_budget=12),
    "a share": replace(NONE, token_budget=0.4),
    "everything": replace(NONE, token_budget=1.0),
    "eight bits": replace(NONE, kv_dtype="int8"),
    "boxes in the model's type": replace(NONE, box_dtype="model"),
    "each head": replace(NONE, group="per_head"),
    "shares of heads": replace(NONE, group="softmax_mean", kv_dtype="int8"),
    "dense below": replace(NONE, dense_below=40),
    "no dense layer": replace(NONE, dense_layers=0, offload_cache=1.0),
}


@pytest.fixture(autouse=True)
def _host_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory and the device are both the CPU's; what was never fetched is NaN."""
    monkeypatch.setattr(geometry, "_host_without_gpu", True)
    reserve = FetchedPages.reserve

    def reserve_poisoned(self: FetchedPages, slots: int) -> None:
        before = self.slots
        reserve(self, slots)
        if self.slots != before:
            for tensor in (self.segment.keys, self.segment.values, self.segment.scales, self.segment.value_scales):
                if tensor is not None:
                    tensor.fill_(torch.nan if tensor.is_floating_point() else 255)

    monkeypatch.setattr(FetchedPages, "reserve", reserve_poisoned)


def both(name: str, config: QuestConfig) -> list[QuestCache]:
    """A cache with everything in one place, and one with its pages in host memory."""
    return [pair(name).cache(config), pair(name).cache(replace(config, offload="host"))]


def run(name: str, cache: QuestCache, ids: torch.Tensor, steps: list[int]) -> torch.Tensor:
    return teacher_forced(pair(name).quest, ids, cache, steps)


def poison_unheld(cache: QuestCache) -> None:
    """NaN into every page that no sequence holds, and into the device's copies of such pages."""
    for group in cache.state.groups.values():
        pool = group.pool
        free = [page for page in range(pool.num_pages) if not pool.holders(page)]
        for layer in range(pool.num_layers):
            for page in free:
                segment, at = pool._locate(layer, page)
                for tensor in (segment.keys, segment.values, segment.scales, segment.value_scales):
                    if tensor is not None:
                        tensor[:, at] = torch.nan if tensor.is_floating_point() else 255
            fetched = pool.fetched(layer)
            if fetched is not None and fetched.slots:
                void = torch.isin(fetched._page_of, torch.tensor(free)) | (fetched._page_of < 0)
                for tensor in (fetched.segment.keys, fetched.segment.values):
                    tensor[void] = torch.nan if tensor.is_floating_point() else 255


@pytest.mark.parametrize("what", CONFIGS)
def test_every_budget_and_rule_gives_the_same_bits(what: str) -> None:
    ids = tokens(2, 75)
    # Chunks of a prompt, short runs, single tokens; among them runs that end inside and at the end of a page.
    steps = [37, 3, 1, 1, 5, 9, *[1] * 19]
    none, host = both("llama", CONFIGS[what])
    assert torch.equal(run("llama", none, ids, steps), run("llama", host, ids, steps))
    there, here = none.report(), host.report()
    assert (there.pages_read, there.pages_held, there.layers) == (here.pages_read, here.pages_held, here.layers)
    assert here.host_bytes > 0
    assert there.host_bytes == there.fetched_bytes == there.pages_fetched == 0
    assert 0 < here.hit_rate < 1


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_model_gives_the_same_bits(name: str) -> None:
    ids = tokens(2, 50, seed=3)
    none, host = both(name, NONE)
    steps = [30, 4, *[1] * 16]
    assert torch.equal(run(name, none, ids, steps), run(name, host, ids, steps))
    assert host.report().host_bytes > 0


def test_a_left_padded_batch_of_any_lengths_gives_the_same_bits() -> None:
    models = pair("llama")
    ids, mask = pad_left([tokens(n, seed=n) for n in (41, 6, 23)])
    outs = [
        models.quest.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=24, do_sample=False)
        for cache in both("llama", NONE)
    ]
    assert torch.equal(*outs)


@pytest.mark.parametrize("kv_dtype", ["model", "int8"])
def test_beams_crops_forks_and_reuse_give_the_same_bits(kv_dtype: str) -> None:
    ids, after, other = tokens(2, 50), tokens(2, 14, seed=8), tokens(2, 14, seed=9)
    results = []
    for cache in both("llama", replace(NONE, kv_dtype=kv_dtype)):
        out = [run("llama", cache, ids, [44, *[1] * 6])]
        fork = cache.fork()
        for follow, crop in ((after, 0), (other, 9), (after, 17)):
            cache.crop(-crop)
            poison_unheld(cache)
            out.append(run("llama", cache, follow, [1] * 14))
        cache.reorder_cache(torch.tensor([1, 1, 0]))
        poison_unheld(cache)
        out.append(run("llama", cache, tokens(3, 9, seed=4), [2, *[1] * 7]))
        out.append(run("llama", fork, other, [1] * 14))
        cache.reset()
        poison_unheld(fork)
        out.append(run("llama", fork, after, [14]))
        pools = [group.pool for group in fork.state.groups.values()]
        fork.reset()
        assert all(pool.num_held == 0 for pool in pools)
        results.append(out)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_beam_search_gives_the_same_tokens() -> None:
    models, ids = pair("llama"), tokens(2, 40)
    outs = [
        models.quest.generate(ids, cache=cache, max_new_tokens=20, num_beams=3, do_sample=False, num_return_sequences=2)
        for cache in both("llama", NONE)
    ]
    assert torch.equal(*outs)


def test_an_interrupted_forward_leaves_nothing_behind() -> None:
    ids, results = tokens(1, 60), []
    model = pair("llama").quest
    for cache in both("llama", NONE):
        run("llama", cache, ids[:, :43], [40, 1, 1, 1])
        handle = model.model.layers[2].register_forward_pre_hook(lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        try:
            for width in (2, 12):
                with pytest.raises(KeyboardInterrupt):
                    run("llama", cache, ids[:, 43 : 43 + width], [width])
        finally:
            handle.remove()
        results.append(run("llama", cache, ids[:, 43:], [1] * 17))
    assert torch.equal(*results)


def test_a_page_is_not_fetched_again_for_as_long_as_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated: dict[FetchedPages, list[Lru]] = {}
    expected, slots, fetch = [0, 0], math.ceil(24 / S), FetchedPages.fetch

    def watch(self: FetchedPages, page_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for lru, own in zip(simulated.setdefault(self, [Lru(slots), Lru(slots)]), page_ids.tolist(), strict=True):
            for i, count in enumerate(lru.fetch(set(own) - {-1})):
                expected[i] += count
        return fetch(self, page_ids, **kwargs)

    monkeypatch.setattr(FetchedPages, "fetch", watch)
    cache = both("llama", replace(NONE, offload_cache=1.0, recent_tokens=8, token_budget=24))[1]
    run("llama", cache, tokens(1, 70), [50, *[1] * 20])
    report = cache.report()
    assert len(simulated) == 2  # layers 1 and 2: layer 0 is dense
    assert [report.pages_there, report.pages_fetched] == expected
    assert report.hit_rate == expected[0] / sum(expected)
    assert min(expected) > 0


def test_rows_that_do_not_fit_the_device_together_take_turns() -> None:
    ids = tokens(3, 60)
    config = replace(NONE, sparse_prefill=20, offload_cache=1.0)
    none, host = both("llama", config)
    steps = [40, 12, *[1] * 8]  # 36 rows of 4 pages each, and room for 15
    assert torch.equal(run("llama", none, ids, steps), run("llama", host, ids, steps))
    pool = next(iter(host.state.groups.values())).pool
    assert [pool.fetched(layer).slots if pool.fetched(layer) else None for layer in range(3)] == [None, 15, 15]


def test_dense_layers_stay_with_the_model_and_the_report_says_what_is_where() -> None:
    cache = both("llama", NONE)[1]
    run("llama", cache, tokens(2, 41), [38, 1, 1, 1])
    report, a_page = cache.report(), 2 * 2 * S * 8 * 4  # keys and values of 2 heads in float32
    box = 2 * (2 * 8 + 4)
    assert report.host_bytes == 2 * 2 * 10 * a_page  # 2 layers, 2 sequences, 40 tokens
    assert report.bytes_held == 2 * 3 * 11 * (a_page + box)
    slots = 2 * 2 * 20 // S
    assert report.fetched_bytes == 2 * (slots + 1) * (a_page + box)
    assert report.device_bytes == report.bytes_held - report.host_bytes + report.fetched_bytes
    assert " in host memory, " in str(report)
    assert "host memory" not in str(both("llama", NONE)[0].report())


def test_a_fork_with_another_configuration_reads_the_same_pages() -> None:
    ids, after = tokens(1, 50), tokens(1, 10, seed=2)
    outs = []
    for cache in both("llama", NONE):
        run("llama", cache, ids, [50])
        config = replace(cache.config, token_budget=1.0, dense_layers=(2,))
        outs.append(run("llama", cache.fork(config), after, [1] * 10))
    assert torch.equal(*outs)
    with pytest.raises(ConfigError, match=r"\[fork\] offload: expected 'host' as in the shared pages, got 'none'"):
        cache.fork(NONE)


def test_keys_and_values_are_shown_wherever_they_lie() -> None:
    kept = []
    for cache in both("llama", NONE):
        run("llama", cache, tokens(1, 30), [30])
        kept.append([tensor for layer in range(3) for tensor in cache.keys_values(layer)])
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


@pytest.mark.slow
@pytest.mark.skipif(not has_triton(), reason="triton isn't installed")
@pytest.mark.parametrize("what", ["a budget", "eight bits", "each head"])
def test_the_triton_backend_gives_the_same_bits(what: str) -> None:
    patch_once()
    ids, steps = tokens(1, 27), [25, 1, 1]
    none, host = both("llama", replace(CONFIGS[what], backend="triton", dense_layers=2))
    assert torch.equal(run("llama", none, ids, steps), run("llama", host, ids, steps))
    assert host.report().pages_fetched > 0


def test_on_a_cpu_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "_host_without_gpu", False)
    cache = both("llama", NONE)[1]
    with pytest.raises(
        UnsupportedError, match=r"\[questkv\] offload: expected a model on a GPU for 'host', got one on"
    ):
        run("llama", cache, tokens(1, 5), [5])
