"""How much of the true attention a selection of pages keeps: the paper's figures 3 and 4, and the choice of defaults.

A text is prefilled once and some tokens behind it are decoded densely. From the queries, keys and values of these steps
every combination of budget, page size, type of pages, optimism and group rule is measured without running the model
again, beside oracles that know the true attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

from questkv.config import QuestConfig
from questkv.environment import environment
from questkv.errors import ConfigError, UnsupportedError
from questkv.evaluate.chat import begin_ids
from questkv.evaluate.recall_budget import check_share
from questkv.evaluate.recall_measure import measure
from questkv.evaluate.recall_rules import ORACLE, ORACLE_TOKENS, QUEST, Rule
from questkv.evaluate.recall_steps import Observed
from questkv.evaluate.results import Results
from questkv.evaluate.runner import Progress
from questkv.evaluate.task import Row, Sample, Task
from questkv.evaluate.text import Text
from questkv.models import LoadedModel

if TYPE_CHECKING:
    from questkv.policies import Context, Policy


@dataclass(frozen=True, kw_only=True)
class Recall(Task):
    """What is measured.

    Attributes:
        text: What is read.
        lengths: Tokens prefilled before the decode steps.
        budgets: Tokens that a step may read per KV head. Under ``group="per_head"`` the budget of each head is lowered
            until the pages that its group's heads read together are as many bytes as one list per KV head would be.
        page_sizes: Every S to try.
        optimisms: Every optimism to try.
        groups: Every group rule to try.
        kv_dtypes: Every type of sealed pages to try; the attention that all are measured against is the model type's.
        span_pages: Every number of pages a span to try; 0 scores every page.
        base: What else a configuration holds: sink, recent, dense layers, boxes. With its own page size, optimism and
            group rule, all pages scored, the budget that keeps `share` is worked out.
        windows: Pieces of the text that are measured, one behind the other.
        start: First token of the text that is used.
        steps: Decode steps, teacher-forced on the text.
        share: Share of the attention mass for which the needed budget is worked out, per layer.

    Raises:
        ConfigError: A value is impossible, given twice, or a budget too small for a page size.
    """

    name: ClassVar[str] = "recall"
    metric: ClassVar[str] = "share of attention mass"

    text: Text
    lengths: tuple[int, ...]
    budgets: tuple[int, ...]
    page_sizes: tuple[int, ...] = (QuestConfig.page_size,)
    optimisms: tuple[float, ...] = (QuestConfig.optimism,)
    groups: tuple[str, ...] = (QuestConfig.group,)
    kv_dtypes: tuple[str, ...] = (QuestConfig.kv_dtype,)
    span_pages: tuple[int, ...] = (QuestConfig.span_pages,)
    base: QuestConfig = field(default_factory=QuestConfig)
    windows: int = 1
    start: int = 0
    steps: int = 24
    share: float = 0.99

    def __post_init__(self) -> None:
        for name in ("lengths", "budgets", "page_sizes", "optimisms", "groups", "kv_dtypes", "span_pages"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"[recall] {name}: expected one or more values, each once, got {list(values)}")
        for name, least in (("windows", 1), ("start", 0), ("steps", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"[recall] {name}: expected at least {least}, got {getattr(self, name)}")
        if min(self.lengths) < 1:
            raise ConfigError(f"[recall] lengths: expected at least 1 token, got {min(self.lengths)}")
        check_share(self.share)
        if any(self.span_pages) and "per_head" in self.groups:
            # Heads that share boxes score different ones, so equal bytes can't be told from lists alone.
            raise ConfigError(f"[recall] span_pages: expected 0 with the rule per_head, got {list(self.span_pages)}")
        for budget, rule in product(self.budgets, self.rules()):
            replace(rule.config, token_budget=budget)

    def rules(self) -> list[Rule]:
        """Every rule that is measured at every budget: the oracles first."""
        rules = [self._oracle_tokens()]
        rules += [Rule(ORACLE, replace(self.base, token_budget=1.0, page_size=size)) for size in self.page_sizes]
        tried = product(self.page_sizes, self.groups, self.optimisms, self.kv_dtypes, self.span_pages)
        for size, group, optimism, kind, spans in tried:
            config = replace(self.base, page_size=size, group=group, optimism=optimism, kv_dtype=kind, span_pages=spans)
            rules.append(Rule(QUEST, replace(config, token_budget=1.0)))
        return rules

    def base_rules(self) -> list[Rule]:
        """The rules whose needed budgets are worked out: the oracles' and the base configuration's."""
        whole = replace(self.base, token_budget=1.0, span_pages=0)
        return [self._oracle_tokens(), Rule(ORACLE, whole), Rule(QUEST, whole)]

    def samples(self, loaded: LoadedModel) -> Iterator[Sample]:
        """Every piece of the text: its prompt, and the tokens of the steps.

        Raises:
            DocumentError: The text is too short.
        """
        begin = begin_ids(loaded.tokenizer)
        sizes = {length: length - len(begin) + self.steps for length in self.lengths}
        tokens = self.text.tokens(loaded.tokenizer, self.start, self.windows * max(sizes.values()))
        for (length, size), window in product(sizes.items(), range(self.windows)):
            ids = begin + tokens[window * size : (window + 1) * size]
            data = {"steps": ids[length:]}
            yield Sample(f"{length}-{window}", length, ids[:length], data, decoded=self.steps)

    def score(self, loaded: LoadedModel, context: Context, sample: Sample, policy: Policy) -> Mapping[str, Any]:
        """Not by method: see `run_recall`."""
        raise UnsupportedError("[recall] score: expected run_recall, which measures every rule at once")

    def runs(self) -> list[tuple[str, int | None]]:
        """(method, budget) of each row of a sample, in order."""
        return [
            *((rule.label, budget) for rule in self.rules() for budget in self.budgets),
            *((rule.label, None) for rule in self.base_rules()),
        ]

    def row_fields(self, budget: int | None) -> tuple[str, ...]:
        """See `Task.row_fields`."""
        return ("length", "rule", "layers", *(("share", "needed", "tokens") if budget is None else ("own_budget",)))

    def settings(self) -> dict[str, Any]:
        """The settings as JSON values, with the text's identity in place of its content."""
        return {**asdict(self), "text": self.text.identity(), "base": self.base.to_dict()}

    def _oracle_tokens(self) -> Rule:
        # None is forced: the most mass that a budget can hold.
        config = replace(self.base, token_budget=1.0, page_size=1, sink_tokens=0, recent_tokens=0)
        return Rule(ORACLE_TOKENS, config)


