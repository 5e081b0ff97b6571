"""The options that several commands share, and what they mean as a `QuestConfig`."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from questkv.config import KV_DTYPES, OFFLOADS, QuestConfig
from questkv.errors import ConfigError, UnsupportedError
from questkv.models import ALIASES, DEFAULT_MODEL, DTYPES, WEIGHTS

_CACHE, _RUN = "The cache", "The run"
DEFAULTS = QuestConfig()
# What numpy's generator takes as its seed.
MAX_SEED = 2**32 - 1
# More tokens than any context: a count above it is a slip.
MAX_TOKENS = 2**31 - 1
# More threads than any machine has cores for: beyond, starting them fails or ends the process.
MAX_THREADS = 1024
_COLDEST, _HOTTEST = 0.001, 1000.0


def parse_budget(text: str) -> int | float:
    """Read ``1024`` as tokens and ``0.1`` as a share of the context."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter("expected tokens (1024) or a share of the context (0.1)") from None


def parse_contexts(text: str) -> list[int]:
    """Read ``4096,32768`` (or ``4k,32k``) as token counts."""
    try:
        contexts = [int(part[:-1]) * 1024 if part[-1:] in "kK" else int(part) for part in text.split(",") if part]
    except ValueError:
        contexts = []
    if not contexts or min(contexts) < 1 or max(contexts) > MAX_TOKENS:
        raise typer.BadParameter("expected token counts such as 4096,32768 or 4k,32k")
    return contexts


