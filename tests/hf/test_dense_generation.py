"""With a budget of everything, every way to generate gives what transformers' own attention gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf.tiny_models import NAMES, Pair, build, pad_left, pair, teacher_forced, tokens
from questkv import QuestConfig

# Pages so small that a page table has many, and sealed and open pages meet every length.
EVERYTHING = QuestConfig(token_budget=1.0, page_size=3, sink_tokens=3, recent_tokens=3)
NEW = 12
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "sampled-return-sequences": {"do_sample": True, "top_k": 20, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "beams-that-end": {"num_beams": 3, "eos_token_id": list(range(1, 20)), "length_penalty": 0.5},
    "beams-return-sequences": {"num_beams": 4, "num_return_sequences": 2},
    "beam-sampling": {"num_beams": 2, "do_sample": True, "top_k": 20},
    "prefill-chunks": {"prefill_chunk_size": 5},
}


def generate(model: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    torch.manual_seed(7)
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW} | kwargs
    return model.generate(ids, **settings)


def both(models: Pair, ids: torch.Tensor, **kwargs: Any) -> tuple[list[list[int]], list[list[int]]]:
    expected = generate(models.reference, ids, **kwargs)
    cache = models.cache(EVERYTHING)
    got = generate(models.quest, ids, cache=cache, **kwargs)
    # The cache was used, and nothing of it was skipped.
    assert cache.get_seq_length() >= ids.shape[1]
    assert cache.report().pages_read == cache.report().pages_held > 0
    return got.tolist(), expected.tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_transformers(name: str, mode: str) -> None:
    got, expected = both(pair(name), tokens(2, 23), **MODES[mode])
    assert got == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_left_padded_batch_gives_the_tokens_of_transformers_and_of_each_row_alone(name: str) -> None:
    models, rows = pair(name), [tokens(n, seed=n) for n in (19, 4, 11)]
    ids, mask = pad_left(rows)
    got, expected = both(models, ids, attention_mask=mask)
    assert got == expected
    for row, together in zip(rows, got, strict=True):
        alone = generate(models.quest, row[None], cache=models.cache(EVERYTHING))
        assert alone[0, len(row) :].tolist() == together[ids.shape[1] :]


@pytest.mark.parametrize("mode", ["beams", "prefill-chunks", "sampled-return-sequences"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_left_padding_goes_with_every_way_to_generate(name: str, mode: str) -> None:
    ids, mask = pad_left([tokens(17), tokens(5, seed=1)])
    got, expected = both(pair(name), ids, attention_mask=mask, **MODES[mode])
    assert got == expected


@pytest.mark.parametrize("name", NAMES)
def test_prompt_lookup_gives_the_tokens_of_transformers(name: str) -> None:
    ids = tokens(1, 6).repeat(1, 4)  # something to look up
    got, expected = both(pair(name), ids, prompt_lookup_num_tokens=4, max_new_tokens=20)
    assert got == expected


@pytest.mark.parametrize("drafts", ["all accepted", "mostly rejected"])
@pytest.mark.parametrize("name", NAMES)
def test_assisted_decoding_gives_the_tokens_of_transformers(name: str, drafts: str) -> None:
    attention = pair(name).reference.config._attn_implementation
    assistant = build(name, attention, seed=0 if drafts == "all accepted" else 1)
    got, expected = both(pair(name), tokens(1, 17), assistant_model=assistant, max_new_tokens=16)
    assert got == expected


@pytest.mark.parametrize("name", NAMES)
def test_turns_on_one_cache_give_the_tokens_of_transformers(name: str) -> None:
    models, answers = pair(name), []
    for model, cache in (
        (models.reference, DynamicCache(config=models.reference.config)),
        (models.quest, models.cache(EVERYTHING)),
    ):
        ids = tokens(1, 14)
        for turn in range(3):
            ids = generate(model, ids, cache=cache, max_new_tokens=5)
            ids = torch.cat([ids, tokens(1, 4, seed=turn + 1)], dim=1)
        answers.append(ids.tolist())
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_as_close_to_float64_as_those_of_transformers(name: str) -> None:
    models, ids = pair(name), tokens(2, 40)
    exact_model = build(name, models.reference.config._attn_implementation).double()
    if name == "gpt-oss":
        exact_model.set_experts_implementation("eager")  # grouped matrix products know no float64
    steps = [17, 1, 1, 6, 1, 1, 1, 12]
    exact = teacher_forced(exact_model, ids, DynamicCache(config=exact_model.config), [40])
    reference = teacher_forced(models.reference, ids, DynamicCache(config=models.reference.config), steps)
    got = teacher_forced(models.quest, ids, models.cache(EVERYTHING), steps)
    own_error = (reference - exact).abs().max()
    # Both compute in float32 in another order: errors of one size. A wrong key or mask would be some 1e5 times that.
    assert (got - exact).abs().max() <= 4 * own_error
    assert own_error < 1e-3


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_to_float64_as_transformers(name: str, dtype: torch.dtype) -> None:
    attention = pair(name).reference.config._attn_implementation
    ids, steps = tokens(1, 30), [20, *[1] * 10]
    # The half-precision weights are the truth, so only the arithmetic differs.
    half = build(name, attention).to(dtype)
    exact_model = build(name, attention).to(dtype).double()
    quest = build(name, "questkv").to(dtype)
    exact = teacher_forced(exact_model, ids, DynamicCache(config=exact_model.config), [30])
    reference = teacher_forced(half, ids, DynamicCache(config=half.config), steps)
    got = teacher_forced(quest, ids, Pair(half, quest).cache(EVERYTHING), steps)
    assert (got.double() - exact).abs().mean() <= 2 * (reference.double() - exact).abs().mean()


def masked_forward(model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits of a batch with any 2-D mask; positions count real tokens."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        return model(ids, attention_mask=mask, position_ids=positions, cache=cache).logits


@pytest.mark.parametrize("kind", ["right", "interior", "left and right"])
# Not hybrid: transformers' sliding window counts columns, so padding inside it changes what a row alone sees.
@pytest.mark.parametrize("name", ["llama", "qwen3", "llama-mixed"])
def test_padding_anywhere_leaves_the_real_tokens_as_each_row_alone(name: str, kind: str) -> None:
    models, width = pair(name), 20
    mask = torch.ones(2, width, dtype=torch.long)
    mask[0, {"right": slice(13, None), "interior": slice(5, 12), "left and right": slice(0, 4)}[kind]] = 0
    if kind == "left and right":
        mask[:, 15:] = 0
    ids = tokens(2, width)
    cache = models.cache(EVERYTHING)
    prompt = masked_forward(models.quest, cache, ids, mask)
    after, more = tokens(2, 3, seed=5), torch.ones(2, 3, dtype=torch.long)
    whole_mask = torch.cat([mask, more], dim=1)
    positions = whole_mask.cumsum(-1)[:, -3:] - 1
    with torch.no_grad():
        continued = models.quest(after, attention_mask=whole_mask, position_ids=positions, cache=cache).logits
    for row in range(2):
        real = mask[row].bool()
        alone = torch.cat([ids[row, real], after[row]])[None]
        expected = teacher_forced(
            models.reference, alone, DynamicCache(config=models.reference.config), [alone.shape[1]]
        )
        scale = expected.abs().max()
        # Some hundred float32 roundings; see the test against float64 above.
        assert (prompt[row, real] - expected[0, : int(real.sum())]).abs().max() < 1e-4 * scale
        assert (continued[row] - expected[0, int(real.sum()) :]).abs().max() < 1e-4 * scale


def test_a_chunk_in_which_no_row_has_a_token_changes_nothing() -> None:
    models, ids = pair("llama"), tokens(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[:, :5] = 0
    logits = []
    for pieces in ([5, 7], [12]):
        cache, at, out = models.cache(EVERYTHING), 0, None
        for piece in pieces:
            at += piece
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, at - piece : at]
            with torch.no_grad():
                out = models.quest(
                    ids[:, at - piece : at], attention_mask=mask[:, :at], position_ids=positions, cache=cache
                ).logits[:, -1]
        assert cache.report().tokens == (7, 7)
        logits.append(out)
    assert torch.allclose(logits[0], logits[1], rtol=0, atol=1e-4 * float(logits[1].abs().max()))
