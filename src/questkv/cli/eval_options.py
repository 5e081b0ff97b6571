"""The options that every ``questkv eval`` task has, read and checked before anything slow is imported."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from questkv.cli import options
from questkv.cli.failures import one_line_failures
from questkv.cli.output import STDOUT
from questkv.cli.targets import check_targets
from questkv.config import GROUP_RULES, QuestConfig
from questkv.evaluate.results import ROWS, RUN
from questkv.files import refuse_inputs

# Options and arguments that name what a task reads.
_READ = {"document": "the document", "data": "--data", "include_path": "--include-path"}
# Prompts are made, and checked against the model's context, before the first of them is run.
MAX_SAMPLES = 10_000
METHODS = "full,quest,streaming_llm,h2o,tova,snapkv"
_WHAT, _CACHE, _RESULTS = "What is run", "The cache", "Results"


def parse_counts(text: str) -> tuple[int, ...]:
    """Read ``64,128`` (or ``4k``) as token counts.

    Raises:
        typer.BadParameter: It is something else.
    """
    try:
        parts = [part.strip() for part in text.split(",")]
        counts = tuple(int(part[:-1]) * 1024 if part[-1:] in ("k", "K") else int(part) for part in parts)
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1 or max(counts) > options.MAX_TOKENS:
        raise typer.BadParameter(f"expected token counts such as 64,128 or 4k, got {text!r}")
    if len(set(counts)) < len(counts):
        raise typer.BadParameter(f"expected each count once, got {text!r}")
    return counts


def _counts(text: str) -> str:
    parse_counts(text)
    return text


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """One field an option; `shared_options` puts them behind a command's own."""

    methods: Annotated[
        str, typer.Option(metavar="NAME,...", help="What to compare; quest and others.", rich_help_panel=_WHAT)
    ] = METHODS
    budgets: Annotated[
        str,
        typer.Option(
            metavar="TOKENS,...",
            callback=_counts,
            help="Tokens that each method may hold or read, the first and the recent ones included.",
            rich_help_panel=_WHAT,
        ),
    ] = "64,128,256,512,1024"
    lengths: Annotated[
        str,
        typer.Option(metavar="TOKENS,...", callback=_counts, help="Prompt lengths: 3800,8k.", rich_help_panel=_WHAT),
    ] = "3800"
    samples: Annotated[
        int,
        typer.Option(metavar="N", min=1, max=MAX_SAMPLES, help="Prompts of each length.", rich_help_panel=_WHAT),
    ] = 8
    seed: Annotated[
        int,
        typer.Option(metavar="N", min=0, max=options.MAX_SEED, help="Start of what is drawn.", rich_help_panel=_WHAT),
    ] = 0
    model: options.Model = options.MODEL
    rope_factor: options.RopeFactor = 1.0
    dtype: options.Dtype = "auto"
    weights: options.Weights = "model"
    threads: options.Threads = None
    trust_remote_code: options.TrustRemoteCode = False
    optimism: Annotated[
        float, typer.Option(help="Quest: weight of a box's width in the score, in [0, 1].", rich_help_panel=_CACHE)
    ] = options.DEFAULTS.optimism
    group: Annotated[
        str,
        typer.Option(
            metavar="|".join(GROUP_RULES), help="Quest: how the heads of a group agree.", rich_help_panel=_CACHE
        ),
    ] = options.DEFAULTS.group
    page_size: options.PageSize = options.PAGE_SIZE
    kv_dtype: options.KvDtype = options.KV_DTYPE
    span_pages: options.SpanPages = options.SPAN_PAGES
    offload: options.Offload = options.OFFLOAD
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Where each finished row is written at once. Default: a folder in questkv-eval/ for each combination "
            "of settings.",
            rich_help_panel=_RESULTS,
            show_default=False,
        ),
    ] = None
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue what that folder holds; where nothing is missing, show it again.",
            rich_help_panel=_RESULTS,
        ),
    ] = False
    json: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|-",
            help="Write rows and summary as JSON; - prints nothing else.",
            rich_help_panel=_RESULTS,
        ),
    ] = None
    markdown: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the tables as Markdown.", rich_help_panel=_RESULTS)
    ] = None
    plot: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Draw a figure, .png or .svg (needs matplotlib).", rich_help_panel=_RESULTS),
    ] = None

    def method_names(self) -> tuple[str, ...]:
        """`methods` as a tuple."""
        return tuple(name.strip() for name in self.methods.split(","))

    def budget_counts(self) -> tuple[int, ...]:
        """`budgets` in tokens."""
        return parse_counts(self.budgets)

    def length_counts(self) -> tuple[int, ...]:
        """`lengths` in tokens."""
        return parse_counts(self.lengths)

    def described_model(self) -> dict[str, str | float]:
        """How the model was found, for ``run.json``."""
        light = {} if self.weights == "model" else {"weights": self.weights}
        trusted: dict[str, str | float] = {"trust_remote_code": True} if self.trust_remote_code else {}
        return {"name": self.model, "rope_factor": self.rope_factor, **light, **trusted}

    def quest(self) -> QuestConfig:
        """Quest's configuration; its budget comes from the plan.

        Raises:
            ConfigError: A value is impossible; the message names the option.
        """
        with options.named_by_options():
            # a whole budget fits any page size; the forced tokens are checked against each budget
            return QuestConfig(
                token_budget=1.0,
                page_size=self.page_size,
                optimism=self.optimism,
                group=self.group,
                kv_dtype=self.kv_dtype,
                span_pages=self.span_pages,
                offload=self.offload,
            )

    def check_targets(self, inputs: Mapping[str, str | Path | None]) -> None:
        """Refuse files that can't be written, that are read, or that lie where the results are.

        Args:
            inputs: What the task reads, by what the message calls it.

        Raises:
            QuestKVError: The first of them.
        """
        targets = {"--json": self.json, "--markdown": self.markdown, "--plot": self.plot}
        check_targets(targets, model=self.model, inputs=inputs)
        if self.output is not None:
            for option, target in targets.items():
                if target not in (None, STDOUT):
                    refuse_inputs(str(target), option, {f"a file of --output {self.output}": self.output / RUN})
                    refuse_inputs(str(target), option, {f"a file of --output {self.output}": self.output / ROWS})


