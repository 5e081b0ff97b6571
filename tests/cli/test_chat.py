"""``questkv chat``: several questions on one cache, from a pipe."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from cli.conftest import TEMPLATE, save_tiny_model

Run = Callable[..., Result]


def chat(run: Run, document: Path, model: str, questions: str, *options: str) -> Result:
    return run("chat", str(document), "--model", model, "--max-new-tokens", "8", *options, stdin=questions)


def lines(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, (result.output, result.exception)
    return [json.loads(line) for line in result.stdout.splitlines()]


def whole(model: str, document: Path, first: str, answer: str, second: str) -> int:
    """Tokens of the conversation as transformers has them."""
    from transformers import AutoTokenizer

    text = document.read_text(encoding="utf-8")
    messages = [
        {"role": "user", "content": f"{text}\n\n{first}"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": second},
    ]
    tokenizer = AutoTokenizer.from_pretrained(model)
    return len(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])


def test_each_question_is_answered_on_the_context_so_far(run: Run, tiny_model: str, document: Path) -> None:
    first, second = lines(chat(run, document, tiny_model, "One?\n\nTwo?\n", "--json", "-"))
    assert (first["question"], second["question"]) == ("One?", "Two?")
    assert second["prompt_tokens"] == whole(tiny_model, document, "One?", first["answer"], "Two?")
    assert second["prefill_s"] < first["prefill_s"] + 60  # the document's time is the first answer's alone


def test_a_turn_equals_the_same_conversation_in_one_prompt(tiny_model: str, document: Path) -> None:
    import torch
    from transformers import DynamicCache

    from questkv import QuestConfig
    from questkv.cli.session import Session
    from questkv.hf.prefill import cache_argument

    session = Session.open(tiny_model, QuestConfig(token_budget=1.0), dtype="float32", rope_factor=1.0, threads=1)
    conversation = session.conversation
    conversation.document = document.read_text(encoding="utf-8")
    session.read(conversation.document_ids(), lambda done: None)
    for question in ("One?", "Two?", "Three?"):
        prompt = conversation.prompt(question)
        session.answer(prompt, on_text=lambda piece: None, max_new_tokens=8)
        assert session.ids[:-8] == prompt.ids
        assert session.cache.get_seq_length() in (len(session.ids) - 1, len(session.ids))
    session.model.set_attn_implementation("sdpa")
    name = cache_argument(session.model)
    expected = session.model.generate(
        input_ids=torch.tensor([prompt.ids]),
        attention_mask=torch.ones(1, len(prompt.ids), dtype=torch.int64),
        max_new_tokens=8,
        do_sample=False,
        **{name: DynamicCache(config=session.model.config)},
    )
    assert expected[0].tolist() == session.ids


def test_a_template_that_rewrites_the_past_is_read_again_from_there(run: Run, tmp_path: Path, document: Path) -> None:
    counted = "{{ messages | length }} so far. " + TEMPLATE
    model = str(save_tiny_model(tmp_path / "model", template=counted))
    first, second = lines(chat(run, document, model, "One?\nTwo?\n", "--json", "-"))
    assert second["prompt_tokens"] == whole(model, document, "One?", first["answer"], "Two?")
    # the same question asked about the same past in a session of its own gives the same answer
    from questkv import QuestConfig
    from questkv.cli.session import Session

    session = Session.open(model, QuestConfig(), dtype="auto", rope_factor=1.0, threads=1)
    session.conversation.document = document.read_text(encoding="utf-8")
    session.conversation.add(session.conversation.prompt("One?"), [first["answer"]], [])
    answer = session.answer(session.conversation.prompt("Two?"), on_text=lambda piece: None, max_new_tokens=8)
    assert answer.as_json(session.config)["answer"] == second["answer"]


def test_a_template_of_one_turn_asks_each_question_alone_and_says_so(run: Run, tmp_path: Path, document: Path) -> None:
    one = "{% if messages | length > 1 %}{{ raise_exception('Only one turn') }}{% endif %}" + TEMPLATE
    model = str(save_tiny_model(tmp_path / "model", template=one))
    result = chat(run, document, model, "One?\nSix?\nTen?\n", "--json", "-")
    tokens = [answer["prompt_tokens"] for answer in lines(result)]
    assert tokens[0] == tokens[1] == tokens[2]
    said = [line for line in result.stderr.splitlines() if "takes one turn only (Only one turn)" in line]
    assert len(said) == 1
    assert "Traceback" not in result.stderr


def test_end_of_input_ends_the_chat(run: Run, tiny_model: str, document: Path) -> None:
    result = chat(run, document, tiny_model, "")
    assert result.exit_code == 0
    assert not result.stdout


def test_the_document_can_not_come_from_the_pipe_of_questions(run: Run, tiny_model: str) -> None:
    assert run("chat", "-", "--model", tiny_model, stdin="text").exit_code == 2


def test_a_full_conversation_says_so(run: Run, tiny_model: str, document: Path) -> None:
    result = chat(run, document, tiny_model, f"{'why ' * 120}?\n")
    assert result.exit_code == 1
    assert "the conversation is full" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_first_interrupt_ends_the_answer_only(
    run: Run, tiny_model: str, document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from questkv.cli import output

    pieces: list[str] = []

    def interrupt_third(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(output, "stream_text", interrupt_third)
    result = chat(run, document, tiny_model, "One?\nTwo?\n")
    assert result.exit_code == 0, result.output
    first, second = result.stderr.splitlines()
    assert "stopped; " in first
    assert "8 generated" not in first
    assert "8 generated" in second


def test_a_second_interrupt_ends_the_command(
    run: Run, tiny_model: str, document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from questkv.cli import output

    def interrupt_twice(piece: str) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(output, "stream_text", interrupt_twice)
    result = chat(run, document, tiny_model, "One?\nTwo?\n")
    assert result.exit_code == 130
    assert result.stderr.splitlines() == ["questkv: interrupted"]
