"""A session's tokens are those of transformers' own attention over the whole conversation."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import Result

from hf.tiny_models import VOCABULARY, build, tokens
from questkv import QuestConfig
from questkv.cli.session import Answer, Session

# The models' rotary frequencies are others where a sequence is longer than 150 tokens.
BY_LENGTH = ("llama-longrope", "phi3-longrope")


def open_session(name: str) -> Session:
    raw = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w1"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="w0", bos_token="w0")
    return Session(build(name, "questkv"), tokenizer, QuestConfig(token_budget=1.0, page_size=4))


def ask(session: Session, question: list[int], count: int) -> tuple[list[int], Answer]:
    before = len(session.ids) + len(question)
    answer = session.answer(question, prefix=[], on_text=lambda text: None, max_new_tokens=count)
    return session.ids[before:], answer


def expected(name: str, ids: list[int], count: int) -> list[int]:
    model, prompt = build(name, "sdpa"), torch.tensor([ids])
    settings: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": count}
    out: list[int] = model.generate(prompt, **settings)[0, len(ids) :].tolist()
    return out


@pytest.mark.parametrize("name", ["llama", *BY_LENGTH])
@pytest.mark.parametrize(
    ("document", "question", "count"),
    # The question, its last token and the answer take the sequence past 150; the document alone does; nothing does.
    [(140, 17, 9), (140, 11, 9), (140, 6, 9), (170, 6, 9), (70, 6, 9)],
)
def test_an_answer_has_the_tokens_of_one_forward(name: str, document: int, question: int, count: int) -> None:
    ids = tokens(document + question).tolist()
    session = open_session(name)
    session.read(ids[:document], lambda done: None)
    got, answer = ask(session, ids[document:], count)
    assert got == expected(name, ids, count)
    assert answer.prompt_tokens == document + question
    assert 0 < answer.pages_read == answer.pages_held


@pytest.mark.parametrize("name", ["llama", *BY_LENGTH])
def test_a_second_answer_has_the_tokens_of_the_whole_conversation(name: str) -> None:
    ids = tokens(155).tolist()
    session = open_session(name)
    session.read(ids[:120], lambda done: None)
    first, _ = ask(session, ids[120:130], 6)
    conversation = [*ids[:130], *first, *ids[130:]]
    second, answer = ask(session, ids[130:], 6)
    assert second == expected(name, conversation, 6)
    assert session.cache.report().tokens == (len(conversation) + 5,)
    assert 0 < answer.pages_read == answer.pages_held


def test_a_folder_that_says_it_uses_no_cache_is_read_with_one(
    run: Callable[..., Result], tiny_model: str, document: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    answers = []
    for use_cache in (True, False):
        (folder / "config.json").write_text(json.dumps({**config, "use_cache": use_cache}))
        result = run("ask", str(document), "What?", "--model", str(folder), "--max-new-tokens", "8", "--json", "-")
        assert result.exit_code == 0, result.output
        assert ("warning: this model's generation config says use_cache: false" in result.stderr) == (not use_cache)
        answers.append({key: json.loads(result.stdout)[key] for key in ("answer", "pages_read", "pages_held")})
    assert answers[0] == answers[1]
    assert answers[0]["pages_held"] > 0