def shared_options(
    *, leave_out: tuple[str, ...] = (), **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command `RunOptions`' options behind its own; it gets them as its argument `run`.

    Args:
        leave_out: Options that the command doesn't have, or has another kind of; `run` holds their defaults.
        defaults: What a task has other than `RunOptions`.

    Example:
        >>> @app.command()
        ... @shared_options(lengths="6000")
        ... def perplexity(file: options.Document, run: RunOptions) -> None: ...
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        # annotations are read here, where both modules' names can be resolved; Typer reads the result
        shared_hints = get_type_hints(RunOptions, include_extras=True)
        own_hints = get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=own_hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in inspect.signature(command).parameters.values()
            if parameter.name != "run"
        ]
        shared = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(field.name, _default(field)),
                annotation=shared_hints[field.name],
            )
            for field in fields(RunOptions)
            if field.name not in leave_out
        ]
        names = {parameter.name for parameter in shared}
        assert set(defaults) <= names

        @functools.wraps(command)
        @one_line_failures()
        def wrapper(**values: Any) -> None:
            run = RunOptions(**{name: values.pop(name) for name in names})
            run.check_targets({name: values[option] for option, name in _READ.items() if option in values})
            command(**values, run=run)

        wrapper.__signature__ = inspect.Signature(own + shared)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in own + shared}
        del wrapper.__wrapped__
        return wrapper

    return decorate


def _default(field: Field[Any]) -> Any:
    assert field.default is not MISSING
    return field.default
