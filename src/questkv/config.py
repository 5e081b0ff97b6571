"""`QuestConfig`: every knob of the method, validated on construction.

Depends on nothing but the standard library (YAML files need the ``pyyaml`` that transformers brings).
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from questkv.errors import ConfigError

GROUP_RULES = ("mean", "softmax_mean", "per_head")
BOX_DTYPES = ("int8", "model")
KV_DTYPES = ("model", "int8")
# Behind "auto", best first; the Triton backend is for GPUs.
BACKENDS = ("auto", "native", "triton", "reference")
OFFLOADS = ("none", "host")
# A few lines of YAML can name a value whose full text fills the memory.
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 80, 80
# Pages of the spans whose pages are scored, as a multiple of the pages that are selected.
SPAN_SHARE = 4


@dataclass(frozen=True, kw_only=True)
class QuestConfig:
    """What a sequence may read per token, and how its pages are scored.

    Attributes:
        token_budget: Tokens one decode step may read per KV head (per query head under ``group="per_head"``), sink,
            recent and open page included. An int >= the smallest possible selection (sink + recent + one open page,
            each rounded up to whole pages), or a float in (0, 1]: a share of the current length, never less than
            that smallest selection. 1.0 reads everything.
        page_size: S, tokens a page, >= 1 (paper: 16).
        sink_tokens: First tokens that are always read, rounded up to whole pages.
        recent_tokens: Tokens before the open page that are always read, rounded up to whole pages.
        dense_layers: How many first layers stay dense (paper, section 3.4: 2), or a tuple of layer indices.
        optimism: a in [0, 1], how much of a box's half width counts; 1 is the paper's upper bound, 0.5 finds more
            (docs/method.md).
        group: How the G query heads that share a KV head agree on pages: ``mean`` of their scores, ``softmax_mean``
            of their shares, or ``per_head``, each for itself (the paper's rule).
        box_dtype: ``int8`` (rounded outward, one scale per page and KV head) or ``model`` (the keys' own type).
        kv_dtype: Type of sealed pages' keys and values: ``model`` keeps the model's own, ``int8`` codes them in eight
            bits when the page is sealed, half the bytes of 16-bit keys and values (needs ``box_dtype="int8"``).
        span_pages: C, pages a span: with C >= 2, spans of C pages have boxes too, and a step scores the pages of the
            best spans only, so that it reads a part of the boxes (docs/method.md). 0 scores every page. For contexts
            of 32K tokens and more on a CPU.
        dense_below: Contexts shorter than this many tokens are read densely.
        sparse_prefill: Runs of up to this many new tokens behind an existing context are decoded sparsely, token by
            token; longer runs are dense prefill.
        backend: ``auto`` or a backend's name. A backend asked for by name works or raises, it never falls back.
        offload: Where full pages' keys and values lie: ``none``, beside the model; or ``host``, in pinned host memory
            with their boxes on the GPU, which fetches the pages that it reads (docs/offload.md; needs a GPU). Dense
            layers stay on the GPU.
        offload_cache: With ``offload="host"``, pages of a layer that the GPU keeps for the next steps, in token budgets
            a sequence (under ``per_head`` a query head's budget times the heads that share a KV head), >= 1.

    Raises:
        ConfigError: (a ValueError) naming the field, what was expected and what came.
    """

    token_budget: int | float = 2048
    page_size: int = 16
    sink_tokens: int = 16
    recent_tokens: int = 64
    dense_layers: int | tuple[int, ...] = 2
    optimism: float = 0.5
    group: str = "mean"
    box_dtype: str = "int8"
    kv_dtype: str = "model"
    span_pages: int = 0
    dense_below: int = 0
    sparse_prefill: int = 64
    backend: str = "auto"
    offload: str = "none"
    offload_cache: float = 2.0

    def __post_init__(self) -> None:
        _check_int("page_size", self.page_size, at_least=1)
        for name in ("sink_tokens", "recent_tokens", "span_pages", "dense_below", "sparse_prefill"):
            _check_int(name, getattr(self, name), at_least=0)
        if self.span_pages == 1:
            raise _error("span_pages", "0 (no spans) or at least 2", self.span_pages)
        object.__setattr__(self, "dense_layers", _dense_layers(self.dense_layers))
        _check_optimism(self.optimism)
        object.__setattr__(self, "optimism", float(self.optimism))
        _check_choice("group", self.group, GROUP_RULES)
        _check_choice("box_dtype", self.box_dtype, BOX_DTYPES)
        _check_choice("kv_dtype", self.kv_dtype, KV_DTYPES)
        if self.kv_dtype == "int8" and self.box_dtype != "int8":
            # A key is coded within its page's box, so the box must be of the kind that the code was made with.
            raise _error("box_dtype", "'int8' with kv_dtype='int8'", self.box_dtype)
        _check_choice("backend", self.backend, BACKENDS)
        _check_choice("offload", self.offload, OFFLOADS)
        if self.offload == "host" and self.backend == "native":
            raise _error("backend", "one for a GPU with offload='host'", self.backend)
        if self.offload == "host" and self.span_pages:
            raise _error("span_pages", "0 with offload='host'", self.span_pages)
        _check_factor("offload_cache", self.offload_cache)
        object.__setattr__(self, "offload_cache", float(self.offload_cache))
        self._check_budget()

    def _check_budget(self) -> None:
        budget = self.token_budget
        if isinstance(budget, bool) or not isinstance(budget, int | float):
            raise _error("token_budget", "an int (tokens) or a float in (0, 1] (a share)", budget)
        if isinstance(budget, float):
            if not 0.0 < budget <= 1.0:
                raise _error("token_budget", "a float in (0, 1] (a share of the context), or an int (tokens)", budget)
        elif budget < self.smallest_budget:
            raise _error(
                "token_budget",
                f"at least {self.smallest_budget} tokens (sink {self.sink_pages * self.page_size} + recent "
                f"{self.recent_pages * self.page_size} + open page {self.page_size}; lower sink_tokens or "
                "recent_tokens for less)",
                budget,
            )

    @property
    def sink_pages(self) -> int:
        """First pages that are always selected."""
        return -(-self.sink_tokens // self.page_size)

    @property
    def recent_pages(self) -> int:
        """Last sealed pages that are always selected."""
        return -(-self.recent_tokens // self.page_size)

    @property
    def smallest_budget(self) -> int:
        """Tokens of the smallest selection: sink, recent and a full open page."""
        return (self.sink_pages + self.recent_pages + 1) * self.page_size

    def budget_at(self, length: int) -> int:
        """Tokens that a row seeing `length` tokens (its own included) may read."""
        if isinstance(self.token_budget, float):
            return max(math.floor(self.token_budget * length), self.smallest_budget)
        return self.token_budget

    def is_dense_at(self, length: int) -> bool:
        """Whether a row seeing `length` tokens takes the dense path in every layer."""
        return length < self.dense_below or length <= self.budget_at(length)

    def pages_at(self, length: int) -> int:
        """K, sealed pages selected for a row seeing `length` tokens: what the budget leaves beside its open page.

        The open page is the (length - 1) % S + 1 last tokens; the result never exceeds the row's sealed pages.
        """
        sealed = (length - 1) // self.page_size
        in_open_page = length - sealed * self.page_size
        return min((self.budget_at(length) - in_open_page) // self.page_size, sealed)

    def boxes_at(self, length: int) -> int:
        """Boxes that a sparse step scores for a row seeing `length` tokens: those of its pages, or of spans and pages.

        With spans of C pages: those of all whole spans, then those of the pages of the best ceil(4 K / C), and of the
        pages behind the last whole span.
        """
        sealed, size = (length - 1) // self.page_size, self.span_pages
        spans = sealed // size if size else 0
        kept = -(-SPAN_SHARE * self.pages_at(length) // size) if size else 0
        return sealed if kept >= spans else spans + kept * size + sealed % size

    def is_dense_layer(self, layer: int) -> bool:
        """Whether model layer `layer` (0-based) is always dense."""
        if isinstance(self.dense_layers, tuple):
            return layer in self.dense_layers
        return layer < self.dense_layers

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> QuestConfig:
        """Build a config from a mapping; an unknown key is refused by name."""
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                raise ConfigError(f"[QuestConfig] {key}: expected one of {', '.join(known)}; no such field")
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | Path) -> QuestConfig:
        """Read a config from a ``.json``, ``.yaml`` or ``.yml`` file that holds one mapping.

        Raises:
            ConfigError: The file can't be read or parsed, or a field is wrong; the message names the file.
        """
        path = Path(path)
        parse = _parser(path)
        try:
            values = parse(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"[QuestConfig] {path}: expected a readable file, got {error}") from error
        except RecursionError:
            raise ConfigError(f"[QuestConfig] {path}: expected one mapping of fields, got too many levels") from None
        except ValueError as error:
            raise ConfigError(f"[QuestConfig] {path}: expected {path.suffix[1:].upper()}, got {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"[QuestConfig] {path}: expected one mapping of fields, got {type(values).__name__}")
        try:
            return cls.from_dict(values)
        except ConfigError as error:
            raise ConfigError(f"{error} (in {path})") from error

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain JSON values; `from_dict` of it is equal to this config."""
        values = asdict(self)
        if isinstance(self.dense_layers, tuple):
            values["dense_layers"] = list(self.dense_layers)
        return values


def _error(name: str, expected: str, value: object) -> ConfigError:
    return ConfigError(f"[QuestConfig] {name}: expected {expected}, got {_SHORT.repr(value)}")


def _check_int(name: str, value: object, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise _error(name, f"an int >= {at_least}", value)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise _error(name, " or ".join(repr(choice) for choice in choices), value)


def _check_optimism(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise _error("optimism", "a number in [0, 1]", value)


def _check_factor(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1.0 <= value < math.inf:
        raise _error(name, "a finite number >= 1", value)


def _dense_layers(value: object) -> int | tuple[int, ...]:
    """A count as it is; a list or tuple of layer indices as a sorted tuple without repeats."""
    listed = isinstance(value, list | tuple)
    layers: list[int] = []
    for layer in value if isinstance(value, list | tuple) else [value]:
        if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
            raise _error("dense_layers", "an int >= 0 (the first layers) or a tuple of layer indices >= 0", value)
        layers.append(layer)
    return tuple(sorted(set(layers))) if listed else layers[0]


def _parser(path: Path) -> Callable[[str], Any]:
    if path.suffix == ".json":
        return json.loads
    if path.suffix in (".yaml", ".yml"):
        import yaml

        def parse(text: str) -> Any:
            try:
                return yaml.safe_load(text)
            except yaml.YAMLError as error:
                # One line: the message of a YAML error spans several.
                raise ValueError(" ".join(str(error).split())) from error

        return parse
    raise ConfigError(f"[QuestConfig] {path}: expected a .json, .yaml or .yml file, got {path.suffix or 'no suffix'}")