def describe_recall(recall: Recall, loaded: LoadedModel, model: Mapping[str, Any]) -> dict[str, Any]:
    """``run.json``, in the form of `runner.describe`."""
    base = {key: value for key, value in recall.base.to_dict().items() if key != "token_budget"}
    return {
        "task": recall.name,
        "settings": recall.settings(),
        "model": {**model, "dtype": str(loaded.model.dtype).removeprefix("torch.")},
        "quest": base,
        "environment": environment(recall.base.backend, loaded.model.device),
    }


def run_recall(
    recall: Recall, loaded: LoadedModel, samples: Sequence[Sample], results: Results, on_progress: Progress
) -> None:
    """Measure what isn't done yet; a sample's rows are written once it is measured.

    Args:
        recall: What to measure.
        loaded: A model whose attention is ``questkv``.
        samples: What `Recall.samples` gave.
        results: Where finished rows are and go.
        on_progress: Called often.
    """
    todo = [s for s in samples if not all(results.is_done(s.id, *key) for key in recall.runs())]
    for number, sample in enumerate(todo):

        def part(share: float, what: str, begin: float, number: int = number) -> None:
            on_progress((number + begin + 0.5 * share) / len(todo), f"recall {number + 1}/{len(todo)}: {what}")

        ids = [*sample.ids, *sample.data["steps"]]
        # What all are measured against has lost nothing to coding.
        exact = replace(recall.base, kv_dtype="model")
        observed = Observed(loaded, ids, recall.steps, exact, lambda share, what: part(share, what, 0.0))
        for row in measure(observed, recall, lambda share, what: part(share, what, 0.5)):
            # A run that was stopped while it wrote a sample's rows has some of them already.
            if not results.is_done(sample.id, row["method"], row["budget"]):
                results.add({"sample": sample.id, "length": sample.length, **row})


def overall(rows: Sequence[Row]) -> Iterator[Row]:
    """Rows of the same rule, budget and length as one: the mean over samples, the least of their worst heads."""
    groups: dict[tuple[str, int | None, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["budget"], row["length"]), []).append(row)
    for same in groups.values():
        mean = {**same[0], "samples": len(same)}
        for name in ("score", "top10", "error", "bytes_read", "share_read"):
            if name in mean:
                mean[name] = sum(row[name] for row in same) / len(same)
        if "worst_head" in mean:
            mean["worst_head"] = min(row["worst_head"] for row in same)
        yield mean
