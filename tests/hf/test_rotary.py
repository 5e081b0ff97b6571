"""Rotary frequencies that depend on the sequence's length are those of the whole prompt, however it is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf.tiny_models import BY_LENGTH, build, teacher_forced, tokens
from questkv import QuestCache, QuestConfig, attach
from questkv.errors import CacheMismatchError, UnsupportedError
from questkv.hf.compile.structure import Structure
from questkv.hf.prefill import prefill
from questkv.hf.rotary import read_as, reads_alike

FULL = QuestConfig(token_budget=1.0, page_size=4)
ORIGINAL = 150


def one_forward(name: str, ids: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Float64 logits [1, T, V] of sdpa's forward over all tokens, and how far those in float32 are from them."""
    with torch.no_grad():
        single = build(name, "sdpa")(ids).logits.double()
        double = build(name, "sdpa").double()(ids).logits
    return double, float((single - double).abs().max())


def greedy(model: Any, ids: torch.Tensor, steps: int = 10, **kwargs: Any) -> list[int]:
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": steps} | kwargs
    return model.generate(ids, **settings)[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("length", [ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 2 * ORIGINAL])
@pytest.mark.parametrize("name", [*BY_LENGTH, "llama"])
def test_a_prompt_in_chunks_gives_the_logits_of_one_forward(name: str, length: int) -> None:
    model, ids = build(name, "questkv"), tokens(1, length)
    expected, error = one_forward(name, ids)
    got = prefill(model, QuestCache(model.config, FULL), ids, chunk_tokens=64)
    # Attention in chunks adds in another order than sdpa does, with errors of the same size.
    assert (got - expected[:, -1]).abs().max() <= 4 * error


@pytest.mark.parametrize("name", BY_LENGTH)
def test_a_short_prompt_after_a_long_one_has_the_frequencies_of_its_own_length(name: str) -> None:
    model, ids = build(name, "questkv"), tokens(1, ORIGINAL + 30)
    prefill(model, QuestCache(model.config, FULL), tokens(1, 3 * ORIGINAL, seed=1))
    expected, error = one_forward(name, ids)
    got = prefill(model, QuestCache(model.config, FULL), ids, chunk_tokens=64)
    assert (got - expected[:, -1]).abs().max() <= 4 * error


@pytest.mark.parametrize("name", BY_LENGTH)
def test_a_prompt_in_two_calls_must_say_how_long_it_gets(name: str) -> None:
    model, ids = build(name, "questkv"), tokens(1, ORIGINAL + 30)
    cache = QuestCache(model.config, FULL)
    prefill(model, cache, ids[:, :100])
    with pytest.raises(CacheMismatchError, match=r"\[prefill\] input_ids.*100 cached ones, .*, got 80.*total_tokens"):
        prefill(model, cache, ids[:, 100:])
    assert cache.report().tokens == (100,)

    expected, error = one_forward(name, ids)
    cache = QuestCache(model.config, FULL)
    for part in (ids[:, :100], ids[:, 100:]):
        got = prefill(model, cache, part, total_tokens=ids.shape[1])
    assert (got - expected[:, -1]).abs().max() <= 4 * error


@pytest.mark.parametrize("name", BY_LENGTH)
def test_what_the_first_call_said_holds_for_the_next(name: str) -> None:
    model, ids = build(name, "questkv"), tokens(1, ORIGINAL + 30)
    expected, error = one_forward(name, ids)
    cache = QuestCache(model.config, FULL)
    prefill(model, cache, ids[:, :100], total_tokens=ids.shape[1])
    got = prefill(model, cache.fork(), ids[:, 100:])
    assert (got - expected[:, -1]).abs().max() <= 4 * error
    # Keys of a short sequence are not lengthened by saying so afterwards.
    cache = QuestCache(model.config, FULL)
    prefill(model, cache, ids[:, :100])
    with pytest.raises(CacheMismatchError, match=r"a part of 100, got 80, as a part of"):
        prefill(model, cache, ids[:, 100:], total_tokens=ids.shape[1])
    cache.reset()
    got = prefill(model, cache, ids)
    assert (got - expected[:, -1]).abs().max() <= 4 * error


@pytest.mark.parametrize("name", BY_LENGTH)
def test_steps_inside_read_as_have_the_frequencies_of_the_whole(name: str) -> None:
    model, ids = build(name, "questkv"), tokens(1, ORIGINAL + 5)
    kind = model.model.rotary_emb.rope_type
    expected, error = one_forward(name, ids)
    # The inner block, and the one in `prefill`, change nothing.
    with read_as(model, ids.shape[1]), read_as(model, 7):
        got = teacher_forced(model, ids, QuestCache(model.config, FULL), [70, 70, *[1] * 15])
    assert (got - expected).abs().max() <= 4 * error
    with pytest.raises(KeyboardInterrupt), read_as(model, 7):
        raise KeyboardInterrupt
    assert model.model.rotary_emb.rope_type == kind


def test_lengths_read_alike_where_their_frequencies_are_the_same() -> None:
    alike = {
        "llama": (True, True, True),
        "llama-longrope": (True, False, True),
        "phi3-longrope": (True, False, True),
        "phimoe-longrope": (True, False, True),
        "llama-dynamic": (True, False, False),
    }
    for name, expected in alike.items():
        model = build(name, "questkv")
        pairs = ((1, ORIGINAL), (ORIGINAL, ORIGINAL + 1), (2 * ORIGINAL, 3 * ORIGINAL))
        assert tuple(reads_alike(model, *pair) for pair in pairs) == expected


def test_a_compiled_step_sees_that_the_frequencies_are_fixed() -> None:
    model = build("llama-longrope", "questkv")
    structure = Structure(model)
    with read_as(model, 300):
        assert not structure.is_of(model)
    assert structure.is_of(model)


@pytest.mark.parametrize("length", [ORIGINAL - 4, ORIGINAL, ORIGINAL + 1, 2 * ORIGINAL])
@pytest.mark.parametrize("name", BY_LENGTH)
def test_generation_that_grows_past_the_original_context_gives_sdpa_s_tokens(name: str, length: int) -> None:
    ids = tokens(1, length)
    expected = greedy(build(name, "sdpa"), ids)
    # A new model each time: transformers' `dynamic` keeps the frequencies of a longer sequence for the next one.
    model = build(name, "sdpa")
    with attach(model, FULL) as attached:
        assert greedy(model, ids) == expected
        assert attached.cache.report().tokens == (length + 9,)
    model = build(name, "sdpa")
    own = QuestCache(model.config, FULL)
    with attach(model, FULL):
        assert greedy(model, ids, cache=own) == expected
    assert own.report().tokens == (length + 9,)
    # Every step read everything, those before tokens were read anew included.
    assert own.report().pages_read == own.report().pages_held > 0


def test_without_attach_a_dropped_cache_is_named() -> None:
    model = build("phi3-longrope", "questkv")
    for length in (ORIGINAL - 4, 2 * ORIGINAL):
        with pytest.raises(CacheMismatchError, match=r"leaves out the cache.*longer than 150.*inside questkv.attach"):
            greedy(model, tokens(1, length), cache=QuestCache(model.config, FULL))


def test_a_window_that_holds_the_whole_context_is_paged() -> None:
    model, ids = build("phi3-longrope", "questkv"), tokens(1, 60)
    cache = QuestCache(model.config, QuestConfig(token_budget=16, page_size=4, sink_tokens=4, recent_tokens=4))
    with attach(model):
        greedy(model, ids, cache=cache)
    assert cache.report().share_read < 1
    with pytest.raises(UnsupportedError, match="expected a model with full-attention layers"):
        QuestCache(build("phi3-longrope", "questkv", sliding_window=511).config)


def test_tokens_beyond_such_a_window_are_refused() -> None:
    model = build("phi3-longrope", "questkv", sliding_window=512)
    cache = QuestCache(model.config, FULL)
    prefill(model, cache, tokens(1, 512))
    with pytest.raises(UnsupportedError, match=r"\[questkv\] mask: expected at most 512 tokens.*got 513"):
        prefill(model, cache, tokens(1, 1))
    assert cache.report().tokens == (512,)


@pytest.mark.parametrize("length", [ORIGINAL, 2 * ORIGINAL])
def test_layers_of_one_kind_may_have_such_an_embedding(length: int) -> None:
    kinds = {
        "full_attention": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    changes: dict[str, Any] = {"rope_parameters": kinds, "max_position_embeddings": ORIGINAL}
    ids, model = tokens(1, length), build("gemma3", "questkv", **changes)
    with torch.no_grad():
        single = build("gemma3", "sdpa", **changes)(ids).logits[:, -1].double()
        expected = build("gemma3", "sdpa", **changes).double()(ids).logits[:, -1]
    got = prefill(model, QuestCache(model.config, FULL), ids, chunk_tokens=64)
    assert (got - expected).abs().max() <= 4 * (single - expected).abs().max()
