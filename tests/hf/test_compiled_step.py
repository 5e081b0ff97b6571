"""The decode step as one compiled graph: the same results, and nothing is compiled again as the cache grows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from hf.tiny_models import build, pad_left, pair, teacher_forced, tokens
from questkv import QuestCache, QuestConfig, attach
from questkv.errors import CacheMismatchError, PoolFullError, UnsupportedError
from questkv.hf.compile import graph

SPARSE = QuestConfig(token_budget=16, page_size=4, sink_tokens=4, recent_tokens=4, dense_layers=1)


@pytest.fixture(autouse=True)
def _fresh_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs of one test only, run as torch sees them; test_compiled_inductor.py has the C++ that is made of them."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    graph._steps.clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    graph._steps.clear()
    torch._dynamo.reset()


def graphs() -> int:
    """Graphs compiled so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def greedy(model: Any, ids: torch.Tensor, count: int, **kwargs: Any) -> torch.Tensor:
    out: torch.Tensor = model.generate(ids, do_sample=False, max_new_tokens=count, min_new_tokens=count, **kwargs)
    return out[:, ids.shape[1] :]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama-mixed", "gemma2", "gpt-oss"])
def test_generate_gives_the_uncompiled_tokens_from_one_graph(name: str) -> None:
    models = pair(name)
    ids, mask = pad_left([tokens(33), tokens(20, seed=1)])
    whole, cache = models.cache(SPARSE), models.cache(SPARSE)
    expected = greedy(models.quest, ids, 40, attention_mask=mask, cache=whole)
    with attach(models.quest, compile=True):
        got = greedy(models.quest, ids, 40, attention_mask=mask, cache=cache)
    assert torch.equal(got, expected)
    assert graphs() == 1
    assert cache.report() == whole.report()
    assert cache.report().share_read < 1


@pytest.mark.parametrize("name", ["llama-longrope", "phi3-longrope"])
def test_rotary_frequencies_change_in_a_graph_where_the_sequence_outgrows_its_original_context(name: str) -> None:
    ids = tokens(1, 140)
    expected = greedy(build(name, "sdpa"), ids, 20)
    model = build(name, "sdpa")
    with attach(model, QuestConfig(token_budget=1.0, page_size=4), compile=True):
        assert torch.equal(greedy(model, ids, 20), expected)
    assert graphs() == 1


def test_a_token_that_comes_as_an_embedding_is_compiled_too() -> None:
    models, ids = pair("llama"), tokens(1, 36)
    model = models.quest
    embeddings = model.get_input_embeddings()(ids).detach()
    expected = teacher_forced(model, ids, models.cache(SPARSE), [30, *[1] * 6])
    cache = models.cache(SPARSE)
    with attach(model, compile=True), torch.no_grad():
        steps = [model(ids[:, :30], cache=cache).logits]
        steps += [model(inputs_embeds=embeddings[:, i : i + 1], cache=cache).logits for i in range(30, 36)]
    assert torch.equal(torch.cat(steps, dim=1), expected)
    assert graphs() == 1


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_graph_serves_every_cache_and_gradient_mode(mode: Any) -> None:
    model, ids = pair("llama").quest, tokens(1, 60)
    with attach(model, compile=True), torch._dynamo.config.patch(error_on_recompile=True):
        for config in (SPARSE, QuestConfig(token_budget=24, page_size=8, sink_tokens=0, recent_tokens=8)):
            expected = teacher_forced(model, ids, pair("llama").cache(config), [30, *[2] * 15])
            cache = pair("llama").cache(config)
            with mode():
                steps = [model(ids[:, :30], cache=cache).logits]
                steps += [model(ids[:, i : i + 1], cache=cache).logits for i in range(30, 60)]
            # Only the order of a few sums may differ: a run of two rows is another shape to the linear layers.
            torch.testing.assert_close(torch.cat(steps, dim=1).detach(), expected, rtol=1e-4, atol=1e-4)
    assert graphs() == 1


