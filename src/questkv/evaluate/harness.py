"""Tasks of lm-evaluation-harness under any method: a model that it knows as ``questkv``.

The last tokens of every prompt and all that follows are decoded one by one under the method, what comes before them is
prefilled densely (`Decoding.decoded`), so that a prompt is read the way the paper's evaluation reads it.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch

from questkv.config import QuestConfig
from questkv.errors import ConfigError, MissingPackageError, UnsupportedError
from questkv.evaluate.chat import stop_ids
from questkv.evaluate.plan import Plan
from questkv.evaluate.results import Results
from questkv.evaluate.runner import Progress
from questkv.evaluate.task import Row, Sample, Task
from questkv.hf.rotary import read_as, reads_alike
from questkv.models import LoadedModel, context_length
from questkv.policies import Context, Policy, decode, prefill_context

NAME = "questkv"
INSTALL = "pip install 'questkv[eval]'"


def require_lm_eval() -> None:
    """Fail before a model is loaded.

    Raises:
        MissingPackageError: lm-evaluation-harness is not installed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise MissingPackageError(f"[harness] lm_eval: expected lm-evaluation-harness; install it: {INSTALL}")


class Decoding:
    """Scores and continues token sequences under one method.

    Args:
        loaded: A model whose attention is ``questkv``, and its tokenizer.
        policy: The method with its budget.
        decoded: Last tokens of a prompt that are decoded and not prefilled, at least 1.
        quest: Page size, box and KV dtype of the context; the default ones if None.
    """

    def __init__(self, loaded: LoadedModel, policy: Policy, decoded: int, quest: QuestConfig | None = None) -> None:
        if decoded < 1:
            raise ConfigError(f"[harness] decoded: expected at least 1 token, got {decoded}")
        self.loaded = loaded
        self.policy = policy
        self.decoded = decoded
        self.quest = quest if quest is not None else QuestConfig()
        self.truncated = 0
        self._context: tuple[list[int], Context] | None = None
        self._tokens = 0  # of the sequence whose rotary frequencies the context's keys have

    @property
    def max_length(self) -> int:
        """Tokens that the model takes; 2048 where its config doesn't say, as lm-evaluation-harness has it."""
        return context_length(self.loaded.model.config) or 2048

    def loglikelihood(self, prompt: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
        """Log-probability of a continuation in nats, and whether each of its tokens is the likeliest."""
        kept = self._fit(prompt, len(continuation) - 1)
        with self._read_as(len(kept) + len(continuation) - 1):
            cache, logits = self._read(kept)
            if len(continuation) > 1:
                rest = decode(self.loaded.model, cache, torch.tensor([list(continuation[:-1])]))
                logits = torch.cat([logits, rest])
        wanted = torch.tensor(list(continuation), device=logits.device)
        chosen = logits.log_softmax(dim=-1).gather(1, wanted[:, None])
        return float(chosen.double().sum()), bool((logits.argmax(dim=-1) == wanted).all())

    def generate(self, prompt: Sequence[int], max_new_tokens: int, until: Sequence[str]) -> str:
        """The likeliest continuation, up to the first of the strings `until` or an end token."""
        kept = self._fit(prompt, max_new_tokens)
        with self._read_as(len(kept) + max_new_tokens):
            return self._continue(kept, max_new_tokens, until)

    def _continue(self, prompt: list[int], max_new_tokens: int, until: Sequence[str]) -> str:
        tokenizer = self.loaded.tokenizer
        cache, logits = self._read(prompt)
        ends_answer = stop_ids(self.loaded.model) | {tokenizer.eos_token_id}
        tokens: list[int] = []
        text: str = ""
        while len(tokens) < max_new_tokens:
            token = int(logits[-1].argmax())
            if token in ends_answer:
                break
            tokens.append(token)
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            ends = [text.index(stop) for stop in until if stop and stop in text]
            if ends:
                return text[: min(ends)]
            logits = decode(self.loaded.model, cache, torch.tensor([[token]]))
        return text

    def _fit(self, prompt: Sequence[int], room: int) -> list[int]:
        """The prompt's last tokens that leave room for so many more; at least one."""
        most = self.max_length - room
        if most < 1:
            raise ConfigError(
                f"[harness] continuation: expected fewer than {self.max_length:,} tokens, got {room + 1:,}"
            )
        self.truncated += len(prompt) > most
        return list(prompt[-most:])

    @contextmanager
    def _read_as(self, tokens: int) -> Iterator[None]:
        """`read_as`, with a new context where the kept one's keys have other frequencies."""
        if not reads_alike(self.loaded.model, self._tokens, tokens):
            self._context = None
        self._tokens = tokens
        with read_as(self.loaded.model, tokens):
            yield

    def _read(self, prompt: list[int]) -> tuple[Any, torch.Tensor]:
        """A decode cache that holds the prompt, and the logits [1, vocabulary] of the token behind it."""
        if len(prompt) == 1:
            # One token leaves nothing to prefill, and every method reads it alike.
            context = self._prefilled(prompt)
            return self.policy.decode_cache(context), self._alone(prompt)
        split = max(len(prompt) - self.decoded, 1)
        cache = self.policy.decode_cache(self._prefilled(prompt[:split]))
        return cache, decode(self.loaded.model, cache, torch.tensor([prompt[split:]]))[-1:]

    def _alone(self, prompt: list[int]) -> torch.Tensor:
        with torch.no_grad():
            ids = torch.tensor([prompt], device=self.loaded.model.device)
            logits: torch.Tensor = self.loaded.model(input_ids=ids, **_fresh_cache(self.loaded.model)).logits
        return logits[0, -1:].float()

    def _prefilled(self, prompt: list[int]) -> Context:
        """The prompt's context; the last one is kept, since choices of one question share it."""
        if self._context is None or self._context[0] != prompt:
            self._context = None  # before the next one is made: two may not fit
            ids = torch.tensor([prompt])
            context = prefill_context(self.loaded.model, ids, self._config(), observe=self.policy.observes)
            self._context = (prompt, context)
        return self._context[1]

    def _config(self) -> QuestConfig:
        config: QuestConfig = getattr(self.policy, "config", self.quest)
        return config


def _fresh_cache(model: Any) -> dict[str, Any]:
    from questkv.hf.cache import QuestCache
    from questkv.hf.prefill import cache_argument

    return {cache_argument(model): QuestCache(model.config, QuestConfig(token_budget=1.0)), "use_cache": True}


def run_harness(tasks: HarnessTasks, loaded: LoadedModel, plan: Plan, results: Results, on_progress: Progress) -> None:
    """Run what isn't done yet, a row for each task, method and budget.

    Args:
        tasks: The tasks.
        loaded: A model whose attention is ``questkv``.
        plan: Methods and budgets.
        results: Where finished rows are and go.
        on_progress: Called before each of them.
    """
    todo = [(t, e) for t in tasks.tasks for e in plan.entries() if not results.is_done(t, e.method, e.budget)]
    for number, (task, planned) in enumerate(todo):
        on_progress(number / len(todo), f"{task}: {planned.method}{f' {planned.budget}' if planned.budget else ''}")
        began = time.perf_counter()
        row = {"method": planned.method, "budget": planned.budget, "length": None, "sample": task}
        scored = tasks.evaluate(loaded, task, planned.policy, plan.quest)
        seconds = round(time.perf_counter() - began, 3)
        lowered = {"lowered": planned.lowered} if planned.lowered else {}
        results.add(
            {
                **row,
                **scored,
                **lowered,
                "policy": planned.policy.fields(),
                "kv_dtype": plan.quest.kv_dtype,
                "seconds": seconds,
            }
        )


@cache
def model_class() -> Any:
    """lm-evaluation-harness's model over a `Decoding`, registered there as ``questkv``.

    Raises:
        MissingPackageError: lm-evaluation-harness is not installed.
    """
    require_lm_eval()
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model

    @register_model(NAME)
    class HarnessModel(TemplateLM):
        """One `Decoding`; sequences are taken one at a time.

        Args:
            decoding: The model and the method.
        """

        def __init__(self, decoding: Decoding) -> None:
            super().__init__()
            self.decoding = decoding
            self.tokenizer = decoding.loaded.tokenizer

        @property
        def eot_token_id(self) -> int:
            return int(self.tokenizer.eos_token_id)

        @property
        def prefix_token_id(self) -> int:
            begin = self.tokenizer.bos_token_id
            return int(begin) if begin is not None else self.eot_token_id

        @property
        def tokenizer_name(self) -> str:
            return str(self.tokenizer.name_or_path).replace("/", "__")

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            # None leaves it to the tokenizer, but for a text that begins with its own begin-of-text token.
            begin = self.tokenizer.bos_token
            special = not (begin and string.startswith(begin)) if add_special_tokens is None else add_special_tokens
            return list(self.tokenizer(string, add_special_tokens=special)["input_ids"])

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return str(
                self.tokenizer.apply_chat_template(
                    chat_history,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
            )

        def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
            return [self.decoding.loglikelihood(prompt, rest) for _, prompt, rest in requests]

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            return [self._rolling(self.tok_encode(request.args[0], add_special_tokens=False)) for request in requests]

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            return [self._generate(*request.args) for request in requests]

        def _rolling(self, tokens: list[int]) -> float:
            """A whole text's log-probability; each of its tokens is predicted by a decode step."""
            windows = utils.get_rolling_token_windows(tokens, self.prefix_token_id, self.decoding.max_length, 1)
            return sum(self.decoding.loglikelihood(*utils.make_disjoint_window(window))[0] for window in windows)

        def _generate(self, prompt: str, options: Mapping[str, Any]) -> str:
            if options.get("do_sample") and options.get("temperature", 1.0) > 0:
                raise UnsupportedError("[harness] do_sample: expected greedy generation, got sampling")
            until = options.get("until") or []
            until = [until] if isinstance(until, str) else list(until)
            most = int(options.get("max_gen_toks", options.get("max_new_tokens", 256)))
            return self.decoding.generate(self.tok_encode(prompt), most, until)

    return HarnessModel


@dataclass(frozen=True)
class HarnessTasks(Task):
    """Tasks of lm-evaluation-harness, as the tables and figures take them.

    Attributes:
        tasks: Their names.
        include_path: A folder with task files of one's own, or None.
        limit: Samples of each task; None for all.
        decoded: See `Decoding`.
    """

    name: ClassVar[str] = "harness"
    metric: ClassVar[str] = "score"
    table_by: ClassVar[str] = "dataset"

    tasks: tuple[str, ...]
    include_path: str | None = None
    limit: int | None = None
    decoded: int = 32

    def row_fields(self, budget: int | None) -> tuple[str, ...]:
        """See `Task.row_fields`."""
        return ("dataset", "higher_is_better")

    def samples(self, loaded: LoadedModel) -> Iterator[Sample]:
        """One a task: lm-evaluation-harness makes the prompts."""
        for task in self.tasks:
            yield Sample(task, 0, ())

    def score(self, loaded: LoadedModel, context: Context, sample: Sample, policy: Policy) -> Mapping[str, Any]:
        """Not by prompt: see `evaluate`."""
        raise UnsupportedError("[harness] score: expected harness.evaluate, since its tasks bring their own prompts")

    def evaluate(self, loaded: LoadedModel, task: str, policy: Policy, quest: QuestConfig) -> Row:
        """One task under one method, on contexts with the pages that `quest` describes.

        Returns:
            ``score`` (the task's first metric), ``metric`` (its name), ``higher_is_better``, ``metrics`` (all of them),
            ``dataset`` (the task) and ``truncated`` (requests whose prompt lost its beginning).
        """
        lm_class = model_class()
        import lm_eval

        decoding = Decoding(loaded, policy, self.decoded, quest)
        found = lm_eval.simple_evaluate(
            model=lm_class(decoding),
            tasks=[task],
            task_manager=_task_manager(self.tasks, self.include_path),
            limit=self.limit,
            log_samples=False,
            bootstrap_iters=0,
        )
        metrics = {
            name.removesuffix(",none"): value
            for name, value in found["results"][task].items()
            if isinstance(value, float | int) and "_stderr" not in name and name != "sample_len"
        }
        name, score = next(iter(metrics.items()))
        return {
            "score": float(score),
            "metric": name,
            "higher_is_better": bool(found["higher_is_better"][task].get(name, True)),
            "metrics": metrics,
            "dataset": task,
            "truncated": decoding.truncated,
        }

    def check_known(self) -> None:
        """Refuse tasks that lm-evaluation-harness doesn't know.

        Raises:
            ConfigError: Naming the first of them.
        """
        known = _task_manager(self.tasks, self.include_path).all_tasks
        for task in self.tasks:
            if task not in known:
                where = f" or {self.include_path}" if self.include_path else ""
                raise ConfigError(f"[harness] tasks: expected tasks of lm-evaluation-harness{where}, got {task!r}")


class LowerIsBetter(HarnessTasks):
    """Tasks whose score is a perplexity or another loss, for their tables and figures."""

    higher_is_better: ClassVar[bool] = False


def as_scored(tasks: HarnessTasks, rows: Sequence[Row]) -> HarnessTasks:
    """The tasks, knowing whether a larger score is a better one.

    Raises:
        ConfigError: For some it is, for others not; one table can't hold both.
    """
    directions = {row["higher_is_better"] for row in rows}
    if len(directions) > 1:
        lower = {row["sample"] for row in rows if not row["higher_is_better"]}
        raise ConfigError(
            f"[harness] tasks: expected scores that are better when higher, or when lower, got both; run "
            f"{', '.join(sorted(lower))} apart"
        )
    return tasks if directions == {True} else LowerIsBetter(**vars(tasks))


@cache
def _task_manager(tasks: tuple[str, ...], include_path: str | None) -> Any:
    """Finds tasks; the thousands that lm-evaluation-harness brings take seconds to read, so only where one is meant."""
    require_lm_eval()
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        own = TaskManager(include_path=include_path, include_defaults=False)
        if all(task in own.all_tasks for task in tasks):
            return own
    return TaskManager(include_path=include_path)
