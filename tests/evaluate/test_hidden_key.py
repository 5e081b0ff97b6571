"""Passkey and needle: what the prompts are, and what counts as found."""

from __future__ import annotations

import pytest
import torch

from questkv import QuestConfig
from questkv.errors import ConfigError, DocumentError
from questkv.evaluate.hidden_key import depths, key
from questkv.evaluate.needle import Needle
from questkv.evaluate.passkey import Passkey
from questkv.evaluate.text import Text
from questkv.models import LoadedModel
from questkv.policies import make_policy, prefill_context

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NOVEL = "".join(f"Sentence {number} ends here. " for number in range(200))


def test_a_passkey_prompt_is_one_paragraph_as_in_the_paper(tiny: LoadedModel) -> None:
    first, middle, last = Passkey(lengths=(300,), positions=3).samples(tiny)
    assert [sample.data["key"] for sample in (first, middle, last)] == ["21345", "29264", "37183"]
    lead = "There is a pass key hidden inside a lot of text. Find and memorize it. "
    hidden = "The pass key is {0}. Remember it. {0} is the pass key. "
    text = tiny.tokenizer.decode(first.ids)
    assert text == lead + hidden.format("21345") + FILLER * 3
    assert tiny.tokenizer.decode(middle.ids) == lead + FILLER + hidden.format("29264") + FILLER * 2
    assert tiny.tokenizer.decode(last.ids) == lead + FILLER * 2 + hidden.format("37183") + FILLER
    assert tiny.tokenizer.decode(first.data["question"]) == "What is the pass key? The pass key is"
    assert [sample.length for sample in (first, middle, last)] == [300] * 3


def test_a_passkey_prompt_may_be_a_turn_of_a_chat(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Passkey(lengths=(300,), positions=2, prompt="chat")
    sample = next(task.samples(tiny))
    assert tiny.tokenizer.decode(sample.ids).startswith("<s>user\nThere is a pass key hidden inside a lot of text. ")
    assert tiny.tokenizer.decode(sample.data["question"]) == "What is the pass key?</s>\n<s>assistant\nThe pass key is"
    # A model without a chat form has the paragraph only.
    monkeypatch.setattr(tiny.tokenizer, "chat_template", None)
    sample = next(task.samples(tiny))
    assert tiny.tokenizer.decode(sample.ids).startswith("There is a pass key hidden")
    assert tiny.tokenizer.decode(sample.data["question"]) == "What is the pass key? The pass key is"


def test_a_needle_stands_between_two_sentences_at_its_depth(tiny: LoadedModel) -> None:
    samples = list(Needle(text=Text("novel.txt", NOVEL), lengths=(700, 901), depths=5, start=14).samples(tiny))
    assert [(sample.length, len(sample.ids)) for sample in samples] == [(700, 700)] * 5 + [(901, 901)] * 5
    lead = "<s>user\nThere is a pass key hidden inside a long text. Find and memorize it.\n\n"
    for sample in samples:
        number = sample.data["key"]
        text = tiny.tokenizer.decode(sample.ids).removeprefix(lead)
        before, _, after = text.partition(f" The pass key is {number}. Remember it. {number} is the pass key. ")
        assert before + after == NOVEL[14 : 14 + len(before) + len(after)]
        room = len(before) + len(after)
        assert 0 <= round(sample.data["depth"] * room) - len(before) < len(" Sentence 199 ends here.")
        assert before.endswith(".") or sample.data["depth"] == 0.0


@pytest.mark.parametrize(
    ("answer", "score"),
    [(" 21345.", 1.0), ("21345", 1.0), ("213456", 0.0), ("2134", 0.0), (" in the text: 21345", 0.0), ("", 0.0)],
)
def test_a_key_is_found_if_the_answer_begins_with_all_of_it(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, answer: str, score: float
) -> None:
    said = tiny.tokenizer(answer)["input_ids"] if answer else []
    monkeypatch.setattr("questkv.evaluate.hidden_key.greedy", lambda *arguments: said)
    task = Passkey(lengths=(100,), positions=2)
    sample = next(task.samples(tiny))
    config = QuestConfig(token_budget=1.0)
    context = prefill_context(tiny.model, torch.tensor([sample.ids]), config, observe=False)
    got = task.score(tiny, context, sample, make_policy("full"))
    assert (got["score"], got["key"], got["answer"]) == (score, "21345", answer.strip())


def test_keys_differ_and_have_five_digits() -> None:
    keys = [key(index, seed=3) for index in range(90_000)]
    assert len(set(keys)) == 90_000
    assert {len(number) for number in keys} == {5}
    assert key(0, seed=0) != key(0, seed=1)


def test_depths_reach_both_ends() -> None:
    assert depths(5) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert depths(1) == [0.5]


def test_a_text_or_a_length_that_is_too_short_is_refused(tiny: LoadedModel) -> None:
    with pytest.raises(ConfigError, match=r"\[passkey\] lengths: expected at least 90 tokens, got 50"):
        list(Passkey(lengths=(50,)).samples(tiny))
    with pytest.raises(ConfigError, match=r"\[needle\] lengths: expected more than \d+ tokens, got 60"):
        list(Needle(text=Text("novel.txt", NOVEL), lengths=(60,)).samples(tiny))
    with pytest.raises(DocumentError, match=r"novel.txt: expected at least 9,000 tokens \(from token 0\), got"):
        list(Needle(text=Text("novel.txt", NOVEL), lengths=(9000,)).samples(tiny))
