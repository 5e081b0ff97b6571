"""Perplexity behind a prefill, against transformers' own forward over the whole text."""

from __future__ import annotations

import math

import pytest
import torch

from questkv import QuestConfig
from questkv.errors import ConfigError, DocumentError
from questkv.evaluate.perplexity import Perplexity
from questkv.evaluate.text import Text
from questkv.models import LoadedModel
from questkv.policies import make_policy, prefill_context

TEXT = Text("novel.txt", "The lamp stood in the window all night, and nobody came to put it out. " * 12)


def test_the_full_cache_gives_the_perplexity_of_one_forward(tiny: LoadedModel) -> None:
    task = Perplexity(text=TEXT, lengths=(201,), scored=37, start=11)
    (sample,) = task.samples(tiny)
    context = prefill_context(tiny.model, torch.tensor([sample.ids]), QuestConfig(token_budget=1.0))
    got = task.score(tiny, context, sample, make_policy("full"))

    ids = torch.tensor([tiny.tokenizer(TEXT.content)["input_ids"][11 : 11 + 201 + 38]])
    tiny.model.set_attn_implementation("sdpa")
    try:
        with torch.no_grad():
            shares = tiny.model(ids).logits[0].double().log_softmax(dim=1)
    finally:
        tiny.model.set_attn_implementation("questkv")
    # the token at 201 is fed first, so those from 202 on are predicted in decode steps
    expected = [-float(shares[place - 1, ids[0, place]]) for place in range(202, 239)]
    assert len(got["nll"]) == 37
    assert got["nll"] == pytest.approx(expected, abs=2e-5)
    assert got["score"] == pytest.approx(math.exp(sum(expected) / 37), rel=2e-5)


def test_a_mean_over_rows_is_over_their_tokens_and_not_over_their_perplexities() -> None:
    rows = [{"score": math.exp(1.0), "nll": [1.0, 1.0]}, {"score": math.exp(4.0), "nll": [4.0]}]
    assert Perplexity(text=TEXT).mean(rows) == pytest.approx(math.exp(2.0))


def test_windows_follow_one_another_in_the_text(tiny: LoadedModel) -> None:
    first, second = Perplexity(text=TEXT, lengths=(100,), scored=9, windows=2, start=5).samples(tiny)
    read = [*first.ids, *first.data["steps"], *second.ids, *second.data["steps"]]
    assert tiny.tokenizer.decode(read) == TEXT.content[5 : 5 + 220]


def test_a_text_that_is_too_short_is_refused(tiny: LoadedModel) -> None:
    with pytest.raises(DocumentError, match=r"novel.txt: expected at least 2,301 tokens \(from token 0\), got 8"):
        list(Perplexity(text=TEXT, lengths=(2000,)).samples(tiny))
    with pytest.raises(ConfigError, match=r"\[perplexity\] scored: expected at least 1, got 0"):
        Perplexity(text=TEXT, scored=0)


def test_settings_name_the_text_without_holding_it() -> None:
    settings = Perplexity(text=Text("/books/novel.txt", "abc")).settings()
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # of "abc", FIPS 180-2
    assert settings["text"] == {"name": "novel.txt", "characters": 3, "sha256": digest}
    assert settings["lengths"] == (6000,)
