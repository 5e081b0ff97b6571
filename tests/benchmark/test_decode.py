"""The decode benchmark: what its caches hold, that it checks before it times, and what follows from its times."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf.tiny_models import VOCABULARY, build, tokens
from questkv import QuestConfig
from questkv.benchmark import decode
from questkv.benchmark.attention import DisagreementError
from questkv.benchmark.decode import MODEL_WEIGHTS, UNTIMED_STEPS, Row, check_direction, measure, summarise, tolerance
from questkv.benchmark.decode_contents import default_text, make_contents, text_tokens
from questkv.benchmark.decode_report import decode_table, plot_decode
from questkv.errors import UnsupportedError

CONFIG = QuestConfig(token_budget=160)
CONTEXT = 300


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama", "sdpa").requires_grad_(False)


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return tokens(1, CONTEXT + 8)[0].tolist()


def test_a_context_of_one_block_is_a_prefill(model: Any, ids: list[int]) -> None:
    contents = make_contents(model, ids[:100], block=128)
    cache = DynamicCache(config=model.config)
    model(torch.tensor([ids[:100]]), cache=cache)
    for (keys, values), layer in zip(contents.at(100), cache.layers, strict=True):
        assert torch.equal(keys, layer.keys)
        assert torch.equal(values, layer.values)


def test_later_blocks_are_prefilled_alone_at_their_own_positions(model: Any, ids: list[int]) -> None:
    done: list[int] = []
    contents = make_contents(model, ids[:200], block=64, on_progress=done.append)
    assert done[-1] == 200
    cache = DynamicCache(config=model.config)
    model(torch.tensor([ids[64:128]]), cache=cache)
    # The rotary embedding is relative, so a shift of all positions turns keys and leaves values as they are.
    for (keys, values), layer in zip(contents.at(128), cache.layers, strict=True):
        torch.testing.assert_close(values[:, :, 64:], layer.values, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(keys[:, :, 64:].norm(dim=-1), layer.keys.norm(dim=-1), rtol=1e-3, atol=1e-4)
        half, angle = keys.shape[-1] // 2, torch.arange(keys.shape[-1] // 2, dtype=torch.float64)
        turn = 64 * 10000.0 ** (-angle / half)
        low, high = layer.keys.double().split(half, dim=-1)
        turned = torch.cat([low * turn.cos() - high * turn.sin(), high * turn.cos() + low * turn.sin()], dim=-1)
        torch.testing.assert_close(keys[:, :, 64:].double(), turned, rtol=1e-3, atol=1e-3)


def test_models_with_windows_are_refused(ids: list[int]) -> None:
    with pytest.raises(UnsupportedError, match="expected full-attention layers only, got 4 of 6 of another kind"):
        make_contents(build("gemma3", "sdpa"), ids[:64])


@pytest.mark.parametrize("kv_dtype", ["model", "int8"])
def test_rows_name_ours_and_transformers(model: Any, ids: list[int], kv_dtype: str) -> None:
    config = QuestConfig(token_budget=160, kv_dtype=kv_dtype)
    percent: list[int] = []
    contents = make_contents(model, ids[:CONTEXT])
    steps = ids[CONTEXT : CONTEXT + UNTIMED_STEPS + 3]
    models = {MODEL_WEIGHTS: model, "int8": build("llama", "sdpa")}
    rows = measure(model, models, contents, config, CONTEXT, steps, on_progress=percent.append)
    assert [row.name for row in rows] == [
        "questkv-sparse",
        "questkv-dense",
        "transformers-sdpa",
        "questkv-sparse:int8",
        "questkv-dense:int8",
    ]
    assert all(row.ms_per_token >= row.min_ms > 0 and row.context == CONTEXT for row in rows)
    assert all(row.tokens_per_s == pytest.approx(1000 / row.ms_per_token) for row in rows)
    assert percent == sorted(percent)
    assert percent[-1] == 100


def test_compiled_steps_of_all_caches_are_one_graph_a_model(
    model: Any, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Run as torch sees it; tests/hf/test_compiled_inductor.py has the C++ that is made of it.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    contents = make_contents(model, ids[:CONTEXT])
    models = {MODEL_WEIGHTS: build("llama", "sdpa").requires_grad_(False)}
    models[MODEL_WEIGHTS].load_state_dict(model.state_dict())
    steps = ids[CONTEXT : CONTEXT + UNTIMED_STEPS + 3]
    # transformers' own steps run between ours, with another attention in the same model.
    rows = measure(models[MODEL_WEIGHTS], models, contents, CONFIG, CONTEXT, steps, compiled=True)
    assert [row.name for row in rows] == ["questkv-sparse", "questkv-dense", "transformers-sdpa"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Wrong:
    """A decoder that answers something else."""

    name = "wrong"

    def prepare(self) -> None:
        pass

    def step(self, token: int) -> torch.Tensor:
        return torch.arange(VOCABULARY, dtype=torch.float32)


def test_another_engine_that_disagrees_stops_the_benchmark(
    model: Any, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "_timed_step", lambda *_: pytest.fail("was timed"))
    contents = make_contents(model, ids[:CONTEXT])
    with pytest.raises(DisagreementError, match=r"\[bench\] wrong: expected transformers' logits"):
        measure(model, {MODEL_WEIGHTS: model}, contents, CONFIG, CONTEXT, ids[CONTEXT:], [Wrong()])


@pytest.mark.parametrize("changed", ["_checked_dense", "_checked_whole"])
def test_a_cache_that_holds_something_else_stops_the_benchmark(
    model: Any, ids: list[int], monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    monkeypatch.setattr(decode, "_timed_step", lambda *_: pytest.fail("was timed"))
    if changed == "_checked_dense":
        fill = decode.quest_cache
        halved = [(keys, values / 2) for keys, values in make_contents(model, ids[:CONTEXT]).layers]
        monkeypatch.setattr(decode, "quest_cache", lambda model, config, layers: fill(model, config, halved))
    else:  # a budget that isn't what it says
        monkeypatch.setattr(decode, "replace", lambda config, token_budget: QuestConfig(token_budget=160))
    with pytest.raises(DisagreementError, match="questkv-"):
        measure(model, {MODEL_WEIGHTS: model}, make_contents(model, ids[:CONTEXT]), CONFIG, CONTEXT, ids[CONTEXT:])


def test_logits_of_another_engine_may_be_scaled_but_not_turned() -> None:
    logits = torch.randn(1000)
    check_direction("same", 1.01 * logits + 3, logits)
    with pytest.raises(DisagreementError, match=r"cosine at least 0\.98\), got 0\.9"):
        check_direction("turned", logits + 0.35 * torch.randn(1000), logits)
    with pytest.raises(DisagreementError, match="nan"):
        check_direction("broken", logits * torch.nan, logits)


def test_eight_bits_are_given_room_for_their_coding() -> None:
    logits = torch.tensor([1.0, -20.0])
    plain = tolerance(logits, torch.bfloat16, CONFIG)
    assert plain == pytest.approx(16 * 2**-7 * 20)
    coded = tolerance(logits, torch.bfloat16, QuestConfig(kv_dtype="int8"))
    assert coded == pytest.approx(plain + 0.05 * 20)


ROWS = [
    Row("questkv-sparse", 1024, 10.0, 9.0, 100.0, 900.0),
    Row("questkv-dense", 1024, 18.0, 17.0, 55.6, 900.0),
    Row("transformers-sdpa", 1024, 50.0, 40.0, 20.0, 950.0),
    Row("questkv-sparse:int4", 1024, 5.0, 4.0, 200.0),
    Row("questkv-dense:int4", 1024, 12.5, 4.0, 80.0),
    Row("questkv-sparse", 2048, 10.0, 9.0, 100.0, 910.0),
    Row("questkv-dense", 2048, 25.0, 24.0, 40.0, 910.0),
]


def test_the_summary_divides_the_medians() -> None:
    first, second = summarise(ROWS)
    assert first["context"] == 1024
    assert first["sparse_is_faster_by"]["questkv-sparse"] == {
        "questkv-dense": 1.8,
        "transformers-sdpa": 5.0,
        "questkv-dense:int4": 1.25,
    }
    assert first["sparse_is_faster_by"]["questkv-sparse:int4"]["questkv-dense:int4"] == 2.5
    assert second == {"context": 2048, "sparse_is_faster_by": {"questkv-sparse": {"questkv-dense": 2.5}}}


def test_the_table_has_a_column_for_each_sparse_row_and_memory_where_it_was_measured() -> None:
    table = decode_table(ROWS, "title")
    headings = [column.header for column in table.columns]
    assert headings[-2:] == ["sparse is faster by", "sparse:int4 is faster by"]
    assert "peak MiB" in headings
    assert table.row_count == len(ROWS)
    bare = [Row(row.name, row.context, row.ms_per_token, row.min_ms, row.tokens_per_s) for row in ROWS]
    assert "peak MiB" not in [column.header for column in decode_table(bare, "title").columns]


def test_the_figure_is_a_picture_file(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib", reason="the figure needs matplotlib")
    plot_decode(ROWS, str(tmp_path / "times.png"), "title")
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")


def test_a_text_is_repeated_until_there_are_enough_tokens() -> None:
    def tokenizer(text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    assert text_tokens(tokenizer, "abc", 7) == [97, 98, 99, 97, 98, 99, 97]
    assert len(default_text()) > 100_000
