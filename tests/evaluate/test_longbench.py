"""`longbench`: records read, prompts made, answers scored."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from questkv import QuestConfig
from questkv.errors import ConfigError, DocumentError
from questkv.evaluate import longbench
from questkv.evaluate.longbench import PAPER, RECIPES, LongBench, without_middle
from questkv.evaluate.longbench_data import DataSet, read_folder, read_hub
from questkv.models import LoadedModel
from questkv.policies import make_policy, prefill_context

RECORD = {
    "input": "Who came?",
    "context": "Ann came at noon. " * 10,
    "answers": ["Ann", "Ann Lee"],
    "all_classes": None,
    "length": 40,
}


def write(folder: Path, name: str, *records: Any) -> None:
    lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n\n", encoding="utf-8")


def task(name: str = "qasper", *, length: int = 900, count: int = 2, **fields: Any) -> LongBench:
    return LongBench((DataSet(name, "digest", ({**RECORD, **fields}, RECORD, RECORD)),), length, count)


def test_local_files_are_read(tmp_path: Path) -> None:
    write(tmp_path, "qasper", RECORD, {**RECORD, "input": "Where?"})
    (data,) = read_folder(tmp_path, ("qasper",))
    assert [record["input"] for record in data.records] == ["Who came?", "Where?"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("{",), "line 1: expected a JSON object"),
        ((RECORD, "[]"), "line 2: expected a JSON object"),
        (({**RECORD, "answers": "Ann"},), "answers a list"),
        (({"input": "", "answers": []},), "with input, context, answers"),
        ((), "is empty"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, lines: tuple[Any, ...], message: str) -> None:
    write(tmp_path, "qasper", *lines)
    with pytest.raises(DocumentError, match=message):
        read_folder(tmp_path, ("qasper",))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"expected .*hotpotqa\.jsonl, got no such file"):
        read_folder(tmp_path, ("hotpotqa",))


def test_the_hubs_archive_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "qasper", RECORD)
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.write(tmp_path / "qasper.jsonl", "data/qasper.jsonl")
    asked = []

    def download(*args: Any, **kwargs: Any) -> str:
        asked.append((args, kwargs))
        return str(tmp_path / "data.zip")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    (data,) = read_hub(("qasper",))
    assert data == read_folder(tmp_path, ("qasper",))[0]
    assert asked == [(("THUDM/LongBench", "data.zip"), {"repo_type": "dataset"})]
    with pytest.raises(DocumentError, match=r"trec\.jsonl, got no such file"):
        read_hub(("trec",))


def test_a_hub_out_of_reach_is_one_line_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: Any, **kwargs: Any) -> str:
        raise LocalEntryNotFoundError("no connection\nand much advice")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(DocumentError, match=r"\(no connection\); get its JSONL files another way .* --data$"):
        read_hub(("qasper",))


def test_the_papers_data_sets_have_recipes() -> None:
    assert set(PAPER) < set(RECIPES)
    assert [RECIPES[name].max_new_tokens for name in PAPER] == [128, 32, 64, 32, 128, 512]


def test_the_context_is_prefilled_and_what_follows_is_decoded(tiny: LoadedModel) -> None:
    first, second = task().samples(tiny)
    prompt = tiny.tokenizer.decode(first.ids)
    question = tiny.tokenizer.decode(first.data["question"])
    assert prompt.startswith("<s>user\nRead a scientific article.")
    assert prompt.endswith(RECORD["context"])
    assert "Question: Who came?\n\nAnswer:" in question
    assert question.endswith("</s>\n<s>assistant\n")
    assert (first.id, second.id) == ("qasper-0", "qasper-1")
    assert first.decoded == len(first.data["question"]) + 128


def test_few_shot_examples_are_plain_text_to_be_continued(tiny: LoadedModel) -> None:
    first, _ = task("triviaqa").samples(tiny)
    assert tiny.tokenizer.decode(first.data["question"]).endswith("Who came?")


def test_a_long_context_loses_its_middle_alone(tiny: LoadedModel) -> None:
    context = "".join(chr(ord("a") + index % 26) for index in range(2000))
    first, _ = task(length=700, context=context).samples(tiny)
    assert len(first.ids) + len(first.data["question"]) == 700
    kept = tiny.tokenizer.decode(first.ids).partition("article.\n\n")[2]
    assert context.startswith(kept[: len(kept) // 2])
    assert context.endswith(kept[len(kept) // 2 :])


def test_without_middle_keeps_both_ends() -> None:
    assert without_middle(list(range(9)), 4) == [0, 1, 7, 8]
    assert without_middle(list(range(9)), 5) == [0, 1, 6, 7, 8]
    assert without_middle(list(range(9)), 1) == [8]
    assert without_middle(list(range(3)), 3) == [0, 1, 2]


def test_a_length_without_room_for_a_context_is_refused(tiny: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="record 0 of qasper takes without its context"):
        list(task(length=50).samples(tiny))


@pytest.mark.parametrize(
    ("name", "said", "score"),
    [
        ("qasper", " Ann Lee!", 1.0),  # the better of two answers
        ("qasper", "Ann\nBob", 2 / 3),
        ("triviaqa", " Ann\nPassage: ...", 1.0),  # the first line alone
        ("gov_report", "Ann came, Lee", 0.8),  # two of three words, both of two
        ("trec", "Ann or Bob", 0.5),
    ],
)
def test_the_best_of_the_answers_counts(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, name: str, said: str, score: float
) -> None:
    seen = []

    def greedy(model: Any, cache: Any, ids: torch.Tensor, max_new_tokens: int, stop_ids: Any) -> list[int]:
        seen.append((ids.tolist(), max_new_tokens))
        return list(tiny.tokenizer(said)["input_ids"])

    monkeypatch.setattr(longbench, "greedy", greedy)
    made = task(name, all_classes=["Ann", "Bob"])
    sample = next(made.samples(tiny))
    context = prefill_context(tiny.model, torch.tensor([[5, 6, 7]]), QuestConfig(), observe=False)
    row = made.score(tiny, context, sample, make_policy("full"))
    assert row["score"] == pytest.approx(score)
    assert (row["dataset"], row["answer"]) == (name, said.strip())
    assert seen == [([sample.data["question"]], RECIPES[name].max_new_tokens)]


def test_settings_name_the_files_and_not_their_content() -> None:
    assert task().settings() == {"datasets": {"qasper": "digest"}, "length": 900, "count": 2}


def test_unknown_data_sets_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"datasets: expected some of qasper, .*got 'squad'"):
        task("squad")
