"""One decode step of one layer: ours sparse and dense, and others, timed in turn after a check that they agree."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from questkv import kernels
from questkv.benchmark import peers
from questkv.benchmark.layers import Layer, layers_out_of_cache, make_layer
from questkv.benchmark.shapes import Shape
from questkv.config import QuestConfig
from questkv.errors import QuestKVError
from questkv.kernels import Rows, Scoring, Softmax

SPARSE, DENSE = "questkv-sparse", "questkv-dense"
# With pages in eight bits, the same steps over pages in the model's type.
SPARSE_MODEL, DENSE_MODEL = f"{SPARSE}-model", f"{DENSE}-model"
PARTS = ("estimate", "select", "attend")
# Products of codes may round their other factor to 1 / (127 * 256) of the largest one (docs/method.md): sixteen such.
_CODED_ROUNDING = 16 / (127 * 256)


class DisagreementError(QuestKVError, ArithmeticError):
    """A result differs from float64 by more than its dtype explains; no time is reported then."""


@dataclass(frozen=True)
class Row:
    """One implementation at one context.

    Attributes:
        name: The implementation; ours are questkv-sparse, its parts, and questkv-dense; with ``kv_dtype="int8"`` these
            read pages in eight bits, and questkv-sparse-model and questkv-dense-model those in the model's type.
        context: Tokens of every sequence.
        budget: Tokens that a step may read.
        median_ms: Of all timed steps.
        min_ms: Of all timed steps.
        gb_per_s: Bytes that the step must read, over the median.
        max_error: Largest difference from float64, of what the implementation is to compute.
    """

    name: str
    context: int
    budget: int
    median_ms: float
    min_ms: float
    gb_per_s: float
    max_error: float


@dataclass(frozen=True)
class Candidate:
    """Something to time: a step, the bytes it must read, and its error."""

    name: str
    step: Callable[[torch.Tensor, Layer], object]
    read_bytes: int
    max_error: float = 0.0


class Attention:
    """The benchmark at one context.

    Args:
        shape: The layer's shape.
        config: Budget, page size, optimism, group, KV dtype and backend.
        context: Tokens of every sequence, a multiple of the page size.
        with_flex: Whether to time flex_attention, whose compilation takes long.
        device: Where everything lies.
        layers: Layers in turn; None takes as many as no processor's cache holds.
    """

    def __init__(
        self,
        shape: Shape,
        config: QuestConfig,
        context: int,
        *,
        with_flex: bool = False,
        device: torch.device | None = None,
        layers: int | None = None,
    ) -> None:
        self.device = torch.device("cpu") if device is None else device
        self.shape, self.config, self.context = shape, config, context
        self.scale = shape.head_dim**-0.5
        self.softmax, self.scoring = Softmax(self.scale), Scoring.of(config)
        self.budget = config.budget_at(context)
        pages = context // config.page_size
        sealed = pages - 1
        self.selected = min(config.pages_at(context), sealed)
        self.coded = config.kv_dtype == "int8"
        self.box_bytes = shape.box_bytes(config, config.boxes_at(context))
        self.sparse_bytes = self.box_bytes + self._token_bytes(self.selected)
        count = layers_out_of_cache(shape, config, context, self.sparse_bytes) if layers is None else layers
        self.layers = [make_layer(shape, config, context, self.device) for _ in range(count)]
        self.model_table = torch.arange(shape.batch * pages, device=self.device).view(shape.batch, pages)
        self.page_table = self.model_table.clone()
        if self.coded:  # every page but the open one is read from its coded twin
            self.page_table[:, :-1] += shape.batch * pages
        self.lengths = torch.full((shape.batch,), context, device=self.device)
        self._rows: dict[tuple[int, bool], Rows] = {}
        self.with_flex = with_flex

    def rows(self, selected: int, *, plain: bool = False) -> Rows:
        """A step's rows, the same for every layer; they may read so many pages, with `plain` the model's type."""
        if (selected, plain) not in self._rows:
            table = self.model_table if plain else self.page_table
            self._rows[selected, plain] = Rows(table, self.lengths, torch.full_like(self.lengths, selected))
        return self._rows[selected, plain]

    def query(self) -> torch.Tensor:
        """A fresh query, [B, Hq, D]."""
        shape = (self.shape.batch, self.shape.heads, self.shape.head_dim)
        return torch.randn(shape, device=self.device).to(self.shape.torch_dtype)

    def _token_bytes(self, pages: int, coded: bool | None = None) -> int:
        """Bytes of `pages` sealed pages' keys and values and the open page's."""
        sealed, size = pages * self.config.page_size, self.config.page_size
        if self.coded if coded is None else coded:
            return self.shape.coded_bytes(sealed) + self.shape.kv_bytes(size)
        return self.shape.kv_bytes(sealed + size)

    def decode(self, query: torch.Tensor, layer: Layer, selected: int, *, plain: bool = False) -> torch.Tensor:
        """Our decode step with `selected` pages; `plain` has it read the model's type where there are codes too."""
        return kernels.decode(
            query,
            layer.plain if plain else layer.pages,
            self.rows(selected, plain=plain),
            self.softmax,
            self.scoring,
            backend=self.config.backend,
        )

    def estimate(self, query: torch.Tensor, layer: Layer) -> torch.Tensor:
        """Our scores."""
        return kernels.estimate(
            query,
            layer.pages,
            self.rows(self.selected),
            self.scale,
            self.scoring,
            backend=self.config.backend,
        )

    def select(self, scores: torch.Tensor) -> torch.Tensor:
        """Our selection."""
        return kernels.select(
            scores,
            (self.lengths - 1) // self.config.page_size,
            torch.full_like(self.lengths, self.selected),
            self.scoring,
            backend=self.config.backend,
        )

    def attend(self, query: torch.Tensor, layer: Layer, selection: torch.Tensor) -> torch.Tensor:
        """Our attention over a selection."""
        return kernels.attend(
            query,
            layer.pages,
            self.rows(self.selected),
            selection,
            self.softmax,
            backend=self.config.backend,
        )

    def candidates(self) -> list[Candidate]:
        """Everything that is timed, checked against float64 first.

        Raises:
            DisagreementError: A result is wrong.
        """
        layer, query = self.layers[0], self.query()
        selection = self.select(self.estimate(query, layer))
        mask = token_mask(selection, self.context, self.config.page_size, query)
        plain = layer.keys, layer.values
        everything = exact(query, *plain, self.scale)
        checked = [
            replace(
                candidate,
                max_error=check(
                    candidate.name, candidate.step(query, layer), expected, self.shape.torch_dtype, allowed
                ),
            )
            for candidate, expected, allowed in [
                *self._ours(query, layer, mask, everything),
                *((peer, everything, None) for peer in self._peers()),
            ]
        ]
        scores = self.estimate(query, layer)
        parts = [
            Candidate("estimate", self.estimate, self.box_bytes),
            Candidate("select", lambda q, x: self.select(scores), scores.numel() * 4),
            Candidate("attend", lambda q, x: self.attend(q, x, selection), self.sparse_bytes - self.box_bytes),
        ]
        return checked + parts

    def _ours(
        self, query: torch.Tensor, layer: Layer, mask: torch.Tensor, everything: torch.Tensor
    ) -> Iterator[tuple[Candidate, torch.Tensor, float | None]]:
        """Our steps, what each is to compute, and what it may differ relatively."""
        sealed = self.context // self.config.page_size - 1
        if self.coded:
            decoded = layer.decoded()
            steps = [(SPARSE, self.selected, mask), (DENSE, sealed, None)]
            for name, pages, seen in steps:
                boxes = self.box_bytes if seen is not None else 0
                yield (
                    Candidate(name, self._step(pages), self._token_bytes(pages) + boxes),
                    exact(query, *decoded, self.scale, seen),
                    _CODED_ROUNDING,
                )
        names = (SPARSE_MODEL, DENSE_MODEL) if self.coded else (SPARSE, DENSE)
        chosen = exact(query, layer.keys, layer.values, self.scale, mask)
        sparse_bytes = self._token_bytes(self.selected, coded=False) + self.box_bytes
        yield Candidate(names[0], self._step(self.selected, plain=True), sparse_bytes), chosen, 0.0
        dense_bytes = self.shape.kv_bytes(self.context)
        yield Candidate(names[1], self._step(sealed + 1, plain=True), dense_bytes), everything, 0.0

    def _step(self, selected: int, *, plain: bool = False) -> Callable[[torch.Tensor, Layer], torch.Tensor]:
        return lambda query, layer: self.decode(query, layer, selected, plain=plain)

    def _peers(self) -> Iterator[Candidate]:
        """Other implementations, over the keys and values in the model's type."""
        dense_bytes = self.shape.kv_bytes(self.context)
        for name, step in peers.available(self.layers, self.shape.heads, with_flex=self.with_flex).items():
            width = 2 if name.endswith("float32") and self.shape.torch_dtype != torch.float32 else 1
            yield Candidate(name, step, dense_bytes * width)

    def measure(self, seconds: float, progress: Callable[[float], None]) -> list[Row]:
        """Time every candidate in turn until each has had its share of `seconds`, or five steps."""
        candidates = [*self.candidates(), read_candidate()]
        times: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
        share = seconds / len(candidates)
        for candidate in candidates:
            candidate.step(self.query(), self.layers[-1])
        turn = 0
        waiting = candidates
        while waiting:
            for candidate in waiting:
                query, layer = self.query(), self.layers[turn % len(self.layers)]
                start = time.perf_counter()
                candidate.step(query, layer)
                times[candidate.name].append(time.perf_counter() - start)
            turn += 1
            waiting = [c for c in waiting if len(times[c.name]) < 5 or sum(times[c.name]) < share]
            progress(sum(min(sum(spent), share) for spent in times.values()) / seconds)
        return [self._row(candidate, times[candidate.name]) for candidate in candidates]

    def _row(self, candidate: Candidate, spent: list[float]) -> Row:
        median = statistics.median(spent)
        return Row(
            candidate.name,
            self.context,
            self.budget,
            median * 1e3,
            min(spent) * 1e3,
            candidate.read_bytes / median / 1e9,
            candidate.max_error,
        )


