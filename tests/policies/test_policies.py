"""What holds for every method: names, budgets, whole budgets, contexts that stay as they were, refusals."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from hf.tiny_models import build, pair, teacher_forced, tokens
from policies.trace import CONFIG, prefilled
from questkv import QuestCache, QuestConfig
from questkv.errors import CacheMismatchError, ConfigError, UnsupportedError
from questkv.kernels import Softmax
from questkv.policies import METHODS, Policy, decode, greedy, make_policy, policy_class, prefill_context
from questkv.policies.budget import fit

HELD = tuple(method for method in METHODS if method not in ("full", "quest"))
MODELS = ("llama", "llama-mha", "qwen3", "gemma2", "gemma3", "gpt-oss", "llama-mixed")


def policy(method: str, budget: int, config: QuestConfig = CONFIG) -> Policy:
    return make_policy(method, budget if policy_class(method).uses_budget else None, config)


@pytest.mark.parametrize("name", MODELS)
def test_a_budget_that_covers_the_length_gives_the_full_cache(name: str) -> None:
    model, context = prefilled(name, 45)
    question = tokens(1, 9, seed=2)
    expected = teacher_forced(pair(name).reference, torch.cat([context.ids, question], dim=1), None, [54])[0, 45:]
    for method in METHODS:
        logits = decode(model, policy(method, 54).decode_cache(context), question)
        assert logits.dtype == torch.float32
        # The tiny models' logits are of order 10; see tests/hf/test_dense_generation.py.
        torch.testing.assert_close(logits, expected.float(), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("method", METHODS)
def test_a_budget_below_the_length_changes_the_logits(method: str) -> None:
    model, context = prefilled("llama", 90)
    question = tokens(1, 5, seed=2)
    full = decode(model, policy("full", 0).decode_cache(context), question)
    logits = decode(model, policy(method, 16).decode_cache(context), question)
    assert ((logits - full).abs().max() > 0.01) == (method != "full")


@pytest.mark.parametrize("budget", [16, 23, 40])
@pytest.mark.parametrize("method", [method for method in METHODS if method != "full"])
def test_no_step_reads_more_than_the_budget(method: str, budget: int) -> None:
    model, context = prefilled("llama", 83)
    cache = policy(method, budget).decode_cache(context)
    for length in range(84, 95):
        before = cache.report() if isinstance(cache, QuestCache) else None
        decode(model, cache, torch.tensor([[3]]))
        if before is not None:
            pages = cache.report().layers[2].pages_read - before.layers[2].pages_read
            read = (pages // 2 - 1) * 4 + (length - 1) % 4 + 1  # of 2 KV heads; all but the open page are whole
        else:
            read = cache.held_layers[2].tokens_read
        # Methods that take whole pages leave a rest of less than a page unused.
        assert budget - 4 < read <= budget
        assert read == budget or method in ("quest", "oracle")


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_decoding_leaves_the_context_as_it_was(name: str) -> None:
    model, context = prefilled(name, 70)
    question = tokens(1, 6, seed=4)
    before = {layer: [states.clone() for states in context.cache.keys_values(layer)] for layer in context.paged_layers}
    masses = {layer: statistics.accumulated.clone() for layer, statistics in context.statistics.items()}
    held = context.cache.report().bytes_held
    first = {method: decode(model, policy(method, 16).decode_cache(context), question) for method in METHODS}
    for method in reversed(METHODS):
        again = decode(model, policy(method, 16).decode_cache(context), question)
        assert torch.equal(again, first[method]), method
    assert context.cache.get_seq_length() == 70
    assert context.cache.report().bytes_held == held
    for layer, states in before.items():
        for state, kept in zip(context.cache.keys_values(layer), states, strict=True):
            assert torch.equal(state, kept)
        assert torch.equal(context.statistics[layer].accumulated, masses[layer])


@pytest.mark.parametrize("method", HELD)
def test_a_run_of_tokens_is_as_many_single_steps(method: str) -> None:
    _, context = prefilled("llama", 60)
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, heads, 7, 8, generator=generator) for heads in (6, 2, 2))
    softmax = Softmax(0.4)
    outs = []
    for pieces in ([7], [1] * 7, [3, 4]):
        layer = policy(method, 20).decode_cache(context).layers[2]
        rows = []
        for piece in torch.arange(7).split(pieces):
            layer.update(k[:, :, piece], v[:, :, piece])
            rows.append(layer.attend(q[:, :, piece], None, softmax))
        outs.append(torch.cat(rows, dim=1))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("method", METHODS)
def test_generate_gives_the_tokens_of_greedy(method: str) -> None:
    model, context = prefilled("gemma3", 50)
    question = tokens(1, 3, seed=6)
    expected = greedy(model, policy(method, 16).decode_cache(context), question, 8)
    cache = policy(method, 16).decode_cache(context)
    decode(model, cache, question[:, :-1])
    prompt = torch.cat([context.ids, question], dim=1)
    out = model.generate(prompt, cache=cache, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=8)
    assert out[0, prompt.shape[1] :].tolist() == expected
    assert len(set(expected)) > 1


def test_greedy_ends_at_a_stop_token_and_leaves_it_out() -> None:
    model, context = prefilled("llama", 50)
    question = tokens(1, 3, seed=6)
    cache = policy("full", 0).decode_cache
    answer = greedy(model, cache(context), question, 9)
    stop = answer[4]
    assert greedy(model, cache(context), question, 9, {stop}) == answer[: answer.index(stop)]
    assert greedy(model, cache(context), question, 0) == []


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
def test_a_prompt_is_dense_whatever_its_chunks_and_the_configs_budget(chunk_tokens: int) -> None:
    ids = tokens(1, 50)
    model = build("llama", "questkv")
    context = prefill_context(model, ids, replace(CONFIG, sparse_prefill=64), chunk_tokens=chunk_tokens)
    logits = decode(model, policy("full", 0).decode_cache(context), torch.tensor([[5]]))
    expected = teacher_forced(pair("llama").reference, torch.cat([ids, torch.tensor([[5]])], 1), None, [51])[0, -1:]
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)


def test_progress_is_told_after_each_chunk() -> None:
    done: list[int] = []
    prefill_context(
        build("llama", "questkv"), tokens(1, 50), CONFIG, observe=False, chunk_tokens=20, on_progress=done.append
    )
    assert done == [20, 40, 50]


@pytest.mark.parametrize("method", METHODS)
def test_settings_are_plain_json(method: str) -> None:
    made = policy(method, 32, replace(CONFIG, dense_layers=(0, 2)))
    fields = json.loads(json.dumps(made.fields()))
    assert fields["budget"] == made.budget == (None if method == "full" else 32)
    if method in ("quest", "oracle"):
        assert QuestConfig.from_dict(fields["config"]) == replace(CONFIG, token_budget=32, dense_layers=(0, 2))
    elif method != "full":
        assert fields["dense_layers"] == [0, 2]


@pytest.mark.parametrize(
    ("budget", "sink", "recent"), [(4096, 16, 64), (96, 16, 64), (95, 16, 0), (64, 16, 0), (32, 0, 0), (16, 0, 0)]
)
def test_small_budgets_force_fewer_pages(budget: int, sink: int, recent: int) -> None:
    fitted = fit(QuestConfig(), budget)
    assert (fitted.token_budget, fitted.sink_tokens, fitted.recent_tokens) == (budget, sink, recent)


def test_small_budgets_leave_half_of_the_pages_to_the_estimate() -> None:
    fitted = fit(QuestConfig(page_size=8, sink_tokens=20, recent_tokens=640), 128)
    # 16 pages, 8 of them forced: the open one, 3 of sink, 4 recent.
    assert (fitted.sink_pages, fitted.recent_pages) == (3, 4)


@pytest.mark.parametrize(
    ("method", "budget"),
    [
        ("quest", 3),
        ("oracle", 3),
        ("oracle_tokens", 0),
        ("streaming_llm", 4),
        ("h2o", 1),
        ("tova", 0),
        ("snapkv", 1),
        ("h2o", None),
        ("quest", None),
        ("tova", True),
        ("full", 64),
        ("nearest", 64),
    ],
)
def test_impossible_methods_and_budgets_are_refused(method: str, budget: int | None) -> None:
    with pytest.raises(ConfigError):
        make_policy(method, budget, CONFIG)


def test_eviction_without_statistics_is_refused() -> None:
    context = prefill_context(build("llama", "questkv"), tokens(1, 30), CONFIG, observe=False)
    for method in METHODS:
        if policy_class(method).observes:
            with pytest.raises(ConfigError, match="observe=True"):
                policy(method, 16).decode_cache(context)
        else:
            policy(method, 16).decode_cache(context)


def test_a_quest_config_of_other_pages_is_refused() -> None:
    _, context = prefilled("llama", 30)
    with pytest.raises(ConfigError, match="page_size"):
        make_policy("quest", 96, QuestConfig(page_size=8)).decode_cache(context)


def test_one_sequence_at_a_time() -> None:
    with pytest.raises(UnsupportedError, match="one sequence"):
        prefill_context(build("llama", "questkv"), tokens(2, 9), CONFIG)
    with pytest.raises(ValueError, match="at least one token"):
        prefill_context(build("llama", "questkv"), tokens(1, 0), CONFIG)
    model, context = prefilled("llama", 30)
    cache = policy("h2o", 16).decode_cache(context)
    with pytest.raises(UnsupportedError, match="one sequence"):
        model(tokens(2, 1), cache=cache, use_cache=True)
    with pytest.raises(ValueError, match="n >= 1"):
        decode(model, cache, tokens(1, 0))


def test_a_policys_cache_only_grows() -> None:
    model, context = prefilled("llama", 30)
    cache = policy("h2o", 16).decode_cache(context)
    with pytest.raises(UnsupportedError):
        cache.crop(-1)
    with pytest.raises(UnsupportedError):
        cache.reset()
    mask = torch.ones(1, 31, dtype=torch.long)
    model(tokens(1, 1), cache=cache, use_cache=True, attention_mask=mask)
    padded = torch.ones(1, 32, dtype=torch.long)
    padded[0, 0] = 0
    with pytest.raises(UnsupportedError, match="padding"):
        model(tokens(1, 1), cache=cache, use_cache=True, attention_mask=padded)


def test_another_attention_function_is_refused() -> None:
    _, context = prefilled("llama", 30)
    model = build("llama", "sdpa")
    with pytest.raises(CacheMismatchError):
        model(tokens(1, 1), cache=policy("h2o", 16).decode_cache(context), use_cache=True)
