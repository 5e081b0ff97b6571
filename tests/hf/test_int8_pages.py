"""Models whose sealed pages are in eight bits, against attention over keys and values coded by the formulas."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from hf.tiny_models import Pair, pad_left, pair, teacher_forced, tokens
from kernels.eight_bits import decoded_keys, decoded_values, key_codes, value_codes
from questkv import QuestCache, QuestConfig
from questkv.errors import CacheMismatchError, ConfigError, PoolFullError

S = 4
DENSE = QuestConfig(token_budget=1.0, page_size=S, sparse_prefill=0, kv_dtype="int8")
SPARSE = QuestConfig(
    token_budget=16, page_size=S, sink_tokens=4, recent_tokens=4, dense_layers=1, sparse_prefill=64, kv_dtype="int8"
)


class CodedLayer(DynamicLayer):
    """transformers' own layer, whose past reads as if every page before the new tokens' first were coded."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        past = self.get_seq_length()
        keys, values = (states.clone() for states in super().update(key_states, value_states, *args, **kwargs))
        for row in range(len(keys)):
            for start in range(0, past // S * S, S):
                here = slice(start, start + S)
                keys[row, :, here], values[row, :, here] = coded(keys[row, :, here], values[row, :, here])
        return keys, values


def coded(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What one page [Hkv, S, D] decodes to."""
    largest = keys.double().abs().amax(dim=(1, 2))
    scale = (largest / 127 * (1 + 2.0**-22)).float()
    step = scale.double()[:, None]
    lo, hi = keys.double().amin(dim=1), keys.double().amax(dim=1)
    box = torch.stack([(lo / step).floor(), (hi / step).ceil()], dim=1).to(torch.int8)
    return decoded_keys(key_codes(keys, box, scale), box, scale), decoded_values(*value_codes(values))


def own_cache(models: Pair) -> DynamicCache:
    cache = DynamicCache(config=models.reference.config)
    cache.layers = [CodedLayer() for _ in cache.layers]
    return cache


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal but for float32 roundings, and integer products rounded at 2**-15 of their largest term."""
    return bool((a - b).abs().max() < 2e-3 * b.abs().max())


def fed(name: str, ids: torch.Tensor, steps: list[int] | None = None, config: QuestConfig = SPARSE) -> QuestCache:
    models = pair(name)
    cache = models.cache(config)
    teacher_forced(models.quest, ids, cache, steps or [ids.shape[1]])
    return cache


def follow(name: str, cache: QuestCache, ids: torch.Tensor) -> torch.Tensor:
    return teacher_forced(pair(name).quest, ids, cache, [1] * ids.shape[1])


@pytest.mark.parametrize("name", ["llama", "llama-mha", "qwen3"])
@pytest.mark.parametrize("steps", [[17], [16], [9, 8], [1] * 17, [4, 4, 9], [3, 14]], ids=str)
def test_logits_are_those_of_a_past_coded_by_the_formulas(name: str, steps: list[int]) -> None:
    models, ids = pair(name), tokens(2, 40)
    steps = [*steps, *[1] * (40 - sum(steps))]
    expected = teacher_forced(models.reference, ids, own_cache(models), steps)
    assert close(teacher_forced(models.quest, ids, models.cache(DENSE), steps), expected)


def test_coding_changes_the_logits_at_all() -> None:
    models, ids = pair("llama"), tokens(1, 40)
    steps = [17, *[1] * 23]
    plain = teacher_forced(models.quest, ids, models.cache(QuestConfig(token_budget=1.0, page_size=S)), steps)
    assert not torch.equal(teacher_forced(models.quest, ids, models.cache(DENSE), steps), plain)


def test_greedy_tokens_are_those_of_the_coded_past() -> None:
    models, ids = pair("llama"), tokens(1, 21)
    rest = {"max_new_tokens": 30, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = models.reference.generate(ids, cache=own_cache(models), **rest)
    assert torch.equal(models.quest.generate(ids, cache=models.cache(DENSE), **rest), expected)


def test_a_run_of_new_tokens_gives_what_single_steps_give() -> None:
    models, ids = pair("llama"), tokens(2, 60)
    runs, single = (models.cache(SPARSE) for _ in range(2))
    together = teacher_forced(models.quest, ids, runs, [30, 11, 1, 13, 5])
    alone = teacher_forced(models.quest, ids, single, [30, *[1] * 30])
    # Linear layers see other shapes; a code may then fall to the other side of a half.
    assert close(together, alone)


def test_a_padded_batch_gives_what_each_row_gives_alone() -> None:
    models = pair("llama")
    rows = [tokens(n, seed=n) for n in (33, 20, 8, 5)]
    ids, mask = pad_left(rows)
    cache, after = models.cache(SPARSE), tokens(4, 7, seed=3)
    with torch.no_grad():
        new = ids
        for i in range(8):
            # Keys are coded after the rotary embedding, so a row has the positions that it has alone.
            places = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -new.shape[1] :]
            out = models.quest(new, attention_mask=mask, position_ids=places, cache=cache, use_cache=True).logits
            new = after[:, i : i + 1]
            mask = torch.cat([mask, torch.ones(4, 1, dtype=torch.long)], dim=1)
    for row, own in enumerate(rows):
        assert close(out[row, -1], follow("llama", fed("llama", own[None]), after[row : row + 1])[0, -1])


@pytest.mark.parametrize("removed", [1, 3, 4, 5, 9, 28])
def test_a_crop_that_opens_a_coded_page_goes_on_from_the_decoded_tokens(removed: int) -> None:
    ids, after = tokens(2, 30), tokens(2, 9, seed=9)
    cache = fed("llama", ids)
    kept = 30 - removed
    before = [[cache.keys_values(layer, row) for row in range(2)] for layer in range(3)]
    cache.crop(-removed)
    out = follow("llama", cache, after)
    assert bool(out.isfinite().all())
    for layer in range(3):
        for row in range(2):
            for now, then in zip(cache.keys_values(layer, row), before[layer][row], strict=True):
                whole = kept // S * S  # pages that stayed sealed
                assert torch.equal(now[:, :whole], then[:, :whole])
                # The page that was opened is coded anew: once more at most half a step of its new, wider box.
                moved = (now[:, whole:kept] - then[:, whole:kept]).abs()
                width = now[:, whole : whole + S].amax(dim=1) - now[:, whole : whole + S].amin(dim=1)
                assert kept == whole or bool(moved.amax() <= width.amax() / 255)
    if kept % S == 0:
        # Nothing was decoded, so it is as if the tokens had never been.
        assert close(out, follow("llama", fed("llama", ids[:, :kept]), after))


def test_forks_don_t_see_each_other_and_share_coded_pages() -> None:
    ids, one, other = tokens(2, 29), tokens(2, 9, seed=1), tokens(2, 9, seed=2)
    cache = fed("llama", ids)
    fork = cache.fork()
    held = next(iter(cache.state.groups.values())).pool.num_held
    assert held == 2 * 8
    first, second = follow("llama", cache, one), follow("llama", fork, other)
    assert close(first, follow("llama", fed("llama", ids), one))
    assert close(second, follow("llama", fed("llama", ids), other))


def test_beam_search_gives_every_page_back() -> None:
    models, ids = pair("llama"), tokens(2, 15)
    cache = models.cache(SPARSE)
    models.quest.generate(ids, cache=cache, num_beams=3, max_new_tokens=12, attention_mask=torch.ones_like(ids))
    pool = next(iter(cache.state.groups.values())).pool
    tables = [s.table for group in cache.state.groups.values() for s in group.batch.sequences]
    assert pool.num_held == len({page for table in tables for page in table})
    cache.reset()
    del cache
    gc.collect()
    assert (pool.num_held, pool.num_free) == (0, pool.num_pages)


def test_an_interrupted_forward_leaves_codes_and_open_page_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, after = tokens(1, 30), tokens(1, 9, seed=4)
    cache = fed("llama", ids)
    cache.crop(-7)  # inside a page that was coded
    before = [cache.keys_values(layer) for layer in range(3)]
    last = pair("llama").quest.model.layers[2].self_attn

    def stop(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(last, "forward", stop)
        with pytest.raises(KeyboardInterrupt):
            teacher_forced(pair("llama").quest, tokens(1, 10, seed=5), cache, [10])
    cache.state.settle()
    for layer, then in enumerate(before):
        for now, old in zip(cache.keys_values(layer), then, strict=True):
            assert torch.equal(now, old)
    expected = fed("llama", ids)
    expected.crop(-7)
    assert torch.equal(follow("llama", cache, after), follow("llama", expected, after))


def test_a_pool_that_is_full_leaves_the_tokens_as_they_were() -> None:
    models, ids = pair("llama"), tokens(1, 20)
    cache = models.cache(SPARSE, max_tokens=24)
    teacher_forced(models.quest, ids, cache, [20])
    with pytest.raises(PoolFullError, match="more fit"):
        teacher_forced(models.quest, tokens(1, 30), cache, [30])
    assert cache.report().tokens == (20,)
    assert close(follow("llama", cache, tokens(1, 3)), follow("llama", fed("llama", ids), tokens(1, 3)))


def test_the_report_counts_a_coded_page_s_bytes() -> None:
    cache = fed("llama", tokens(1, 30))
    coded_page = 2 * (S * (8 + 8 + 8) + 2 * 8 + 4)  # Hkv, S, two rows of D codes, step and offset, box and scale
    plain_page = 2 * (S * 2 * 8 * 4 + 2 * 8 + 4)
    assert cache.report().bytes_held == 3 * (7 * coded_page + plain_page)
    assert cache.report().box_bytes == 3 * 8 * 2 * (2 * 8 + 4)


def test_a_fork_in_another_kv_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[fork\] kv_dtype: expected 'int8' as in the shared pages, got 'model'"):
        fed("llama", tokens(1, 9)).fork(QuestConfig(page_size=S))


def test_a_layer_of_another_dtype_is_refused_as_before() -> None:
    cache = fed("llama", tokens(1, 9))
    with pytest.raises(CacheMismatchError, match="use a new cache"):
        cache.state.attend(
            0,
            torch.zeros(1, 6, 1, 8, dtype=torch.bfloat16),
            (torch.zeros(1, 2, 1, 8, dtype=torch.bfloat16),) * 2,
            None,
            None,  # type: ignore[arg-type]
        )