def exact(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention in float64, head by head; mask [B, Hq, context] True where a head reads a token."""
    batch, heads, _ = query.shape
    group = heads // keys.shape[1]
    out = torch.empty(query.shape, dtype=torch.float64, device=query.device)
    for b in range(batch):
        for h in range(heads):
            logits = keys[b, h // group].double() @ query[b, h].double() * scale
            if mask is not None:
                logits = logits.masked_fill(~mask[b, h], -torch.inf)
            out[b, h] = logits.softmax(dim=0) @ values[b, h // group].double()
    return out


def token_mask(selection: torch.Tensor, context: int, page_size: int, query: torch.Tensor) -> torch.Tensor:
    """[B, Hq, context] bool: tokens of the selected pages and of the last page."""
    pages = torch.zeros(*selection.shape[:2], context // page_size, dtype=torch.bool, device=selection.device)
    pages.scatter_(2, selection, True)
    pages[:, :, -1] = True
    tokens = pages.repeat_interleave(page_size, dim=2)
    return tokens.repeat_interleave(query.shape[1] // tokens.shape[1], dim=1)


def check(name: str, result: object, expected: torch.Tensor, dtype: torch.dtype, ours: float | None = None) -> float:
    """The largest difference from float64.

    Ours accumulate in float32 and round once, so a unit of roundoff of the output is allowed, and 2e-5 for the sums.
    Others round scores and weights to the dtype as well: four units of roundoff of values near 1.

    Args:
        name: The implementation.
        result: [B, Hq, D] what it gave.
        expected: [B, Hq, D] float64.
        dtype: Of queries, keys and values.
        ours: For our own, what they may differ besides, as a share of the largest output; None for others.

    Raises:
        DisagreementError: It is larger.
    """
    assert isinstance(result, torch.Tensor)
    error = float((result.double() - expected).abs().max())
    unit = torch.finfo(dtype).eps
    allowed = 2e-5 + (4.0 * unit if ours is None else (unit + ours) * float(expected.abs().max()))
    if not error <= allowed:
        raise DisagreementError(f"[bench] {name}: expected float64's output within {allowed:.1e}, got {error:.1e} off")
    return error


def read_candidate() -> Candidate:
    """A plain sum over a buffer that no cache holds: what the memory gives."""
    buffer = torch.ones(128 * 2**20)
    return Candidate("memory-read", lambda q, x: buffer.sum(), buffer.numel() * 4)


def is_ours(name: str) -> bool:
    """Whether a row is one of our steps or their parts."""
    return name.startswith("questkv-") or name in PARTS


def is_memory(name: str) -> bool:
    """Whether a row says what the memory gives."""
    return name.startswith("memory-")


def summarise(rows: list[Row]) -> Iterator[dict[str, Any]]:
    """Per context: our sparse step over our dense one and the best other, and our dense step's share of bandwidth.

    With pages in eight bits also their gain over pages in the model's type.
    """
    for context in dict.fromkeys(row.context for row in rows):
        by_name = {row.name: row for row in rows if row.context == context}
        others = (row for name, row in by_name.items() if not is_ours(name) and not is_memory(name))
        best = min(others, key=lambda row: row.median_ms)
        line: dict[str, Any] = {
            "context": context,
            "best_peer": best.name,
            "speedup_over_dense": by_name[DENSE].median_ms / by_name[SPARSE].median_ms,
            "speedup_over_best_peer": best.median_ms / by_name[SPARSE].median_ms,
            "bandwidth_share": by_name[DENSE].gb_per_s / by_name["memory-read"].gb_per_s,
        }
        if SPARSE_MODEL in by_name:
            sparse, dense = by_name[SPARSE_MODEL].median_ms, by_name[DENSE_MODEL].median_ms
            line |= {
                "speedup_over_sparse_model": sparse / by_name[SPARSE].median_ms,
                "dense_speedup_over_dense_model": dense / by_name[DENSE].median_ms,
                "speedup_over_dense_model": dense / by_name[SPARSE].median_ms,
            }
        yield line


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    """Rows as plain values."""
    return [asdict(row) for row in rows]
