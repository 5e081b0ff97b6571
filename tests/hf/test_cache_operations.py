"""What transformers and users do to a cache between forwards."""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig

from hf.tiny_models import HYBRID, NAMES, pair, teacher_forced, tokens
from questkv import QuestCache, QuestConfig

SPARSE = QuestConfig(token_budget=16, page_size=4, sink_tokens=4, recent_tokens=4, dense_layers=1)
PURE = tuple(name for name in NAMES if name not in HYBRID)


def fed(name: str, ids: torch.Tensor, steps: list[int] | None = None, **kwargs: Any) -> QuestCache:
    models = pair(name)
    cache = models.cache(SPARSE, **kwargs)
    teacher_forced(models.quest, ids, cache, steps or [ids.shape[1]])
    return cache


def follow(name: str, cache: QuestCache, ids: torch.Tensor) -> torch.Tensor:
    return teacher_forced(pair(name).quest, ids, cache, [1] * ids.shape[1])


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal but for float32 roundings of linear layers that saw other shapes."""
    return bool((a - b).abs().max() < 1e-4 * b.abs().max())


@pytest.mark.parametrize("removed", [0, 1, 3, 4, 9, 30])
@pytest.mark.parametrize("name", PURE)
def test_crop_and_continue_is_as_if_the_tokens_had_never_been(name: str, removed: int) -> None:
    ids, after = tokens(2, 50), tokens(2, 6, seed=9)
    cache = fed(name, ids)
    cache.crop(-removed)
    assert cache.get_seq_length() == 50 - removed
    assert cache.report().tokens == (50 - removed,) * 2
    assert close(follow(name, cache, after), follow(name, fed(name, ids[:, : 50 - removed]), after))


@pytest.mark.parametrize("name", HYBRID)
def test_a_hybrid_cache_that_records_its_past_can_be_cropped(name: str) -> None:
    models, ids, after = pair(name), tokens(2, 34), tokens(2, 6, seed=9)
    cache = fed(name, ids[:, :30])
    cache.activate_past_recording()
    teacher_forced(models.quest, ids[:, 30:], cache, [4])
    cache.crop(-3)
    expected = fed(name, ids[:, :31], [30, 1])
    assert close(follow(name, cache, after), follow(name, expected, after))


@pytest.mark.parametrize("name", HYBRID)
def test_a_hybrid_crop_that_transformers_refuses_leaves_the_cache_as_it_was(name: str) -> None:
    ids, after = tokens(2, 30), tokens(2, 6, seed=9)
    cache = fed(name, ids)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-3)
    assert cache.report().tokens == (30, 30)
    assert torch.equal(follow(name, cache, after), follow(name, fed(name, ids), after))


@pytest.mark.parametrize("removed", [1, -31])
def test_a_crop_of_a_wrong_number_is_refused(removed: int) -> None:
    cache = fed("llama", tokens(1, 30))
    with pytest.raises(ValueError, match=r"\[crop\]"):
        cache.crop(removed)
    assert cache.report().tokens == (30,)


def test_crop_behind_padding_removes_columns() -> None:
    models, ids = pair("llama"), tokens(2, 20)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, 16:] = 0
    cache = models.cache(SPARSE)
    with torch.no_grad():
        models.quest(ids, attention_mask=mask, cache=cache)
    assert cache.report().tokens == (20, 16)
    cache.crop(-6)
    assert cache.report().tokens == (14, 14)
    after = tokens(2, 6, seed=9)
    with torch.no_grad():  # with a mask, so that the columns left are compared with those that the cache remembers
        out = models.quest(after, attention_mask=torch.ones(2, 20, dtype=torch.long), cache=cache).logits
    assert close(out, follow("llama", fed("llama", ids[:, :14]), after))
    assert cache.report().tokens == (20, 20)


@pytest.mark.parametrize("how", [lambda cache: cache.fork(), copy.deepcopy])
@pytest.mark.parametrize("name", NAMES)
def test_a_fork_and_its_origin_do_not_see_each_other(name: str, how: Any) -> None:
    ids, first, second = tokens(2, 30), tokens(2, 12, seed=1), tokens(2, 12, seed=2)
    origin = fed(name, ids)
    held = origin.report().bytes_held
    fork = how(origin)
    assert origin.report().bytes_held == held  # every page is shared
    assert fork.report().pages_held == 0  # its counts start anew
    # In turns, so that each writes while the other holds the same pages.
    outputs = [
        (follow(name, fork, first[:, step : step + 1]), follow(name, origin, second[:, step : step + 1]))
        for step in range(12)
    ]
    of_fork, of_origin = (torch.cat(parts, dim=1) for parts in zip(*outputs, strict=True))
    assert close(of_fork, follow(name, fed(name, ids), first))
    assert close(of_origin, follow(name, fed(name, ids), second))


def test_a_fork_that_goes_gives_its_pages_back() -> None:
    origin = fed("llama", tokens(2, 30))
    held = origin.report().bytes_held
    fork = origin.fork()
    follow("llama", fork, tokens(2, 9))
    assert origin.report().bytes_held > held
    del fork
    gc.collect()
    assert origin.report().bytes_held == held


@pytest.mark.parametrize("name", NAMES)
def test_repeated_rows_are_each_the_row(name: str) -> None:
    ids, after = tokens(2, 30), tokens(6, 6, seed=9)
    cache = fed(name, ids)
    held = cache.report().bytes_held
    cache.batch_repeat_interleave(3)
    assert cache.report().bytes_held == held
    assert cache.report().tokens == (30,) * 6
    expected = follow(name, fed(name, ids.repeat_interleave(3, dim=0)), after)
    assert close(follow(name, cache, after), expected)


@pytest.mark.parametrize("indices", [torch.tensor([2, 0]), torch.tensor([True, False, True])])
@pytest.mark.parametrize("name", NAMES)
def test_selected_rows_are_the_rows(name: str, indices: torch.Tensor) -> None:
    ids, after = tokens(3, 30), tokens(2, 6, seed=9)
    cache = fed(name, ids)
    cache.batch_select_indices(indices)
    assert close(follow(name, cache, after), follow(name, fed(name, ids[indices]), after))


@pytest.mark.parametrize("name", NAMES)
def test_reordered_rows_are_the_rows(name: str) -> None:
    ids, after, order = tokens(3, 30), tokens(3, 6, seed=9), torch.tensor([2, 2, 0])
    cache = fed(name, ids)
    cache.reorder_cache(order)
    assert close(follow(name, cache, after), follow(name, fed(name, ids[order]), after))


def test_reordered_rows_keep_their_padding() -> None:
    models, ids = pair("llama"), tokens(2, 20)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :7] = 0
    cache = models.cache(SPARSE)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        models.quest(ids, attention_mask=mask, position_ids=positions, cache=cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        assert cache.report().tokens == (13, 20)
        swapped = torch.cat([mask[[1, 0]], torch.ones(2, 1, dtype=torch.long)], dim=1)
        out = models.quest(
            ids[:, :1], attention_mask=swapped, position_ids=torch.tensor([[13], [20]]), cache=cache
        ).logits
    assert close(out[1:], follow("llama", fed("llama", ids[:1]), ids[1:, :1]))
    assert close(out[:1], follow("llama", fed("llama", ids[1:, 7:]), ids[:1, :1]))


@pytest.mark.parametrize("name", NAMES)
def test_a_reset_cache_is_as_new_also_for_another_batch(name: str) -> None:
    cache = fed(name, tokens(2, 30))
    follow(name, cache, tokens(2, 3))
    cache.reset()
    assert cache.get_seq_length() == 0
    report = cache.report()
    assert (report.tokens, report.pages_read, report.pages_held, report.bytes_held) == ((), 0, 0, 0)
    ids, after = tokens(3, 21, seed=5), tokens(3, 6, seed=9)
    teacher_forced(pair(name).quest, ids, cache, [21])
    assert close(follow(name, cache, after), follow(name, fed(name, ids), after))


def test_a_report_counts_bytes_of_pages_and_boxes() -> None:
    cache = fed("llama", tokens(2, 30))
    report = cache.report()
    pages, layers, heads, dim, size = 2 * 8, 3, 2, 8, 4
    assert report.box_bytes == pages * layers * heads * (2 * dim + 4)
    assert report.bytes_held == report.box_bytes + pages * layers * heads * 2 * size * dim * 4
    assert report.bytes_reserved >= report.bytes_held
    assert report.share_read == 1.0
    assert "0 of 0 pages read (100.0%)" in str(report)


def test_a_cache_that_goes_gives_its_pages_back() -> None:
    cache = fed("llama", tokens(2, 30))
    (group,) = cache.state.groups.values()
    pool = group.pool
    assert pool.num_held
    del cache, group
    gc.collect()
    assert pool.num_held == 0


def hybrid_config(full: int, layers: int) -> Gemma3TextConfig:
    kinds = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    return Gemma3TextConfig(num_hidden_layers=layers, layer_types=kinds)


@pytest.mark.parametrize(("full", "layers"), [(1, 6), (3, 18), (1, 4)])
def test_a_model_with_few_global_layers_gets_a_warning_that_says_what_to_do(full: int, layers: int) -> None:
    with pytest.warns(UserWarning, match=f"only {full} of this model's {layers} layers are global") as caught:
        QuestCache(hybrid_config(full, layers))
    assert len(caught) == 1
    assert "Use a larger budget" in str(caught[0].message)
    assert "token_budget=1.0" in str(caught[0].message)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("config", [hybrid_config(3, 6), hybrid_config(2, 4), hybrid_config(2, 6), LlamaConfig()])
def test_a_model_with_many_global_layers_gets_no_warning(config: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        QuestCache(config)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_cache_filled_in_inference_mode_goes_on_outside_it(backend: str) -> None:
    models, ids, after = pair("llama"), tokens(2, 50), tokens(2, 6, seed=9)
    config = QuestConfig(token_budget=1.0, page_size=4, backend=backend)
    cache, fresh = (QuestCache(models.quest.config, config) for _ in range(2))
    with torch.inference_mode():
        models.quest(ids, cache=cache)
    with torch.no_grad():
        models.quest(ids, cache=fresh)
        assert close(models.quest(after, cache=cache).logits, models.quest(after, cache=fresh).logits)
