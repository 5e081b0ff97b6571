"""The attention benchmark: it checks before it times, and its figures follow from its own times."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from questkv import QuestConfig
from questkv.benchmark import attention
from questkv.benchmark.attention import (
    DENSE,
    DENSE_MODEL,
    PARTS,
    SPARSE,
    SPARSE_MODEL,
    Attention,
    DisagreementError,
    Row,
    summarise,
)
from questkv.benchmark.shapes import PRESETS, Shape

TINY = Shape(heads=4, kv_heads=2, head_dim=16, batch=2, dtype="float32")
CONFIG = QuestConfig(token_budget=160)


@pytest.fixture
def tiny() -> Attention:
    return Attention(TINY, CONFIG, 512)


def test_rows_name_ours_their_parts_and_others(tiny: Attention) -> None:
    shares: list[float] = []
    rows = tiny.measure(0.01, shares.append)
    names = [row.name for row in rows]
    assert names[:2] == [SPARSE, DENSE]
    assert {"torch-sdpa", "torch-matmul", *PARTS, "memory-read"} <= set(names)
    assert all(row.median_ms >= row.min_ms > 0 and row.context == 512 and row.budget == 160 for row in rows)
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)


@pytest.mark.parametrize("group", ["mean", "softmax_mean", "per_head"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_results_agree_with_float64(group: str, dtype: str) -> None:
    shape = dataclasses.replace(TINY, dtype=dtype)
    candidates = Attention(shape, dataclasses.replace(CONFIG, group=group), 512).candidates()
    assert all(candidate.max_error < 0.05 for candidate in candidates)


def test_a_sparse_step_counts_the_boxes_and_its_budget(tiny: Attention) -> None:
    boxes = 2 * 2 * 31 * (2 * 16 + 4)  # sequences, KV heads, sealed pages, codes and scale
    tokens = 2 * 2 * 2 * 160 * 16 * 4  # keys and values, sequences, KV heads, tokens, channels, bytes
    assert tiny.sparse_bytes == boxes + tokens


INT8 = dataclasses.replace(CONFIG, kv_dtype="int8")


@pytest.mark.parametrize("group", ["mean", "per_head"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_in_eight_bits_are_timed_beside_those_in_the_models_type(group: str, dtype: str) -> None:
    shape = dataclasses.replace(TINY, dtype=dtype)
    candidates = Attention(shape, dataclasses.replace(INT8, group=group), 512).candidates()
    names = [candidate.name for candidate in candidates]
    assert names[:4] == [SPARSE, DENSE, SPARSE_MODEL, DENSE_MODEL]
    errors = {candidate.name: candidate.max_error for candidate in candidates}
    assert max(errors[name] for name in names[:4]) < (5e-3 if dtype == "bfloat16" else 5e-4)


def test_a_step_over_pages_in_eight_bits_counts_codes_steps_and_the_open_page() -> None:
    attention = Attention(TINY, INT8, 512)
    boxes = 2 * 2 * 31 * (2 * 16 + 4)
    codes = 2 * 2 * 144 * (2 * 16 + 8)  # sequences, KV heads, tokens of sealed pages; codes, step and offset
    open_page = 2 * 2 * 16 * 2 * 16 * 4
    assert attention.sparse_bytes == boxes + codes + open_page
    read = {candidate.name: candidate.read_bytes for candidate in attention.candidates()}
    assert read[SPARSE] == attention.sparse_bytes
    assert read[DENSE] == 2 * 2 * 496 * (2 * 16 + 8) + open_page
    assert read[SPARSE_MODEL] == Attention(TINY, CONFIG, 512).sparse_bytes
    assert read[DENSE_MODEL] == 2 * 2 * 512 * 2 * 16 * 4


def test_the_summary_compares_eight_bits_with_the_models_type() -> None:
    rows = [
        Row(SPARSE, 1024, 160, 2.0, 1.0, 10.0, 0.0),
        Row(DENSE, 1024, 160, 14.0, 13.0, 40.0, 0.0),
        Row(SPARSE_MODEL, 1024, 160, 3.0, 1.0, 10.0, 0.0),
        Row(DENSE_MODEL, 1024, 160, 28.0, 13.0, 40.0, 0.0),
        Row("torch-sdpa", 1024, 160, 90.0, 80.0, 5.0, 0.0),
        Row("memory-read", 1024, 160, 10.0, 9.0, 50.0, 0.0),
    ]
    (line,) = summarise(rows)
    assert line["best_peer"] == "torch-sdpa"
    assert line["speedup_over_sparse_model"] == 1.5
    assert line["dense_speedup_over_dense_model"] == 2.0
    assert line["speedup_over_dense_model"] == 14.0


def test_a_wrong_result_stops_the_benchmark(tiny: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    right = tiny.decode
    monkeypatch.setattr(tiny, "decode", lambda *args, **kwargs: right(*args, **kwargs) + 1e-3)
    with pytest.raises(DisagreementError, match=r"\[bench\] questkv-sparse: expected float64's output"):
        tiny.measure(0.01, lambda share: None)


def test_a_peer_that_reads_other_keys_stops_the_benchmark(tiny: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.peers, "matmul", lambda query, layer: torch.zeros_like(query))
    with pytest.raises(DisagreementError, match="torch-matmul"):
        tiny.measure(0.01, lambda share: None)


def test_the_summary_divides_the_medians() -> None:
    rows = [
        Row(SPARSE, 1024, 160, 2.0, 1.0, 10.0, 0.0),
        Row(DENSE, 1024, 160, 14.0, 13.0, 40.0, 0.0),
        Row("torch-sdpa", 1024, 160, 90.0, 80.0, 5.0, 0.0),
        Row("torch-matmul", 1024, 160, 30.0, 29.0, 20.0, 0.0),
        Row("estimate", 1024, 160, 1.0, 1.0, 20.0, 0.0),
        Row("memory-read", 1024, 160, 10.0, 9.0, 50.0, 0.0),
    ]
    assert list(summarise(rows)) == [
        {
            "context": 1024,
            "best_peer": "torch-matmul",
            "speedup_over_dense": 7.0,
            "speedup_over_best_peer": 15.0,
            "bandwidth_share": 0.8,
        }
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, r"\[bench\] heads: expected a multiple of 2"),
        ({"batch": 0}, r"\[bench\] batch: expected an int >= 1"),
        ({"dtype": "int8"}, r"\[bench\] dtype: expected one of"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changes)


def test_presets_are_the_models_shapes() -> None:
    assert (PRESETS["llama2-7b"].heads, PRESETS["llama2-7b"].kv_heads, PRESETS["llama2-7b"].head_dim) == (32, 32, 128)
    assert (PRESETS["llama3-8b"].heads, PRESETS["llama3-8b"].kv_heads, PRESETS["llama3-8b"].head_dim) == (32, 8, 128)
    assert (PRESETS["smollm2"].heads, PRESETS["smollm2"].kv_heads, PRESETS["smollm2"].head_dim) == (9, 3, 64)
