"""A number hidden in a long prompt and asked for: what `passkey` and `needle` share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from questkv.evaluate.chat import Chat, markup_ids, stop_ids, text_ids
from questkv.evaluate.task import Sample, Task
from questkv.models import LoadedModel
from questkv.policies import greedy

if TYPE_CHECKING:
    from questkv.policies import Context, Policy

# Most tokens of an answer: five digits one by one, and what a model may put before and after them.
ANSWER_TOKENS = 8
_FIRST, _STEP = 11345, 7919


@dataclass(frozen=True)
class HiddenKeyTask(Task):
    """The part after the prompt: the question is decoded token by token, the answer begun, and its number compared."""

    metric: ClassVar[str] = "keys found"

    def score(self, loaded: LoadedModel, context: Context, sample: Sample, policy: Policy) -> Mapping[str, Any]:
        """1.0 where the first thing that the model says is the key, else 0.0; and what it said."""
        tokenizer = loaded.tokenizer
        question = torch.tensor([sample.data["question"]])
        cache = policy.decode_cache(context)
        answer = greedy(loaded.model, cache, question, ANSWER_TOKENS, stop_ids(loaded.model))
        text = tokenizer.decode(answer, skip_special_tokens=True).strip()
        number = re.match(r"\d+", text)
        found = number is not None and number.group() == sample.data["key"]
        return {"score": float(found), "depth": sample.data["depth"], "key": sample.data["key"], "answer": text}

    def row_fields(self, budget: int | None) -> tuple[str, ...]:
        """See `Task.row_fields`."""
        return ("length", "depth")

    def show(self, score: float) -> str:
        """As a percentage, as the paper's table 1 has it."""
        return f"{score:.0%}"


def key(index: int, seed: int) -> str:
    """The index-th key: five digits; no two of the first 90,000 are equal, whatever the seed."""
    return str(10000 + (_FIRST + _STEP * (index + 1000 * seed)) % 90000)


def fact(number: str) -> str:
    """The sentences that hide a key (paper, section 4.2)."""
    return f"The pass key is {number}. Remember it. {number} is the pass key. "


def question_ids(tokenizer: Any, chat: Chat) -> list[int]:
    """From the end of the text to where the model takes over, the answer begun for it."""
    turn = text_ids(tokenizer, "What is the pass key?") + markup_ids(tokenizer, chat.after)
    # without a chat's markup between them the answer follows the question in the same paragraph
    return turn + text_ids(tokenizer, "The pass key is" if chat.after else " The pass key is")


def depths(count: int) -> list[float]:
    """`count` places from 0 (the beginning) to 1 (the end), evenly spaced; a single one lies in the middle."""
    return [0.5] if count == 1 else [index / (count - 1) for index in range(count)]
