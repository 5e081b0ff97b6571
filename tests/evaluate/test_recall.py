"""`recall` from text to rows on a tiny model: what is observed, what comes out, what is refused, how it resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from questkv import QuestConfig
from questkv.errors import ConfigError, DocumentError
from questkv.evaluate.recall import Recall, overall, run_recall
from questkv.evaluate.recall_measure import sparse_layers
from questkv.evaluate.recall_report import needed_tables, recall_tables
from questkv.evaluate.recall_rules import Rule
from questkv.evaluate.recall_steps import Observed
from questkv.evaluate.recall_suggestion import suggest
from questkv.evaluate.recall_truth import DenseTruth
from questkv.evaluate.results import Results
from questkv.evaluate.runner import list_samples
from questkv.evaluate.text import Text
from questkv.models import LoadedModel

TEXT = Text("lamp.txt", "The lamp stood in the window all night; nobody came. " * 12)
BASE = QuestConfig(token_budget=1.0, sink_tokens=16, recent_tokens=16, dense_layers=1)


def small(**fields: Any) -> Recall:
    settings = {"lengths": (203,), "budgets": (64, 128), "groups": ("mean", "per_head"), "steps": 5, "base": BASE}
    return Recall(**{"text": TEXT, **settings, **fields})


def run(recall: Recall, loaded: LoadedModel, folder: Path, *, resume: bool = False) -> list[dict[str, Any]]:
    described = {"task": "recall", "settings": recall.settings(), "environment": {}}
    with Results.open(folder, described, resume=resume) as results:
        run_recall(recall, loaded, list_samples(recall, loaded), results, lambda share, what: None)
        return list(results.rows)


def test_queries_keys_and_values_are_those_of_a_dense_model(tiny: LoadedModel) -> None:
    sample = next(small().samples(tiny))
    tokens = [*sample.ids, *sample.data["steps"]]
    observed = Observed(tiny, tokens, 5, BASE, lambda share, what: None)
    assert observed.layers == [0, 1, 2]
    assert observed.lengths.tolist() == [204, 205, 206, 207, 208]
    caught: dict[int, torch.Tensor] = {}
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args, i=i: caught.__setitem__(i, args[0]))
        for i, layer in enumerate(tiny.model.model.layers)
    ]
    implementation = tiny.model.config._attn_implementation
    try:
        tiny.model.set_attn_implementation("eager")
        with torch.no_grad():
            tiny.model(torch.tensor([tokens]), use_cache=False)
    finally:
        tiny.model.set_attn_implementation(implementation)
        for hook in hooks:
            hook.remove()
    for layer in observed.layers:
        out = DenseTruth(observed.steps(layer)).out.flatten(1)
        torch.testing.assert_close(out, caught[layer][0, -5:], rtol=1e-4, atol=1e-6)


def test_rows_hold_every_rule_and_budget_and_agree_with_their_layers(tiny: LoadedModel, tmp_path: Path) -> None:
    recall = small()
    rows = run(recall, tiny, tmp_path)
    assert [(row["method"], row["budget"]) for row in rows] == recall.runs()
    for row in (row for row in rows if row["budget"] is not None):
        counted = [row["layers"][str(layer)] for layer in (1, 2)]  # layer 0 is dense
        assert row["score"] == pytest.approx(sum(layer["mass"] for layer in counted) / 2)
        assert row["error"] == pytest.approx(sum(layer["error"] for layer in counted) / 2)
        assert 0 < row["worst_head"] <= row["score"] <= 1 + 1e-6
        assert row["share_read"] == pytest.approx(row["bytes_read"] / sum(layer["bytes_dense"] for layer in counted))


def test_bytes_are_those_of_tokens_and_boxes(tiny: LoadedModel, tmp_path: Path) -> None:
    rows = {(row["method"], row["budget"]): row for row in run(small(), tiny, tmp_path)}
    # float32, 2 KV heads of 8 channels, rows of 204 to 208 tokens: 12 sealed pages and 12 to 16 open tokens. A budget
    # of 64 leaves 3 sealed pages beside an open one of 12 to 16 tokens.
    per_token = 2 * 2 * 8 * 4
    tokens = 3 * 16 + (12 + 13 + 14 + 15 + 16) / 5
    boxes = 12 * 2 * (2 * 8 + 4)
    assert rows["quest a=0.5 mean, pages of 16", 64]["layers"]["1"]["bytes_read"] == tokens * per_token + boxes
    assert rows["oracle, pages of 16", 64]["layers"]["1"]["bytes_read"] == tokens * per_token
    assert rows["oracle, tokens", 64]["layers"]["1"]["bytes_read"] == 64 * per_token
    assert rows["quest a=0.5 mean, pages of 16", 64]["layers"]["1"]["bytes_dense"] == 206 * per_token
    own = rows["quest a=0.5 per_head, pages of 16", 128]
    assert own["own_budget"] < 128
    assert own["bytes_read"] <= rows["quest a=0.5 mean, pages of 16", 128]["bytes_read"]


def test_spans_read_fewer_boxes_for_the_same_tokens(tiny: LoadedModel, tmp_path: Path) -> None:
    recall = small(page_sizes=(4,), budgets=(36, 208), groups=("mean",), span_pages=(0, 8))
    rows = {(row["method"], row["budget"]): row for row in run(recall, tiny, tmp_path)}
    flat, spans = (f"quest a=0.5 mean, pages of 4{spans}" for spans in ("", ", spans of 8"))
    # Rows of 204 to 208 tokens: 50 or 51 sealed pages, 6 spans.
    sealed = [(length - 1) // 4 for length in range(204, 209)]
    selected = [(36 - (length - 4 * n)) // 4 for length, n in zip(range(204, 209), sealed, strict=True)]
    scored = [6 + -(-4 * k // 8) * 8 + n % 8 for k, n in zip(selected, sealed, strict=True)]
    fewer = (sum(sealed) - sum(scored)) / 5 * 2 * (2 * 8 + 4)
    assert fewer > 0
    for layer in ("1", "2"):
        read = [rows[method, 36]["layers"][layer]["bytes_read"] for method in (flat, spans)]
        assert read[0] - read[1] == pytest.approx(fewer)
    assert 0 < rows[spans, 36]["score"] <= rows["oracle, pages of 4", 36]["score"] + 1e-6
    assert rows[spans, 208]["score"] == rows[flat, 208]["score"]


def test_a_budget_that_covers_the_text_keeps_everything(tiny: LoadedModel, tmp_path: Path) -> None:
    for row in run(small(budgets=(208,)), tiny, tmp_path):
        if row["budget"] is not None:
            assert row["score"] == pytest.approx(1.0, abs=1e-5)
            assert row["top10"] == pytest.approx(1.0, abs=1e-5)
            assert row["error"] == pytest.approx(0.0, abs=1e-5)
            assert row["share_read"] == pytest.approx(1.0)  # dense: the boxes aren't looked at


def test_the_result_does_not_depend_on_how_many_rows_are_held_at_once(
    tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = run(small(), tiny, tmp_path / "a")
    monkeypatch.setattr("questkv.evaluate.recall_measure._AT_ONCE", 1)
    for one, other in zip(at_once, run(small(), tiny, tmp_path / "b"), strict=True):
        assert one["score"] == pytest.approx(other["score"], rel=1e-6)
        if one["budget"] is not None:
            assert one["error"] == pytest.approx(other["error"], rel=1e-4, abs=1e-7)


def test_a_run_that_stopped_inside_a_sample_gives_the_same_rows(tiny: LoadedModel, tmp_path: Path) -> None:
    recall = small(windows=2)
    whole = run(recall, tiny, tmp_path / "whole")
    lines = (tmp_path / "whole" / "rows.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "run.json").write_bytes((tmp_path / "whole" / "run.json").read_bytes())
    (tmp_path / "half" / "rows.jsonl").write_text("".join(lines[:15]) + lines[15][:20], encoding="utf-8")
    assert run(recall, tiny, tmp_path / "half", resume=True) == whole
    assert json.loads((tmp_path / "half" / "run.json").read_text(encoding="utf-8"))["settings"]["windows"] == 2


def test_samples_lie_one_behind_the_other(tiny: LoadedModel) -> None:
    ids = tiny.tokenizer(TEXT.content)["input_ids"]
    first, second = small(windows=2, start=7).samples(tiny)
    assert [*first.ids, *first.data["steps"], *second.ids, *second.data["steps"]] == ids[7 : 7 + 2 * 208]


def test_what_is_suggested_keeps_the_share(tiny: LoadedModel, tmp_path: Path) -> None:
    rows = run(small(share=0.9), tiny, tmp_path / "a")
    (suggestion,) = suggest(rows, BASE)
    assert suggestion.config.token_budget == suggestion.mean < 208
    assert suggestion.line == f"QuestConfig(token_budget={suggestion.mean}, recent_tokens=16, dense_layers=1)"
    assert suggestion.every == max(suggestion.layers[layer] for layer in (1, 2))
    again = run(small(budgets=(suggestion.mean,), groups=("mean",)), tiny, tmp_path / "b")
    assert next(row for row in again if row["rule"]["method"] == "quest")["score"] >= 0.9
    tables = [*recall_tables(small(), rows), *needed_tables(small(), rows)]
    assert tables[0].header == ["rule", "64", "128"]
    assert tables[-1].notes[0] == suggestion.line


def test_a_share_that_only_everything_keeps_is_a_whole_budget(tiny: LoadedModel, tmp_path: Path) -> None:
    (suggestion,) = suggest(run(small(share=0.999999), tiny, tmp_path), BASE)
    assert suggestion.config.token_budget == 1.0


def test_samples_are_averaged_and_the_worst_head_is_the_least() -> None:
    row = {"method": "a", "budget": 64, "length": 9, "score": 0.5, "worst_head": 0.25, "error": 0.5}
    (mean,) = overall([row, {**row, "score": 1.0, "worst_head": 0.125, "error": 0.25}])
    assert (mean["score"], mean["worst_head"], mean["error"], mean["samples"]) == (0.75, 0.125, 0.375, 2)


def test_dense_layers_are_left_out_unless_there_are_no_others() -> None:
    assert sparse_layers([0, 1, 5], QuestConfig(dense_layers=2)) == [5]
    assert sparse_layers([0, 1], QuestConfig(dense_layers=2)) == [0, 1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"budgets": (40,)}, "at least 48 tokens"),
        ({"budgets": ()}, "budgets: expected one or more values"),
        ({"optimisms": (0.5, 0.5)}, "optimisms: expected one or more values, each once"),
        ({"optimisms": (1.5,)}, r"optimism: expected a number in \[0, 1\]"),
        ({"groups": ("median",)}, "group: expected 'mean'"),
        ({"page_sizes": (0,)}, "page_size: expected an int >= 1"),
        ({"span_pages": (8, 1), "groups": ("mean",)}, r"span_pages: expected 0 \(no spans\) or at least 2, got 1"),
        ({"span_pages": (8,), "groups": ("per_head",)}, r"span_pages: expected 0 with the rule per_head, got \[8\]"),
        ({"share": 1.0}, r"expected a share of the attention mass in \(0, 1\)"),
        ({"steps": 0}, "steps: expected at least 1"),
        ({"lengths": (0,)}, "lengths: expected at least 1 token"),
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(**fields)


def test_a_short_text_is_refused(tiny: LoadedModel) -> None:
    with pytest.raises(DocumentError, match="expected at least 1,005 tokens"):
        list(small(lengths=(1000,)).samples(tiny))


def test_a_rule_is_named_by_what_tells_it_from_others() -> None:
    assert (
        Rule("quest", QuestConfig(optimism=0, group="per_head", page_size=8)).label == "quest a=0 per_head, pages of 8"
    )
