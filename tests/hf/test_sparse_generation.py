"""Generation at small budgets: pages are really skipped, by the same rule however tokens come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import questkv.kernels
from hf.tiny_models import NAMES, pad_left, pair, teacher_forced, tokens
from questkv import QuestConfig

SPARSE = QuestConfig(token_budget=16, page_size=4, sink_tokens=4, recent_tokens=4, dense_layers=())
PURE = tuple(name for name in NAMES if name in ("llama", "qwen3", "llama-mixed"))
NEW = 10


def greedy(model: Any, ids: torch.Tensor, **kwargs: Any) -> list[list[int]]:
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW} | kwargs
    return model.generate(ids, **settings)[:, ids.shape[1] :].tolist()


class Spy:
    """Stands in for `kernels.decode` and keeps what every call was asked for and read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[dict[str, Any]] = []
        decode = questkv.kernels.decode

        def spy(q: Any, pages: Any, rows: Any, *how: Any, **kwargs: Any) -> Any:
            out = decode(q, pages, rows, *how, **kwargs)
            self.calls.append(
                {
                    "lengths": rows.lengths.tolist(),
                    "selected": rows.num_selected.tolist(),
                    "read": kwargs["pages_read"].tolist(),
                    "kv_heads": pages.num_kv_heads,
                }
            )
            return out

        monkeypatch.setattr(questkv.kernels, "decode", spy)


