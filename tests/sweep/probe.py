"""What questkv does with a model of any class: transformers' answer, a refusal, or (a fault) another answer.

A tiny model is asked with two prompts of several pages that are longer than its windows, one of them padded on the
left.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from questkv import QuestConfig, attach
from questkv.errors import QuestKVError, UnsupportedError
from sweep.tiny_configs import WORDS
from sweep.tiny_models import NotBuilt, in_float64, tiny_model

FULL = QuestConfig(token_budget=1.0, page_size=16, dense_layers=0)
SPARSE = QuestConfig(token_budget=32, page_size=8, sink_tokens=8, recent_tokens=8, dense_layers=0)
LENGTHS = (75, 50)
NEW_TOKENS = 6
# Times the reference's own error in float32 that questkv's sums, which have another order, may add.
SLACK = 16

# The reasons for which a class may be refused, and how the error says so. A reason that isn't here is a fault.
REASONS = {
    "computes attention by itself, outside transformers' attention interface": r"transformers' attention inter",
    "keeps no keys and values in transformers' cache": r"keeps its keys and values in transformers' cache, got",
    "has no full-attention layer": r"expected a model with full-attention layers, got",
    "has layers that select tokens by a rule of their own": r"expected full attention, sliding windows and linear",
    "doesn't say that its attention is causal": r"expected causal attention, got a bidirectional or cross layer",
    "adds a bias by position to the logits": r"position_bias: expected None, got",
    "its values are narrower than its keys": r"values: expected the keys' head dim",
    "computes with the keys that it has cached": r"cached keys and values: expected",
    "copies its cache's layers, to run its own several times": r"expected a model that runs each layer once",
    "attends one set of keys with several sets of values": r"values: expected those that were cached",
    "masks attention by a pattern of its own": r"attention_mask: expected a 2-D padding mask, got",
}


@dataclass(frozen=True)
class Outcome:
    """What became of a class.

    Attributes:
        kind: "works", "refused" or "not built".
        reason: Why not, one of `REASONS`, or what the building said.
        windowless: It was tried without the sliding window that its class has by default.
    """

    kind: str
    reason: str = ""
    windowless: bool = False


@dataclass(frozen=True)
class Answer:
    """Greedy tokens [B, NEW_TOKENS], their scores [NEW_TOKENS, B, V], and the logits of a prompt's forward."""

    tokens: torch.Tensor
    scores: torch.Tensor
    logits: torch.Tensor
    padded: torch.Tensor


def outcome(model_type: str, auto: Any = AutoModelForCausalLM) -> Outcome:
    """Build the class that an auto class of transformers has for a model type, and see what questkv does with it.

    Raises:
        AssertionError: It gives another answer than transformers, reads every page at a small budget, or refuses for a
            reason that isn't known.
    """
    try:
        model, windowless = tiny_model(model_type, auto)
        expected = answer(model)
    except NotBuilt as error:
        return Outcome("not built", str(error))
    except (RuntimeError, ValueError, AttributeError) as error:
        return Outcome("not built", f"transformers can't run it: {error}")
    try:
        with attach(model, FULL) as attached:
            got = answer(model)
            assert attached.cache is not None
            held = tuple(length + NEW_TOKENS - 1 for length in LENGTHS)
            assert attached.cache.report().tokens == held, "SILENTLY DIFFERENT: the cache lacks tokens"
    except QuestKVError as error:
        return Outcome("refused", reason_of(error), windowless)
    check_equal(model, got, expected)
    check_sparse(model, expected)
    return Outcome("works", windowless=windowless)


def reason_of(error: QuestKVError) -> str:
    """The one of `REASONS` that an error gives."""
    found = [reason for reason, pattern in REASONS.items() if re.search(pattern, str(error))]
    assert len(found) == 1, f"refused for no reason of the list: {error}"
    assert isinstance(error, UnsupportedError), f"expected an UnsupportedError, got {type(error).__name__}: {error}"
    return found[0]


def check_equal(model: Any, got: Answer, expected: Answer) -> None:
    """Raise AssertionError unless the answers are one, up to what float32 makes of another order of sums."""
    allowed = SLACK * _noise(model, expected)
    if not _agree(got, expected, allowed) and model.config.get_text_config()._attn_implementation == "sdpa":
        # SDPA knows no soft cap and no sinks; the class's own formula does.
        model.set_attn_implementation("eager")
        expected = answer(model)
    assert torch.equal(got.tokens, expected.tokens), "SILENTLY DIFFERENT: other tokens"
    for name in ("scores", "logits", "padded"):
        ours, theirs = getattr(got, name), getattr(expected, name)
        error = float((ours - theirs).masked_fill(ours == theirs, 0.0).abs().max())  # -inf may stand in both
        assert error <= allowed, f"SILENTLY DIFFERENT: {name} are off by {error:.1e}, {allowed:.1e} are float32's"


def check_sparse(model: Any, full: Answer) -> None:
    """Raise AssertionError unless a small budget skips pages, and skipping shows: else the probe would see nothing."""
    with attach(model, SPARSE) as attached:
        tokens, scores = generate(model, *prompts())
        assert attached.cache is not None
        assert attached.cache.report().share_read < 0.9, "a small budget reads every page"
    assert tokens.shape == full.tokens.shape
    seen = float((scores - full.scores)[1].nan_to_num().abs().max())
    assert seen > 1e-3 * float(full.logits.abs().max()), "skipped pages change nothing, so the probe sees no attention"


def answer(model: Any) -> Answer:
    """What a model says to the prompts, alone and as a padded batch."""
    ids, mask = prompts()
    with torch.no_grad():
        logits = model(input_ids=ids[:1]).logits
        padded = model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
        tokens, scores = generate(model, ids, mask)
    assert bool(logits.isfinite().all()), "weights are too large"
    return Answer(tokens, scores, logits, padded[mask.bool()])


def generate(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens and their scores."""
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    return out.sequences[:, ids.shape[1] :], torch.stack(out.scores)


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """[B, max(LENGTHS)] ids and padding mask."""
    width = max(LENGTHS)
    ids = torch.randint(1, WORDS, (len(LENGTHS), width), generator=torch.Generator().manual_seed(1))
    mask = torch.stack([(torch.arange(width) >= width - length).long() for length in LENGTHS])
    return ids * mask, mask


def _noise(model: Any, expected: Answer) -> float:
    """How far float32 is off the same computation in float64."""
    with torch.no_grad():
        exact = in_float64(model)(input_ids=prompts()[0][:1]).logits
    return max(float((expected.logits - exact).abs().max()), torch.finfo(torch.float32).eps * float(exact.abs().max()))


def _agree(got: Answer, expected: Answer, allowed: float) -> bool:
    return torch.equal(got.tokens, expected.tokens) and float((got.logits - expected.logits).abs().max()) <= allowed
