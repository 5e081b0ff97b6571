"""Perplexity of a text behind a long prefill, one token at a time: the paper's PG19 protocol (section 4.2)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from questkv.errors import ConfigError
from questkv.evaluate.chat import begin_ids
from questkv.evaluate.task import Row, Sample, Task
from questkv.evaluate.text import Text
from questkv.models import LoadedModel
from questkv.policies import decode

if TYPE_CHECKING:
    from questkv.policies import Context, Policy


@dataclass(frozen=True)
class Perplexity(Task):
    """Text is prefilled and the tokens behind it are fed one by one, each predicting the next.

    Attributes:
        text: What is read.
        lengths: Tokens prefilled.
        scored: Tokens predicted, each in a decode step.
        windows: Prompts of each length, one behind the other in the text.
        start: First token of the text that is used.
    """

    name: ClassVar[str] = "perplexity"
    metric: ClassVar[str] = "perplexity"
    higher_is_better: ClassVar[bool] = False
    tolerance: ClassVar[float] = 0.01

    text: Text
    lengths: tuple[int, ...] = (6000,)
    scored: int = 300
    windows: int = 1
    start: int = 0

    def __post_init__(self) -> None:
        for name, least in (("scored", 1), ("windows", 1), ("start", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"[perplexity] {name}: expected at least {least}, got {getattr(self, name)}")

    def settings(self) -> dict[str, Any]:
        """The settings, with the text's identity in place of its content."""
        return {**super().settings(), "text": self.text.identity()}

    def samples(self, loaded: LoadedModel) -> Iterator[Sample]:
        """One prompt for each length and window.

        Raises:
            DocumentError: The text is too short.
        """
        begin = begin_ids(loaded.tokenizer)
        # the token that the last step predicts is not fed
        sizes = {length: length - len(begin) + self.scored + 1 for length in self.lengths}
        tokens = self.text.tokens(loaded.tokenizer, self.start, self.windows * max(sizes.values()))
        for length, size in sizes.items():
            for window in range(self.windows):
                ids = begin + tokens[window * size : (window + 1) * size]
                yield Sample(
                    id=f"{length}-{window}",
                    length=length,
                    ids=ids[:length],
                    data={"steps": ids[length:]},
                    decoded=self.scored,
                )

    def score(self, loaded: LoadedModel, context: Context, sample: Sample, policy: Policy) -> Mapping[str, Any]:
        """Perplexity, and the negative log-likelihood in nats of every predicted token."""
        steps = torch.tensor([sample.data["steps"]])
        logits = decode(loaded.model, policy.decode_cache(context), steps[:, :-1])
        nll = torch.nn.functional.cross_entropy(logits, steps[0, 1:].to(logits.device), reduction="none").tolist()
        return {"score": math.exp(sum(nll) / len(nll)), "nll": [round(value, 5) for value in nll]}

    def row_fields(self, budget: int | None) -> tuple[str, ...]:
        """See `Task.row_fields`."""
        return ("length", "nll")

    def mean(self, rows: Sequence[Row]) -> float:
        """Perplexity over the tokens of all rows: exp of their mean negative log-likelihood."""
        nll = [value for row in rows for value in row["nll"]]
        return math.exp(sum(nll) / len(nll))

    def show(self, score: float) -> str:
        """With the two decimals that papers give."""
        return f"{score:.2f}"