@pytest.mark.slow
def test_the_cache_can_change_between_compiled_steps() -> None:
    models, ids = pair("llama"), tokens(2, 80)
    model = models.quest

    def story(feed: Any) -> list[torch.Tensor]:
        cache = models.cache(SPARSE)
        out = [teacher_forced(model, ids[:, :37], cache, [37])[:, -1]]
        out += [feed(cache, ids[:, i : i + 1]) for i in range(37, 45)]
        fork = cache.fork(QuestConfig(token_budget=1.0, page_size=4))
        cache.crop(-6)
        out += [feed(cache, ids[:, i : i + 1]) for i in range(50, 55)]
        cache.reorder_cache(torch.tensor([1, 1]))
        out += [feed(own, ids[:, i : i + 1]) for i in range(60, 65) for own in (cache, fork)]
        out += [teacher_forced(model, ids[:, 65:70], cache, [5])[:, -1]]
        cache.batch_select_indices(torch.tensor([1]))
        return [*out, *[feed(cache, ids[:1, i : i + 1]) for i in range(70, 75)]]

    def feed(cache: QuestCache, token: torch.Tensor) -> torch.Tensor:
        return teacher_forced(model, token, cache, [1])[:, -1]

    expected = story(feed)
    with attach(model, compile=True):
        got = story(feed)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert graphs() == 2  # batches of two and of one


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_an_interrupted_step_can_be_taken_again(layer: int) -> None:
    models, ids = pair("llama"), tokens(2, 60)
    whole, cache = models.cache(SPARSE), models.cache(SPARSE)

    def stop(at: int, *_: Any) -> None:
        if at == layer:
            raise KeyboardInterrupt

    with attach(models.quest, compile=True):
        for own in (whole, cache):
            teacher_forced(models.quest, ids[:, :40], own, [40])
        for i in range(40, 60):
            with cache.observe(stop), pytest.raises(KeyboardInterrupt):
                teacher_forced(models.quest, ids[:, i : i + 1], cache, [1])
            assert cache.get_seq_length() == i
            got = teacher_forced(models.quest, ids[:, i : i + 1], cache, [1])
            assert torch.equal(got, teacher_forced(models.quest, ids[:, i : i + 1], whole, [1]))
    assert cache.report().tokens == whole.report().tokens
    assert cache.report().bytes_held == whole.report().bytes_held


