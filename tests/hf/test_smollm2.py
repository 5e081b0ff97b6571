"""The real model on real text: same tokens as transformers, and retrieval through pages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from questkv import QuestCache, QuestConfig, attach
from questkv.evaluate.passkey import Passkey
from questkv.evaluate.task import Sample
from questkv.hf.prefill import prefill
from questkv.models import LoadedModel

NOVEL = Path(__file__).parents[2] / "examples" / "sherlock_holmes.txt"
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def novel_tokens(loaded: LoadedModel, count: int) -> torch.Tensor:
    ids = loaded.tokenizer(NOVEL.read_text(encoding="utf-8")[: count * 6])["input_ids"]
    return torch.tensor([ids[:count]])


def greedy(model: Any, ids: torch.Tensor, tokens: int, **kwargs: Any) -> list[list[int]]:
    out = model.generate(ids, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=2, **kwargs)
    return out[:, ids.shape[1] :].tolist()


def test_a_budget_that_covers_the_context_gives_the_tokens_of_sdpa(smollm2: LoadedModel) -> None:
    ids = novel_tokens(smollm2, 3000)
    mask = torch.ones_like(ids)
    expected = greedy(smollm2.model, ids, 64, attention_mask=mask)
    with attach(smollm2.model, QuestConfig(token_budget=4096)) as attached:
        assert greedy(smollm2.model, ids, 64, attention_mask=mask) == expected
        report = attached.cache.report()
    assert report.pages_read == report.pages_held > 0


def test_left_padded_prompts_give_the_tokens_of_each_alone(smollm2: LoadedModel) -> None:
    ids = novel_tokens(smollm2, 700)
    lengths = (700, 431, 256)
    batch = torch.full((3, 700), 2)
    mask = torch.zeros_like(batch)
    for row, length in enumerate(lengths):
        batch[row, -length:] = ids[0, :length]
        mask[row, -length:] = 1
    config = QuestConfig(token_budget=192)
    with attach(smollm2.model, config):
        together = greedy(smollm2.model, batch, 24, attention_mask=mask)
        for row, length in enumerate(lengths):
            alone = ids[:, :length]
            assert together[row] == greedy(smollm2.model, alone, 24, attention_mask=torch.ones_like(alone))[0]


def test_beam_search_gives_the_tokens_of_sdpa(smollm2: LoadedModel) -> None:
    ids = novel_tokens(smollm2, 600)
    beams = {"num_beams": 3, "num_return_sequences": 2, "attention_mask": torch.ones_like(ids)}
    expected = greedy(smollm2.model, ids, 20, **beams)
    with attach(smollm2.model, QuestConfig(token_budget=1.0)):
        assert greedy(smollm2.model, ids, 20, **beams) == expected


class Passkeys:
    """The eight prompts of the passkey task at 3.8k tokens, each prefilled once and forked per budget.

    They begin alike, so each is a fork of the last one, cropped to what they share.
    """

    def __init__(self, loaded: LoadedModel, kv_dtype: str) -> None:
        samples = list(Passkey(lengths=(3800,), positions=8).samples(loaded))
        self.cases: list[tuple[QuestCache, Sample]] = []
        last = QuestCache(loaded.model.config, QuestConfig(kv_dtype=kv_dtype))
        with attach(loaded.model):
            prefill(loaded.model, last, torch.tensor([samples[-1].ids]))
            for sample in samples:
                differs = (a != b for a, b in zip(sample.ids, samples[-1].ids, strict=True))
                shared = next((place for place, differ in enumerate(differs) if differ), len(sample.ids))
                cache = last.fork()
                cache.crop(shared - cache.get_seq_length())
                if shared < len(sample.ids):
                    prefill(loaded.model, cache, torch.tensor([sample.ids[shared:]]))
                self.cases.append((cache, sample))


@pytest.fixture(scope="module", params=["model", "int8"])
def passkeys(request: pytest.FixtureRequest, smollm2: LoadedModel) -> Passkeys:
    return Passkeys(smollm2, request.param)


@pytest.mark.parametrize(("budget", "least"), [(1.0, 8), (1024, 8), (256, 6)])
def test_passkeys_are_found(smollm2: LoadedModel, passkeys: Passkeys, budget: float, least: int) -> None:
    found = 0
    for prefilled, sample in passkeys.cases:
        cache = prefilled.fork(replace(prefilled.config, token_budget=budget))
        ids = torch.tensor([[*sample.ids, *sample.data["question"]]])
        with attach(smollm2.model):
            answer = greedy(smollm2.model, ids, 8, cache=cache, attention_mask=torch.ones_like(ids))[0]
        found += sample.data["key"] in smollm2.tokenizer.decode(answer)
        report = cache.report()
        assert (report.pages_read < report.pages_held) == (budget != 1.0)
    assert found >= least


def test_perplexity_over_pages_in_eight_bits_is_within_half_a_percent(smollm2: LoadedModel) -> None:
    """The last 128 of 1,500 tokens, one by one over the whole cache."""
    ids = novel_tokens(smollm2, 1500)
    perplexity = {}
    for kv_dtype in ("model", "int8"):
        cache = QuestCache(smollm2.model.config, QuestConfig(token_budget=1.0, kv_dtype=kv_dtype))
        with attach(smollm2.model):
            prefill(smollm2.model, cache, ids[:, :1372])
            loss = 0.0
            for i in range(1372, 1499):
                logits = smollm2.model(ids[:, i : i + 1], cache=cache, use_cache=True).logits[0, -1]
                loss -= float(logits.log_softmax(dim=-1)[ids[0, i + 1]])
        perplexity[kv_dtype] = math.exp(loss / 127)
    assert perplexity["int8"] != perplexity["model"]
    assert abs(perplexity["int8"] / perplexity["model"] - 1) < 0.005
