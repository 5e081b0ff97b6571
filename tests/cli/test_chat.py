"""``questkv chat``: several questions on one cache, from a pipe."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

Run = Callable[..., Result]


def chat(run: Run, document: Path, model: str, questions: str, *options: str) -> Result:
    return run("chat", str(document), "--model", model, "--max-new-tokens", "8", *options, stdin=questions)


def lines(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, (result.output, result.exception)
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_each_question_is_answered_on_the_context_so_far(run: Run, tiny_model: str, document: Path) -> None:
    first, second = lines(chat(run, document, tiny_model, "One?\n\nTwo?\n", "--json", "-"))
    assert (first["question"], second["question"]) == ("One?", "Two?")
    turn = len("</s>\n<s>user\nTwo?</s>\n<s>assistant\n".replace("</s>", "!").replace("<s>", "!"))
    assert second["prompt_tokens"] == first["prompt_tokens"] + first["generated_tokens"] + turn
    assert second["prefill_s"] < first["prefill_s"] + 60  # the document's time is the first answer's alone


def test_a_turn_equals_the_same_conversation_in_one_prompt(tiny_model: str, document: Path) -> None:
    import torch
    from transformers import DynamicCache

    from questkv import QuestConfig
    from questkv.cli.session import Session
    from questkv.hf.prefill import cache_argument

    session = Session.open(tiny_model, QuestConfig(token_budget=1.0), dtype="float32", rope_factor=1.0, threads=1)
    before, ids = session.prompter.document(document.read_text(encoding="utf-8"))
    session.read(before + ids, lambda done: None)
    for question in ("One?", "Two?", "Three?"):
        asked = session.prompter.question(question, first=question == "One?")
        session.answer(asked, prefix=[], on_text=lambda piece: None, max_new_tokens=8)
        assert session.cache.get_seq_length() in (len(session.ids) - 1, len(session.ids))
    session.model.set_attn_implementation("sdpa")
    name = cache_argument(session.model)
    prompt = torch.tensor([session.ids[:-8]])
    expected = session.model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=8,
        do_sample=False,
        **{name: DynamicCache(config=session.model.config)},
    )
    assert expected[0].tolist() == session.ids


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
