"""The paper's six LongBench data sets (section 4.2.3, figure 7): questions about, and summaries of, long texts.

LongBench: Bai et al., 2023, arXiv 2308.14508. The wording of the instructions is questkv's own, so absolute scores are
not those of LongBench's leaderboard; methods and budgets are compared on the same prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from questkv.conversation.markup import begin_ids, markup_ids, text_ids
from questkv.errors import ConfigError
from questkv.evaluate.chat import Chat, stop_ids
from questkv.evaluate.longbench_data import DataSet
from questkv.evaluate.metrics import classification, f1, rouge_l
from questkv.evaluate.task import Sample, Task
from questkv.models import LoadedModel
from questkv.policies import greedy

if TYPE_CHECKING:
    from questkv.policies import Context, Policy

# prediction, one of the answers, all classes
Metric = Callable[[str, str, Sequence[str]], float]


@dataclass(frozen=True)
class Recipe:
    """How a data set is asked and scored.

    Attributes:
        before: What stands before the context.
        after: What stands behind it; ``{input}`` is the record's question or last example.
        max_new_tokens: Longest answer, as in LongBench.
        metric: Scores a prediction against one answer; the best of all answers counts.
        chat: Whether the prompt takes the model's chat form; few-shot examples are plain text to be continued.
        first_line: Whether only the answer's first line counts: a model goes on with examples of its own.
    """

    before: str
    after: str
    max_new_tokens: int
    metric: Metric
    chat: bool = True
    first_line: bool = False


def _f1(prediction: str, answer: str, classes: Sequence[str]) -> float:
    return f1(prediction, answer)


def _rouge_l(prediction: str, answer: str, classes: Sequence[str]) -> float:
    return rouge_l(prediction, answer)


_ASK = "\n\nAnswer the question from the {what} above, in as few words as you can.\n\nQuestion: {{input}}\n\nAnswer:"
RECIPES: dict[str, Recipe] = {
    "qasper": Recipe(
        "Read a scientific article.\n\n",
        '\n\nAnswer the question from the article above, in as few words as you can. Say "unanswerable" if the article '
        'doesn\'t tell; answer a yes/no question with "yes", "no" or "unanswerable".\n\nQuestion: {input}\n\nAnswer:',
        128,
        _f1,
    ),
    "hotpotqa": Recipe("Read some passages.\n\n", _ASK.format(what="passages"), 32, _f1),
    "multifieldqa_en": Recipe("Read a text.\n\n", _ASK.format(what="text"), 64, _f1),
    "triviaqa": Recipe(
        "Answer each question from its passage. Some examples come first.\n\n",
        "\n\n{input}",
        32,
        _f1,
        chat=False,
        first_line=True,
    ),
    "narrativeqa": Recipe("Read a story.\n\n", _ASK.format(what="story"), 128, _f1),
    "gov_report": Recipe(
        "Read a government report.\n\n", "\n\nSummarise the report above on one page.\n\nSummary:", 512, _rouge_l
    ),
    # Not among the paper's six.
    "trec": Recipe(
        "Tell the type of each question. Some examples come first.\n\n",
        "\n{input}",
        64,
        classification,
        chat=False,
        first_line=True,
    ),
}
PAPER = ("qasper", "hotpotqa", "multifieldqa_en", "triviaqa", "narrativeqa", "gov_report")


def check_names(names: Sequence[str]) -> None:
    """Refuse data sets that there is no recipe for, before they are read.

    Raises:
        ConfigError: An unknown name, or one given twice.
    """
    for name in names:
        if name not in RECIPES:
            raise ConfigError(f"[longbench] datasets: expected some of {', '.join(RECIPES)}, got {name!r}")
        if list(names).count(name) > 1:
            raise ConfigError(f"[longbench] datasets: expected each once, got {name} twice")


@dataclass(frozen=True)
class LongBench(Task):
    """Each record's context is prefilled, and what follows it decoded token by token.

    Attributes:
        data: What `longbench_data` read.
        length: Most tokens of a prompt; a longer context loses its middle, as in LongBench.
        count: Records of each data set, from the first; fewer where it has fewer.
    """

    name: ClassVar[str] = "longbench"
    metric: ClassVar[str] = "score"
    table_by: ClassVar[str] = "dataset"

    data: tuple[DataSet, ...]
    length: int = 7500
    count: int = 20

    def __post_init__(self) -> None:
        check_names([data.name for data in self.data])
        for name in ("length", "count"):
            if getattr(self, name) < 1:
                raise ConfigError(f"[longbench] {name}: expected at least 1, got {getattr(self, name)}")

    def settings(self) -> dict[str, Any]:
        """The settings, with the files' digests in place of the records."""
        return {"datasets": {data.name: data.digest for data in self.data}, "length": self.length, "count": self.count}

    def samples(self, loaded: LoadedModel) -> Iterator[Sample]:
        """The first records of each data set.

        Raises:
            ConfigError: `length` has no room for a record's question and a context.
        """
        for data in self.data:
            for number, record in enumerate(data.records[: self.count]):
                yield self._sample(loaded.tokenizer, data.name, number, record)

    def score(self, loaded: LoadedModel, context: Context, sample: Sample, policy: Policy) -> Mapping[str, Any]:
        """Generate an answer and compare it with the record's; the best of several answers counts."""
        recipe: Recipe = sample.data["recipe"]
        question = torch.tensor([sample.data["question"]])
        cache = policy.decode_cache(context)
        tokens = greedy(loaded.model, cache, question, recipe.max_new_tokens, stop_ids(loaded.model))
        answer = loaded.tokenizer.decode(tokens, skip_special_tokens=True).strip()
        counted = answer.partition("\n")[0] if recipe.first_line else answer
        scores = [recipe.metric(counted, wanted, sample.data["classes"]) for wanted in sample.data["answers"]]
        return {"score": max(scores, default=0.0), "dataset": sample.data["dataset"], "answer": answer}

    def show(self, score: float) -> str:
        """In per cent, as LongBench has it."""
        return f"{100 * score:.1f}"

    def _sample(self, tokenizer: Any, name: str, number: int, record: Mapping[str, Any]) -> Sample:
        recipe = RECIPES[name]
        chat = Chat.of(tokenizer) if recipe.chat else Chat()
        before = markup_ids(tokenizer, chat.before) if chat.before else begin_ids(tokenizer)
        before += text_ids(tokenizer, recipe.before)
        after = text_ids(tokenizer, recipe.after.replace("{input}", record["input"]))
        after += markup_ids(tokenizer, chat.after)
        room = self.length - len(before) - len(after)
        if room < 1:
            raise ConfigError(
                f"[longbench] length: expected more than {len(before) + len(after):,} tokens, which record {number} of "
                f"{name} takes without its context, got {self.length:,}"
            )
        return Sample(
            id=f"{name}-{number}",
            length=self.length,
            ids=before + without_middle(text_ids(tokenizer, record["context"]), room),
            data={
                "dataset": name,
                "recipe": recipe,
                "question": after,
                "answers": record["answers"],
                "classes": record.get("all_classes") or (),
            },
            decoded=len(after) + recipe.max_new_tokens,
        )


def without_middle(ids: list[int], count: int) -> list[int]:
    """The first and last tokens, `count` together; of an odd number one more at the end."""
    if len(ids) <= count:
        return ids
    first = count // 2
    return ids[:first] + ids[len(ids) - (count - first) :]