def parse_finite(value: float) -> float:
    """Refuse NaN, which lies in every range."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"expected a finite number, got {value}")
    return value


def parse_temperature(value: float) -> float:
    """Accept 0, and what divides float32 logits without overflow."""
    if value != 0 and not _COLDEST <= value <= _HOTTEST:
        raise typer.BadParameter(f"expected 0, or a number in [{_COLDEST}, {_HOTTEST:g}], got {value:g}")
    return value


def parse_dtype(text: str) -> str:
    """Accept only the dtypes that a model can be loaded in."""
    if text not in DTYPES:
        raise typer.BadParameter(f"expected one of {', '.join(DTYPES)}")
    return text


def parse_weights(text: str) -> str:
    """Accept only the types that weights can be brought to."""
    if text not in WEIGHTS:
        raise typer.BadParameter(f"expected one of {', '.join(WEIGHTS)}")
    return text


Document = Annotated[str, typer.Argument(metavar="DOCUMENT", help="A UTF-8 text file, or - for standard input.")]
Model = Annotated[
    str,
    typer.Option(
        metavar="NAME", help=f"A Hugging Face hub id, a model folder, a .gguf file, or an alias: {', '.join(ALIASES)}."
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS|SHARE",
        help="What one token may read of the context: tokens (1024), or a share in (0, 1] (0.1).",
        rich_help_panel=_CACHE,
        show_default=f"{DEFAULTS.token_budget}",
    ),
]
PageSize = Annotated[int, typer.Option(metavar="TOKENS", help="Tokens a page.", rich_help_panel=_CACHE)]
KvDtype = Annotated[
    str,
    typer.Option(
        metavar="|".join(KV_DTYPES),
        help="Keys and values of full pages: in the model's own type, or in eight bits, half the memory.",
        rich_help_panel=_CACHE,
    ),
]
SpanPages = Annotated[
    int,
    typer.Option(
        metavar="C",
        min=0,
        help="Score spans of C pages first, then only the pages of the best spans: faster behind 32K tokens and more, "
        "with 4 or 8. 0 scores every page.",
        rich_help_panel=_CACHE,
    ),
]
Offload = Annotated[
    str,
    typer.Option(
        metavar="|".join(OFFLOADS),
        help="Where full pages lie: with the model, or in host memory, from where a GPU fetches those that it reads.",
        rich_help_panel=_CACHE,
    ),
]
Dense = Annotated[bool, typer.Option("--dense", help="Read the whole cache for every token.", rich_help_panel=_CACHE)]
Tail = Annotated[
    bool,
    typer.Option("--tail", help="Where the document is longer than the model's context, use the last part that fits."),
]
RopeFactor = Annotated[
    float,
    typer.Option(metavar="F", min=1.0, help="Stretch the model's context F times (YaRN); 1 leaves it as it is."),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run the Python code that a model folder or hub id brings with it; without this, one that needs it is "
        "refused.",
        rich_help_panel=_RUN,
    ),
]
MaxNewTokens = Annotated[int, typer.Option(metavar="N", min=1, help="Longest answer, in tokens.")]
Temperature = Annotated[
    float,
    typer.Option(
        metavar="T", callback=parse_temperature, help="0 takes the likeliest token; above 0 the answer is sampled."
    ),
]
Seed = Annotated[
    int, typer.Option(metavar="N", min=0, max=MAX_SEED, help="Start of the random numbers, for --temperature.")
]
Threads = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, max=MAX_THREADS, help="CPU threads.", rich_help_panel=_RUN, show_default="torch's choice"
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="|".join(DTYPES),
        callback=parse_dtype,
        help="Type of weights and cache; auto is bfloat16 where the CPU multiplies it (AVX512-BF16, AMX) or on a "
        "GPU, else float32.",
        rich_help_panel=_RUN,
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        metavar="|".join(WEIGHTS),
        callback=parse_weights,
        help="Weights of the linear layers: of --dtype, or in eight or four bits, faster on a CPU (needs torchao).",
        rich_help_panel=_RUN,
    ),
]

Compile = Annotated[
    bool,
    typer.Option(
        "--compile/--no-compile",
        help="Run each token as one graph of torch.compile: seconds before the first token, more the first time, then "
        "faster ones.",
        rich_help_panel=_RUN,
    ),
]

MODEL = DEFAULT_MODEL
PAGE_SIZE = DEFAULTS.page_size
KV_DTYPE = DEFAULTS.kv_dtype
SPAN_PAGES = DEFAULTS.span_pages
OFFLOAD = DEFAULTS.offload


def quest_config(
    budget: str | None,
    page_size: int,
    dense: bool,
    kv_dtype: str = KV_DTYPE,
    span_pages: int = SPAN_PAGES,
    offload: str = OFFLOAD,
) -> QuestConfig:
    """The config that a command's options ask for.

    Raises:
        ConfigError: A value is impossible; the message names the field.
        typer.BadParameter: Options contradict one another.
    """
    if dense and budget is not None:
        raise typer.BadParameter("--dense reads everything: give it or --budget, not both")
    wanted: int | float = 1.0 if dense else DEFAULTS.token_budget
    if budget is not None:
        wanted = parse_budget(budget)
    with named_by_options(token_budget="--budget"):
        return QuestConfig(
            token_budget=wanted, page_size=page_size, kv_dtype=kv_dtype, span_pages=span_pages, offload=offload
        )


@contextlib.contextmanager
def named_by_options(**options: str) -> Iterator[None]:
    """Name options in place of a configuration's fields in what is raised inside; `options` holds other names."""
    try:
        yield
    except ConfigError as error:
        raise _by_option(error, **options) from None


def _by_option(error: ConfigError, **options: str) -> ConfigError:
    """The error with options in place of fields, since the user wrote these: the field's name, or the one given."""

    def option(match: re.Match[str]) -> str:
        return options.get(match[1], f"--{match[1].replace('_', '-')}")

    return ConfigError(re.sub(r"\[QuestConfig\] (\w+)", option, str(error)))


def check_offload(config: QuestConfig) -> None:
    """Refuse pages in host memory before a model is loaded that would not be on a GPU.

    Raises:
        UnsupportedError: There is no GPU.
    """
    if config.offload == "host":
        import torch

        if not torch.cuda.is_available():
            raise UnsupportedError("--offload: expected a GPU for host, got none; pages are in this memory as it is")


def document_label(document: str) -> str:
    """What a document is called on the screen."""
    return "standard input" if document == "-" else Path(document).name
