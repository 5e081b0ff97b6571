"""Prompt and continuation have the rotary frequencies of their whole length, in every kind of evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf.tiny_models import build, tokens
from questkv import QuestConfig
from questkv.evaluate import runner
from questkv.evaluate.harness import Decoding
from questkv.evaluate.perplexity import Perplexity
from questkv.evaluate.plan import Plan
from questkv.evaluate.recall_steps import Observed
from questkv.evaluate.results import Results
from questkv.evaluate.task import Sample
from questkv.evaluate.text import Text
from questkv.models import LoadedModel
from questkv.policies import make_policy

# The models' frequencies are others where a sequence is longer than 150 tokens.
PROMPT, STEPS = 140, 20
BY_LENGTH = ("llama-dynamic", "llama-longrope", "phi3-longrope")


def losses(name: str, ids: torch.Tensor, fed: int) -> tuple[torch.Tensor, float]:
    """Float64 losses of the tokens after the prompt in a forward over the first `fed`, and float32's distance."""
    found = []
    for model in (build(name, "sdpa").double(), build(name, "sdpa")):
        with torch.no_grad():
            shares = model(ids[None, :fed]).logits[0].double().log_softmax(dim=-1)
        found.append(-shares[PROMPT - 1 : len(ids) - 1].gather(1, ids[PROMPT:, None])[:, 0])
    return found[0], float((found[0] - found[1]).abs().max())


class Words:
    """A perplexity task on given tokens, without a tokenizer."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids.tolist()

    def samples(self) -> list[Sample]:
        steps = {"steps": self.ids[PROMPT:]}
        return [Sample(id="0", length=PROMPT, ids=self.ids[:PROMPT], data=steps, decoded=STEPS)]


@pytest.mark.parametrize("name", BY_LENGTH)
def test_a_run_scores_as_one_forward_does(name: str, tmp_path: Path) -> None:
    ids = tokens(PROMPT + STEPS)
    expected, error = losses(name, ids, PROMPT + STEPS)
    loaded = LoadedModel(build(name, "questkv"), None)
    task = Perplexity(text=Text("words", "w"), lengths=(PROMPT,), scored=STEPS)
    plan = Plan(methods=("full",), budgets=(), quest=QuestConfig(token_budget=1.0))
    described: dict[str, Any] = {"task": "perplexity"}
    with Results.open(tmp_path, described, resume=True) as results:
        runner.run(task, loaded, plan, Words(ids).samples(), results)
        (row,) = results.rows
    # The first token after the prompt is fed and not scored; losses are rounded to five decimals.
    assert row["nll"] == pytest.approx(expected[1:].tolist(), abs=4 * error + 5e-6)


# Not "llama-dynamic": a prompt is cut to the context of the config, within which its frequencies are the same.
@pytest.mark.parametrize("name", ["llama-longrope", "phi3-longrope"])
def test_a_loglikelihood_is_that_of_one_forward(name: str) -> None:
    ids = tokens(PROMPT + STEPS)
    decoding = Decoding(LoadedModel(build(name, "questkv"), None), make_policy("full"), decoded=7)
    # Each continuation leaves a context of the same prompt behind, which the next one can't use.
    for count in (5, STEPS, 5):
        rest = ids[PROMPT : PROMPT + count]
        expected, error = losses(name, ids[: PROMPT + count], PROMPT + count - 1)
        got, _ = decoding.loglikelihood(ids[:PROMPT].tolist(), rest.tolist())
        assert got == pytest.approx(-float(expected.sum()), abs=4 * error * count)


@pytest.mark.parametrize("name", BY_LENGTH)
def test_observed_steps_have_the_keys_of_one_forward(name: str) -> None:
    ids, model = tokens(1, PROMPT + STEPS), build(name, "sdpa")
    with torch.no_grad():
        expected = model(ids, use_cache=True).cache.layers[0].keys[0].double()
        double = build(name, "sdpa").double()(ids, use_cache=True).cache.layers[0].keys[0]
    loaded = LoadedModel(build(name, "questkv"), None)
    observed = Observed(loaded, ids[0].tolist(), STEPS, QuestConfig(token_budget=1.0), lambda share, what: None)
    keys = observed.steps(0).keys.double()
    assert (keys - double).abs().max() <= 4 * float((expected - double).abs().max())
