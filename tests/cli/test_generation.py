"""What of a model's generation config an answer follows, and what the command overrides."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig
from typer.testing import Result

from cli.conftest import TEMPLATE, save_tiny_model
from questkv.cli.generation import Generation

Run = Callable[..., Result]
BASE = {"suppress_tokens": [0, 1], "eos_token_id": 1, "bos_token_id": 0}


def model_with(folder: Path, generation: dict[str, Any], *, template: str | None = TEMPLATE) -> str:
    save_tiny_model(folder, template=template)
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return str(folder)


def ask(run: Run, document: Path, model: str, *options: str) -> Result:
    return run("ask", str(document), "What is it?", "--model", model, "--max-new-tokens", "8", *options)


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"cache_implementation": "static"}, "cache_implementation static"),
        ({"cache_implementation": "offloaded"}, "cache_implementation offloaded"),
        ({"num_beams": 4}, "num_beams 4"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences 2"),
        ({"repetition_penalty": 1.3}, "repetition_penalty 1.3"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size 3"),
        ({"encoder_repetition_penalty": 1.3}, "encoder_repetition_penalty 1.3"),
        ({"guidance_scale": 1.5}, "guidance_scale 1.5"),
        ({"prompt_lookup_num_tokens": 4}, "prompt_lookup_num_tokens 4"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha 0.6"),
        ({"min_new_tokens": 3}, "min_new_tokens 3"),
        ({"min_length": 2000}, "min_length 2000"),
        ({"forced_bos_token_id": 5}, "forced_bos_token_id 5"),
        ({"forced_eos_token_id": 5}, "forced_eos_token_id 5"),
        ({"exponential_decay_length_penalty": [2, 1.5]}, "exponential_decay_length_penalty"),
        ({"dola_layers": "high"}, "dola_layers high"),
        ({"use_cache": False}, "use_cache False"),
        ({"max_time": 0.0001}, "max_time 0.0001"),
        ({"token_healing": True}, "token_healing True"),
        ({"suppress_tokens": [0, 1, 100000]}, "suppress_tokens [0, 1, 100000]"),
        ({"max_length": 3, "temperature": 0.3, "do_sample": True, "top_p": 0.5, "top_k": 3}, ""),
        ({"eos_token_id": None}, ""),
        ({"return_dict_in_generate": True, "output_scores": True, "output_attentions": False}, ""),
    ],
)
def test_what_cant_be_honoured_is_overridden_in_one_line(
    run: Run, tiny_model: str, tmp_path: Path, document: Path, wish: dict[str, Any], said: str
) -> None:
    plain = ask(run, document, tiny_model)
    result = ask(run, document, model_with(tmp_path / "model", {**BASE, **wish}))
    assert result.exit_code == 0, (result.output, result.exception)
    notes = [line for line in result.stderr.splitlines() if "generation config" in line]
    assert len(notes) == bool(said)
    if said:
        assert said in notes[0]
    if "suppress_tokens" not in wish:
        assert result.stdout == plain.stdout


def test_tokens_that_may_not_come_dont(tmp_path: Path, tiny_model: str, document: Path) -> None:
    first = _generated(tiny_model, document)[0]
    for wish in ({"suppress_tokens": [0, 1, first]}, {"bad_words_ids": [[0], [1], [first]], "suppress_tokens": []}):
        assert first not in _generated(model_with(tmp_path / "model", {**BASE, **wish}), document)


def test_sampling_follows_the_models_wishes_with_a_temperature_only(run: Run, tmp_path: Path, document: Path) -> None:
    model = model_with(tmp_path / "model", {**BASE, "do_sample": True, "top_k": 1})
    greedy = ask(run, document, model)
    assert ask(run, document, model, "--temperature", "9").stdout == greedy.stdout


@pytest.mark.parametrize("end", [None, 1000, -1, [], [1000], [None]])
def test_an_end_that_is_missing_or_wrong_is_the_tokenizers(
    run: Run, tmp_path: Path, tiny_model: str, document: Path, end: Any
) -> None:
    """A byte that the tiny model says after others is made its tokenizer's end of text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    folder = tmp_path / "model"
    model_with(folder, {"eos_token_id": end, "suppress_tokens": [0, 1]})
    said = [tokenizer.convert_ids_to_tokens(i) for i in _generated(tiny_model, document)]
    place = next(i for i, piece in enumerate(said) if piece != said[0])
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "eos_token": said[place]}), encoding="utf-8")
    values = json.loads(ask(run, document, str(folder), "--json", "-").stdout)
    assert 0 < values["generated_tokens"] == place + 1 < 8


def _generated(model: str, document: Path) -> list[int]:
    from questkv import QuestConfig
    from questkv.cli.session import Session

    session = Session.open(model, QuestConfig(), dtype="float32", rope_factor=1.0, threads=1)
    session.conversation.document = document.read_text(encoding="utf-8")
    prompt = session.conversation.prompt("What is it?")
    session.answer(prompt, on_text=lambda piece: None, max_new_tokens=8)
    return session.ids[len(prompt.ids) :]


def generation(given: dict[str, Any], *, config_end: Any = None, tokenizer_end: Any = None, turn: Any = None) -> Any:
    text = SimpleNamespace(vocab_size=100, eos_token_id=config_end)
    model = SimpleNamespace(
        generation_config=GenerationConfig(**given), config=SimpleNamespace(get_text_config=lambda decoder: text)
    )
    return Generation.of(model, SimpleNamespace(eos_token_id=tokenizer_end), turn)


@pytest.mark.parametrize(
    ("given", "more", "ends"),
    [
        ({"eos_token_id": 7}, {}, (7,)),
        ({"eos_token_id": 7}, {"turn": 9, "tokenizer_end": 7}, (7, 9)),
        ({"eos_token_id": [7, 8]}, {"turn": 9, "tokenizer_end": 6}, (7, 8)),  # chosen with care
        ({}, {"turn": 9, "tokenizer_end": 6, "config_end": [5, 6]}, (5, 6, 9)),
        ({"eos_token_id": 100}, {"turn": 9}, (9,)),
        ({"eos_token_id": -1}, {}, ()),
    ],
)
def test_what_ends_an_answer(given: dict[str, Any], more: dict[str, Any], ends: tuple[int, ...]) -> None:
    chosen = generation(given, **more)
    assert chosen.ends == ends
    assert chosen.config(0.0, 5).eos_token_id == (list(ends) or None)


def test_no_field_is_inherited_unseen() -> None:
    """Every field of this version's config is taken over, named as dropped, or one that says nothing of an answer."""
    from questkv.cli import generation as module

    silent = {*module._SAMPLING, *module._OPTIONS, *module._FORM, *module._TOKENS, *module._DETAILS}
    for name in vars(GenerationConfig()):
        if name.startswith("_") or name in silent:
            continue
        given = GenerationConfig()
        setattr(given, name, "a wish")
        text = SimpleNamespace(vocab_size=100, eos_token_id=None)
        model = SimpleNamespace(
            generation_config=given, config=SimpleNamespace(get_text_config=lambda decoder, text=text: text)
        )
        chosen = Generation.of(model, SimpleNamespace(eos_token_id=None), None)
        assert name in chosen.kept or f"{name} a wish" in chosen.dropped
