"""What a task is: samples to prefill, and a score for each method that decodes behind them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from questkv.models import LoadedModel

if TYPE_CHECKING:
    from questkv.policies import Context, Policy

Row = dict[str, Any]
"""One finished sample under one method and budget, as it lies in ``rows.jsonl``.

Every row has ``method``, ``budget`` (tokens; None for the full cache), ``length`` (tokens asked for), ``score``,
``sample`` (its id), ``prompt_tokens``, ``policy`` (the method's settings) and ``seconds``, and what the task adds.
"""


@dataclass(frozen=True)
class Sample:
    """One prompt.

    Attributes:
        id: Its name, unique in the task: ``3800-0``.
        length: Tokens that were asked for; rows of equal length are averaged.
        ids: Token ids of the part that is prefilled, shared by every method and budget.
        data: What the task needs to decode and score it; never written anywhere.
        decoded: Most tokens that are decoded behind the prompt (the question and the answer), so that a prompt too
            long for the model is refused before anything is run.
    """

    id: str
    length: int
    ids: Sequence[int]
    data: Mapping[str, Any] = field(default_factory=dict, repr=False)
    decoded: int = 0


@dataclass(frozen=True)
class Task(ABC):
    """A task with its settings: a frozen dataclass whose fields stand in ``run.json``.

    Attributes:
        name: The subcommand's name.
        metric: What the score is, for a table's title and a figure's axis.
        higher_is_better: Whether a larger score is a better one.
        table_by: The rows' field that gets a table of its own for each of its values.
        tolerance: Share of the full cache's score that a budget may lose and still count as enough.
    """

    name: ClassVar[str]
    metric: ClassVar[str]
    higher_is_better: ClassVar[bool] = True
    table_by: ClassVar[str] = "length"
    tolerance: ClassVar[float] = 0.0

    @abstractmethod
    def samples(self, loaded: LoadedModel) -> Iterator[Sample]:
        """Every prompt, the same ones in the same order each time: they depend on the settings and the tokenizer."""

    @abstractmethod
    def score(self, loaded: LoadedModel, context: Context, sample: Sample, policy: Policy) -> Mapping[str, Any]:
        """Decode behind a prefilled prompt under one method and budget.

        Args:
            loaded: The model and its tokenizer.
            context: The sample's prompt, prefilled; it stays as it was.
            sample: What `samples` gave.
            policy: The method with its budget.

        Returns:
            ``score``, a finite float, and whatever else the row is to hold, as JSON values.
        """

    def settings(self) -> dict[str, Any]:
        """The settings as JSON values: what `run.json` holds and a resumed run must share."""
        return asdict(self)

    def row_fields(self, budget: int | None) -> tuple[str, ...]:
        """What a row of that budget holds besides ``sample``, ``method``, ``budget`` and ``score``: tables need it."""
        return (self.table_by,)

    def mean(self, rows: Sequence[Row]) -> float:
        """One number for rows of one method and budget: the mean score, unless the task averages something else."""
        return sum(float(row["score"]) for row in rows) / len(rows)

    def show(self, score: float) -> str:
        """A score as a table shows it."""
        return f"{score:.3f}"