@pytest.mark.parametrize("name", NAMES)
def test_the_sparse_path_is_called_and_reads_no_more_than_its_budget(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, spy, ids = pair(name), Spy(monkeypatch), tokens(2, 50)
    cache = models.cache(SPARSE)
    greedy(models.quest, ids, cache=cache)
    paged = len(cache.state.paged_layers)
    # The prompt's last position gives the first token, so decoding is one step less.
    assert len(spy.calls) == paged * (NEW - 1)
    read = held = 0
    for step in range(NEW - 1):
        length = 50 + step + 1
        sealed, in_open_page = (length - 1) // 4, (length - 1) % 4 + 1
        count = (16 - in_open_page) // 4
        for call in spy.calls[step * paged : (step + 1) * paged]:
            assert call["lengths"] == [length] * 2
            assert call["selected"] == [count] * 2
            assert call["read"] == [(count + 1) * call["kv_heads"]] * 2
            assert count * 4 + in_open_page <= 16
            read += 2 * (count + 1) * call["kv_heads"]
            held += 2 * (sealed + 1) * call["kv_heads"]
    report = cache.report()
    assert (report.pages_read, report.pages_held) == (read, held)
    assert report.share_read == read / held < 0.35
    assert report.tokens == (50 + NEW - 1,) * 2


@pytest.mark.parametrize("name", NAMES)
def test_a_small_budget_changes_the_logits_of_dense_attention(name: str) -> None:
    models, ids = pair(name), tokens(1, 80)
    steps = [70, *[1] * 10]
    dense = teacher_forced(models.reference, ids, DynamicCache(config=models.reference.config), steps)
    sparse = teacher_forced(models.quest, ids, models.cache(SPARSE), steps)
    size = dense.abs().max()
    assert (sparse - dense)[:, :70].abs().max() < 1e-4 * size
    # Identical output was the sign of a sparse path that was never called (Quest #25, #27, #28).
    assert (sparse - dense)[:, 70:].abs().amax(dim=-1).min() > 1e-3 * size


@pytest.mark.parametrize("group", ["mean", "softmax_mean", "per_head"])
@pytest.mark.parametrize("name", PURE)
def test_left_padded_rows_give_the_tokens_of_each_alone(name: str, group: str) -> None:
    models, rows = pair(name), [tokens(n, seed=n) for n in (60, 11, 35)]
    config = QuestConfig.from_dict(SPARSE.to_dict() | {"group": group})
    ids, mask = pad_left(rows)
    cache = models.cache(config)
    together = greedy(models.quest, ids, attention_mask=mask, cache=cache)
    pages = [0, 0]
    for row, tokens_together in zip(rows, together, strict=True):
        own = models.cache(config)
        assert greedy(models.quest, row[None], cache=own) == [tokens_together]
        pages = [pages[0] + own.report().pages_read, pages[1] + own.report().pages_held]
    assert [cache.report().pages_read, cache.report().pages_held] == pages


@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_new_tokens_gives_the_logits_of_single_steps(name: str) -> None:
    models, ids = pair(name), tokens(2, 60 + 33)
    run = teacher_forced(models.quest, ids, models.cache(SPARSE), [60, 33])
    single = teacher_forced(models.quest, ids, models.cache(SPARSE), [60, *[1] * 33])
    # The linear layers multiply other shapes; a page chosen otherwise would change the third digit.
    assert (run - single).abs().max() < 1e-4 * single.abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_verified_drafts_give_the_logits_of_single_steps(name: str) -> None:
    """Runs of four drafts of which some are rejected and cropped, as speculation does behind a cached context."""
    models, ids = pair(name), tokens(1, 76)
    expected = teacher_forced(models.quest, ids, models.cache(SPARSE), [45, *[1] * 31])[0, 45:]
    cache, at, rejected = models.cache(SPARSE), 45, 0
    teacher_forced(models.quest, ids[:, :45], cache, [45])
    cache.activate_past_recording()
    got = []
    while at < 72:
        drafts = ids[:, at : at + 4].clone()
        drafts[0, 4 - rejected :] = 1  # rejected by the caller
        logits = teacher_forced(models.quest, drafts, cache, [4])[0]
        got.append(logits[: 4 - rejected])
        cache.crop(-rejected)
        at, rejected = at + 4 - rejected, (rejected + 1) % 4
        assert cache.get_seq_length() == at
    got = torch.cat(got)
    assert (got - expected[: len(got)]).abs().max() < 1e-4 * expected.abs().max()
    assert cache.report().share_read < 0.35


@pytest.mark.parametrize("name", PURE)
def test_beams_that_share_pages_give_the_tokens_of_beams_that_were_copied(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, ids = pair(name), tokens(2, 41)
    shared = greedy(models.quest, ids, cache=models.cache(SPARSE), num_beams=3)

    def reorder_by_copy(self: Any, beam_idx: torch.Tensor) -> None:
        # Every beam's tokens written again from the start, in pages of its own.
        state = self.state
        for group in state.groups.values():
            batch, pool = group.batch, group.pool
            whole = [list(sequence.table) for sequence in batch.sequences]
            kept = [whole[i] for i in beam_idx.tolist()]
            lengths = [batch.lengths[i] for i in beam_idx.tolist()]
            state.settle()
            for sequence, table, length in zip(batch.sequences, kept, lengths, strict=True):
                pages = pool.allocate(len(table))
                for source, target in zip(table, pages, strict=True):
                    pool.copy_page(source, target)
                    for layer in range(pool.num_layers):
                        (a, i), (b, j) = pool._locate(layer, source), pool._locate(layer, target)
                        b.boxes[:, j] = a.boxes[:, i]
                        b.scales[:, j] = a.scales[:, i]
                sequence.table, sequence.length = pages, length
            for table in whole:
                pool.release(table)

    monkeypatch.setattr(questkv.QuestCache, "reorder_cache", reorder_by_copy)
    assert greedy(models.quest, ids, cache=models.cache(SPARSE), num_beams=3) == shared


def test_dense_layers_are_dense_by_default() -> None:
    models = pair("llama")
    cache = models.cache(QuestConfig(token_budget=16, page_size=4, sink_tokens=4, recent_tokens=4))
    greedy(models.quest, tokens(1, 50), cache=cache)
    first, second, third = cache.report().layers
    assert first.pages_read == first.pages_held
    assert second.pages_read == second.pages_held
    assert third.pages_read < third.pages_held
    assert first.pages_held == third.pages_held == 2 * sum((length - 1) // 4 + 1 for length in range(51, 50 + NEW))


@pytest.mark.parametrize("name", NAMES)
def test_a_budget_that_covers_the_context_gives_the_logits_of_a_dense_cache_bit_for_bit(name: str) -> None:
    models, ids = pair(name), tokens(2, 60)
    steps = [40, 3, *[1] * 17]
    covered = QuestConfig(token_budget=60, page_size=4, dense_layers=0, sink_tokens=4, recent_tokens=4)
    dense = QuestConfig(token_budget=1.0, page_size=4, dense_layers=0)
    out = [teacher_forced(models.quest, ids, models.cache(config), steps) for config in (covered, dense)]
    assert torch.equal(out[0], out[1])


def test_a_share_as_budget_grows_with_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    models, spy = pair("llama"), Spy(monkeypatch)
    config = QuestConfig(token_budget=0.5, page_size=4, sink_tokens=4, recent_tokens=4, dense_layers=0)
    greedy(models.quest, tokens(1, 50), cache=models.cache(config), max_new_tokens=30)
    for call in spy.calls:
        (length,), (count,) = call["lengths"], call["selected"]
        in_open_page = (length - 1) % 4 + 1
        assert count * 4 + in_open_page <= 0.5 * length < (count + 1) * 4 + in_open_page
