"""The prefill benchmark: that it checks before it times, what its readers read, and what follows from its times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hf.tiny_models import VOCABULARY, build, tokens
from questkv import QuestConfig
from questkv.benchmark import prefill as benchmark
from questkv.benchmark import readers
from questkv.benchmark.attention import DisagreementError
from questkv.benchmark.decode import MODEL_WEIGHTS
from questkv.benchmark.prefill import Row, measure, summarise
from questkv.benchmark.prefill_report import plot_prefill, prefill_table
from questkv.benchmark.readers import quest_reader, sdpa_reader
from questkv.hf.prefill import prefill

CONFIG = QuestConfig(token_budget=1.0)


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama", "sdpa").requires_grad_(False)


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return tokens(1, 301)[0].tolist()


def forwards_of(model: Any, reader: Any, ids: Sequence[int]) -> list[int]:
    """Tokens of each forward of a reading."""
    seen: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    reader.read(ids)
    hook.remove()
    return seen


def test_readers_give_the_logits_of_a_forward_without_a_cache(model: Any, ids: list[int]) -> None:
    model.set_attn_implementation("eager")
    expected = model(torch.tensor([ids]), use_cache=False).logits[0, -1].double()
    for reader in (quest_reader("", model, CONFIG, 128), sdpa_reader("", model)):
        for _ in range(2):  # what was read before is forgotten
            # float32 through three layers: rounding of some 1e-7 grows to 1e-4 at most with these large weights
            assert float((reader.read(ids).double() - expected).abs().max() / expected.abs().max()) < 1e-4


def test_ours_reads_in_chunks_and_transformers_in_one_forward(model: Any, ids: list[int]) -> None:
    # 45 tokens are left after the second chunk; alone they would be a short run, which is decoded
    assert forwards_of(model, quest_reader("", model, CONFIG, 128), ids) == [128, 173]
    assert forwards_of(model, quest_reader("", model, CONFIG, 100), ids) == [100, 100, 101]
    assert forwards_of(model, sdpa_reader("", model), ids) == [301]


def test_prefill_gives_the_last_tokens_logits(model: Any) -> None:
    batch = tokens(2, 30)
    model.set_attn_implementation("sdpa")
    got = prefill(model, sdpa_reader("", model).new_cache(), batch, chunk_tokens=11)
    torch.testing.assert_close(got, model(batch, use_cache=False).logits[:, -1], rtol=1e-3, atol=1e-3)
    assert list(prefill(model, sdpa_reader("", model).new_cache(), batch[:, :0]).shape) == [2, 0]


@pytest.mark.parametrize("kv_dtype", ["model", "int8"])
def test_rows_name_ours_and_transformers(model: Any, ids: list[int], kv_dtype: str) -> None:
    percent: list[int] = []
    rows = measure(
        model,
        {MODEL_WEIGHTS: model, "int8": build("llama", "sdpa")},
        QuestConfig(token_budget=1.0, kv_dtype=kv_dtype),
        ids,
        chunk=128,
        rounds=2,
        on_progress=percent.append,
    )
    assert [row.name for row in rows] == ["questkv-dense", "transformers-sdpa", "questkv-dense:int8"]
    assert all(row.ms > 0 and row.context == 301 for row in rows)
    assert all(row.tokens_per_s == pytest.approx(301 / (row.ms / 1000)) for row in rows)
    assert percent == sorted(percent)
    assert percent[-1] == 100


def test_all_read_in_turn_and_the_median_counts(model: Any, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []
    seconds = iter([1.0, 2.0, 5.0, 1.0, 3.0, 9.0])

    def timed(reader: Any, ids: Sequence[int]) -> float:
        turns.append(reader.name)
        return next(seconds)

    monkeypatch.setattr(benchmark, "_timed_reading", timed)
    rows = measure(model, {MODEL_WEIGHTS: model}, CONFIG, ids, chunk=128, rounds=3)
    assert turns == ["questkv-dense", "transformers-sdpa"] * 3
    assert [row.ms for row in rows] == [3000.0, 2000.0]


class Wrong:
    """A reader that answers something else."""

    name = "wrong"

    def read(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.arange(VOCABULARY, dtype=torch.float32)


def test_another_engine_that_disagrees_stops_the_benchmark(
    model: Any, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "_timed_reading", lambda *_: pytest.fail("was timed"))
    with pytest.raises(DisagreementError, match=r"\[bench\] wrong: expected transformers' logits"):
        measure(model, {MODEL_WEIGHTS: model}, CONFIG, ids, chunk=128, rounds=1, others=[Wrong()])


def test_a_chunk_that_is_lost_stops_the_benchmark(model: Any, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_timed_reading", lambda *_: pytest.fail("was timed"))
    whole = readers.prefill

    def without_the_first_chunk(model: Any, cache: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return whole(model, cache, ids[:, 128:] if kwargs["chunk_tokens"] == 128 else ids, **kwargs)

    monkeypatch.setattr(readers, "prefill", without_the_first_chunk)
    with pytest.raises(DisagreementError, match="questkv-dense: expected the same logits"):
        measure(model, {MODEL_WEIGHTS: model}, CONFIG, ids, chunk=128, rounds=1)


ROWS = [
    Row("questkv-dense", 512, 500.0, 1024.0, 300.0),
    Row("transformers-sdpa", 512, 800.0, 640.0, 400.0),
    Row("questkv-dense:int4", 512, 1000.0, 512.0),
    Row("questkv-dense", 2048, 2000.0, 1024.0, 300.0),
    Row("transformers-sdpa", 2048, 1600.0, 1280.0, 400.0),
    Row("questkv-dense:int4", 2048, 4000.0, 512.0),
]


def test_the_summary_divides_the_medians() -> None:
    first, second = summarise(ROWS)
    assert first == {
        "context": 512,
        "questkv_is_faster_by": {
            "questkv-dense": {"transformers-sdpa": 1.6, "questkv-dense:int4": 2.0},
            "questkv-dense:int4": {"questkv-dense": 0.5, "transformers-sdpa": 0.8},
        },
    }
    assert second["questkv_is_faster_by"]["questkv-dense"]["transformers-sdpa"] == 0.8


def test_the_table_has_memory_where_it_was_measured() -> None:
    table = prefill_table(ROWS, "title")
    headings = [str(column.header) for column in table.columns]
    assert headings[-2:] == ["dense is faster by", "dense:int4 is faster by"]
    assert list(table.columns[headings.index("peak MiB")].cells) == ["300", "400", "", "300", "400", ""]
    assert list(table.columns[-2].cells) == ["", "1.60x", "2.00x", "", "0.80x", "2.00x"]
    bare = [Row(row.name, row.context, row.ms, row.tokens_per_s) for row in ROWS]
    assert "peak MiB" not in [column.header for column in prefill_table(bare, "title").columns]


def test_the_figure_is_a_picture_file(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib", reason="the figure needs matplotlib")
    plot_prefill(ROWS, str(tmp_path / "times.png"), "title")
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")
