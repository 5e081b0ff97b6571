"""Models whose caches score pages in two levels."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from hf.tiny_models import pair, teacher_forced, tokens
from questkv import QuestConfig, attach
from questkv.errors import ConfigError
from questkv.hf.compile import graph

SPANS = QuestConfig(token_budget=24, page_size=4, sink_tokens=4, recent_tokens=4, dense_layers=1, span_pages=3)


@pytest.mark.parametrize("name", ["llama", "llama-mha", "qwen3", "gemma2"])
@pytest.mark.parametrize("group", ["mean", "softmax_mean", "per_head"])
def test_both_backends_give_the_same_logits_and_read_the_same_pages(name: str, group: str) -> None:
    models, ids = pair(name), tokens(2, 130)
    steps = [100, 9, *[1] * 21]
    config = replace(SPANS, group=group)
    caches = [models.cache(replace(config, backend=backend)) for backend in ("native", "reference")]
    ours, expected = (teacher_forced(models.quest, ids, cache, steps) for cache in caches)
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)
    assert caches[0].report() == caches[1].report()
    assert caches[0].report().share_read < 1


def test_a_budget_for_everything_reads_everything() -> None:
    models, ids = pair("llama"), tokens(2, 60)
    whole = models.cache(QuestConfig(token_budget=1.0, page_size=4))
    expected = teacher_forced(models.quest, ids, whole, [30, *[1] * 30])
    spans = models.cache(QuestConfig(token_budget=1.0, page_size=4, span_pages=3))
    assert torch.equal(teacher_forced(models.quest, ids, spans, [30, *[1] * 30]), expected)


def test_while_all_spans_are_kept_nothing_changes() -> None:
    # 24 tokens are 4 to 5 pages, and those of 16 to 20 pages are scored: up to 83 tokens nothing is left out.
    models, ids = pair("llama"), tokens(2, 120)
    plain, spans = models.cache(replace(SPANS, span_pages=0)), models.cache(replace(SPANS, span_pages=4))
    steps = [40, *[1] * 80]
    a, b = (teacher_forced(models.quest, ids, cache, steps) for cache in (plain, spans))
    assert torch.equal(a[:, :68], b[:, :68])
    assert plain.report().pages_read == spans.report().pages_read


def test_a_cropped_and_reordered_cache_goes_on_as_one_that_never_was() -> None:
    models, ids, after = pair("llama"), tokens(2, 130), tokens(2, 20, seed=4)
    cache = models.cache(SPANS)
    teacher_forced(models.quest, ids, cache, [100, *[1] * 30])
    cache.crop(-21)
    cache.reorder_cache(torch.tensor([1, 0]))
    fresh = models.cache(SPANS)
    teacher_forced(models.quest, ids[[1, 0], :109], fresh, [100, *[1] * 9])
    steps = [1] * 20
    got, expected = (teacher_forced(models.quest, after, one, steps) for one in (cache, fresh))
    assert torch.equal(got, expected)


def test_coded_pages_have_spans_too() -> None:
    models, ids = pair("llama"), tokens(2, 130)
    config = replace(SPANS, kv_dtype="int8")
    steps = [100, 9, *[1] * 21]
    caches = [models.cache(replace(config, backend=backend)) for backend in ("native", "reference")]
    ours, expected = (teacher_forced(models.quest, ids, cache, steps) for cache in caches)
    torch.testing.assert_close(ours, expected, rtol=5e-3, atol=5e-3)
    assert caches[0].report() == caches[1].report()


@pytest.mark.slow
def test_the_compiled_step_has_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    graph._steps.clear()
    models, ids = pair("llama"), tokens(1, 130)
    rest = {"max_new_tokens": 30, "do_sample": False}
    expected = models.quest.generate(ids, cache=models.cache(SPANS), **rest)
    with attach(models.quest, compile=True):
        got = models.quest.generate(ids, cache=models.cache(SPANS), **rest)
    graph._steps.clear()
    torch._dynamo.reset()
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"span_pages": 1}, r"span_pages: expected 0 \(no spans\) or at least 2, got 1"),
        ({"span_pages": -2}, "span_pages: expected an int >= 0, got -2"),
        ({"span_pages": 8, "offload": "host"}, "span_pages: expected 0 with offload='host', got 8"),
    ],
)
def test_impossible_spans_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QuestConfig(**fields)


@pytest.mark.parametrize(
    ("length", "boxes"),
    # Budget 256, pages of 16, K = 15: spans of 8 pages, of which ceil(60 / 8) = 8 are kept.
    [(16 * 64 + 16, 64), (16 * 72 + 16, 9 + 64), (16 * 75 + 16, 9 + 64 + 3), (16 * 2047 + 16, 255 + 64 + 7)],
)
def test_boxes_that_a_step_scores(length: int, boxes: int) -> None:
    assert QuestConfig(token_budget=256, span_pages=8).boxes_at(length) == boxes
    assert QuestConfig(token_budget=256).boxes_at(length) == (length - 1) // 16