def test_an_observer_sees_the_queries_of_every_layer() -> None:
    models, ids = pair("llama"), tokens(2, 40)
    seen: dict[bool, list[tuple[int, torch.Tensor]]] = {False: [], True: []}
    for compile_it, queries in seen.items():
        cache = models.cache(SPARSE)
        with attach(models.quest, compile=compile_it):
            teacher_forced(models.quest, ids[:, :38], cache, [38])
            with cache.observe(lambda layer, query, softmax, kept=queries: kept.append((layer, query))):  # type: ignore[misc]
                teacher_forced(models.quest, ids[:, 38:], cache, [1, 1])
    assert [layer for layer, _ in seen[True]] == [0, 1, 2] * 2
    for (_, ours), (_, theirs) in zip(seen[True], seen[False], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_outer_model_is_as_it_was_after() -> None:
    model = build("llama", "sdpa")
    forward = model.forward
    with attach(model, compile=True):
        assert model.forward != forward
        with attach(model, compile=True):
            pass
        assert model.forward != forward
    assert "forward" not in model.__dict__
    assert model.forward == forward
    assert model.config._attn_implementation == "sdpa"


def test_a_tuple_comes_back_where_one_is_asked_for() -> None:
    models, ids = pair("llama"), tokens(1, 12)
    with attach(models.quest, compile=True):
        cache = models.cache(SPARSE)
        models.quest(ids, cache=cache)
        logits, back = models.quest(ids[:, :1], None, None, cache, return_dict=False)
    assert logits.shape == (1, 1, 97)
    assert back is cache


def test_a_full_pool_leaves_the_cache_as_it_was() -> None:
    models, ids = pair("llama"), tokens(1, 40)
    with attach(models.quest, compile=True):
        cache = models.cache(SPARSE, max_tokens=32)
        teacher_forced(models.quest, ids[:, :32], cache, [31, 1])
        with pytest.raises(PoolFullError):
            teacher_forced(models.quest, ids[:, 32:33], cache, [1])
        assert cache.report().tokens == (32,)
        cache.crop(-1)
        teacher_forced(models.quest, ids[:, 32:33], cache, [1])


@pytest.mark.slow
def test_a_model_that_changed_between_steps_is_compiled_again() -> None:
    model, ids = build("llama", "questkv"), tokens(1, 30)

    def story(feed: Any) -> list[torch.Tensor]:
        cache = QuestCache(model.config, SPARSE)
        teacher_forced(model, ids[:, :20], cache, [20])
        out = [feed(cache, 20)]
        weight = model.model.norm.weight
        model.model.norm.weight = torch.nn.Parameter(weight.detach() * 2)
        out.append(feed(cache, 21))
        model.model.norm.weight = weight
        out.append(feed(cache, 22))
        return out

    def feed(cache: QuestCache, at: int) -> torch.Tensor:
        return teacher_forced(model, ids[:, at : at + 1], cache, [1])

    expected = story(feed)
    with attach(model, compile=True):
        got = story(feed)
        model.train()
        with pytest.raises(UnsupportedError, match=r"\[compile\] LlamaForCausalLM"):
            feed(QuestCache(model.config, SPARSE), 0)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_compiled_is_refused_by_name() -> None:
    models, ids = pair("llama"), tokens(1, 12)
    with attach(models.quest, compile=True):
        cache = models.cache(SPARSE)
        models.quest(ids, cache=cache)
        with pytest.raises(UnsupportedError, match=r"\[compile\] attention_mask: expected a 2-D padding mask"):
            models.quest(ids[:, :1], attention_mask=torch.ones(1, 1, 1, 13, dtype=torch.bool), cache=cache)
        with pytest.raises(CacheMismatchError, match="expected 13 columns"):
            models.quest(ids[:, :1], attention_mask=torch.ones(1, 5), cache=cache)


def test_a_replaced_forward_is_refused() -> None:
    model = build("llama", "questkv")
    model.forward = partial(type(model).forward, model)
    with pytest.raises(UnsupportedError, match=r"\[attach\] compile: expected a model with the forward of its class"):
        attach(model, compile=True).__enter__()


def test_a_graph_break_is_an_error_and_not_a_slower_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", "questkv")
    plain = type(model.model.norm).forward

    def breaks(self: Any, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        out: torch.Tensor = plain(self, x)
        return out

    monkeypatch.setattr(type(model.model.norm), "forward", breaks)
    with attach(model, compile=True):
        cache = QuestCache(model.config, SPARSE)
        model(tokens(1, 12), cache=cache)
        with pytest.raises(UnsupportedError, match=r"decode step torch[.]compile takes as one graph"):
            model(tokens(1, 1), cache=cache)
        assert cache.report().tokens == (12,)


def test_a_handle_of_a_cache_that_is_gone_is_refused() -> None:
    handle = pair("llama").cache(SPARSE).handle
    with pytest.raises(CacheMismatchError, match=r"\[step\] handle"):
        torch.ops.questkv.step(handle, 0, *[torch.zeros(1, 2, 1, 8)] * 3, 1.0, None, None)


def test_torch_accepts_the_operator() -> None:
    cache = pair("llama").cache(SPARSE)
    cache.begin_step(2, None)
    query, key, value = torch.randn(2, 6, 1, 8), torch.randn(2, 2, 1, 8), torch.randn(2, 2, 1, 8)
    arguments = (cache.handle, 0, query, key, value, 0.3, None, None)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    assert set(torch.library.opcheck(torch.ops.questkv.step.default, arguments, test_utils=checks).values()) == {
        "SUCCESS"
    }
