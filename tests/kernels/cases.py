"""Random cases for the operators: rows over pages scattered through segments, everything else poisoned.

The bookkeeping is plain Python (which token lies in which page), so a test can name what a row may see without asking
questkv. Boxes are computed here, in float64 and by docs/layout.md, not by `seal`.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from questkv.kernels import Pages, PageSegment

PAGE_SIZES = (1, 3, 8, 16, 17)
GROUPS = (1, 2, 3, 4, 7, 8, 16)
HEAD_DIMS = (8, 16, 33, 40, 64, 80)
VALUE_DIMS = (0, 0, 9, 16, 48)  # 0: as the keys
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GROUP_RULES = ("mean", "softmax_mean", "per_head")


@dataclass(frozen=True)
class Shape:
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 16
    page_size: int = 3
    dtype: torch.dtype = torch.float32
    box_dtype: str = "int8"
    value_dim: int = 0  # as the keys

    def __post_init__(self) -> None:
        object.__setattr__(self, "value_dim", self.value_dim or self.head_dim)

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


@dataclass(frozen=True)
class Case:
    """R rows. `tables[r]` lists a row's physical pages; `keys[r]`, `values[r]` [Hkv, L, D or Dv] are its own tokens."""

    shape: Shape
    pages: Pages
    q: torch.Tensor
    tables: list[list[int]]
    page_table: torch.Tensor
    lengths: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    scale: float

    @property
    def rows(self) -> range:
        return range(len(self.tables))

    @property
    def sealed(self) -> list[int]:
        return [(length - 1) // self.shape.page_size for length in self.lengths.tolist()]

    @property
    def args(self) -> tuple[torch.Tensor, Pages, torch.Tensor, torch.Tensor]:
        """What every operator over rows takes first."""
        return self.q, self.pages, self.page_table, self.lengths

    def row(self, row: int) -> Case:
        """The same pages, and that row alone, its table as narrow as can be."""
        one = slice(row, row + 1)
        table = self.tables[row]
        return replace(
            self,
            q=self.q[one].clone(),
            tables=[table],
            page_table=torch.tensor([table]),
            lengths=self.lengths[one].clone(),
            keys=self.keys[one],
            values=self.values[one],
        )


def build_case(
    seed: int,
    shape: Shape,
    lengths: Sequence[int],
    *,
    kinds: Sequence[str] = (),
    segments: int = 3,
    free_pages: int = 3,
    placement: int = 0,
    poison: float = math.nan,
    bad_keys: Sequence[tuple[int, int, float]] = (),
) -> Case:
    """Rows of the given lengths with random tokens.

    Args:
        seed: Decides the tokens and the queries.
        shape: Heads, sizes and dtypes.
        lengths: Tokens of every row.
        kinds: For every row, ``own`` pages, pages ``shared`` with the row before as far as both are full, or a
            ``view`` of the row before: the same table and tokens, a length of its own (not larger).
        segments: Segments that the pages are cut into.
        free_pages: Pages that no row holds.
        placement: Decides physical pages and segments, and nothing else.
        poison: What unused slots, free pages, and boxes (scales) of pages that aren't sealed hold.
        bad_keys: (row, token, value): written into one key channel of KV head 0.
    """
    size = shape.page_size
    gen = torch.Generator().manual_seed(seed)
    kinds = list(kinds) or ["own"] * len(lengths)
    lengths, keys, values = list(lengths), [], []
    for row, kind in enumerate(kinds):
        if kind == "view" and row:
            lengths[row] = min(lengths[row], lengths[row - 1])
        length = lengths[row]
        # A few channels are large, as in real keys; values differ from token to token.
        spread = 1 + 3 * (torch.rand(shape.kv_heads, 1, shape.head_dim, generator=gen) > 0.9)
        tokens = torch.randn(2, shape.kv_heads, length, max(shape.head_dim, shape.value_dim), generator=gen)
        keys.append((tokens[0, ..., : shape.head_dim] * spread).to(shape.dtype))
        values.append(tokens[1, ..., : shape.value_dim].to(shape.dtype))
        for bad_row, token, value in bad_keys:
            if bad_row == row:
                keys[row][0, token, seed % shape.head_dim] = value
        common = _common_tokens(kind, row, lengths, size)
        if common:
            keys[row][:, :common] = keys[row - 1][:, :common]
            values[row][:, :common] = values[row - 1][:, :common]
    q = torch.randn(len(lengths), shape.heads, shape.head_dim, generator=gen).to(shape.dtype)

    tables = _place(lengths, kinds, size, free_pages, placement)
    num_pages = free_pages + len({page for table in tables for page in table})
    store = _Store(shape, num_pages, poison)
    for row, table in enumerate(tables):
        for logical, page in enumerate(table[: -(-lengths[row] // size)]):
            here = slice(logical * size, min((logical + 1) * size, lengths[row]))
            store.write(page, keys[row][:, here], values[row][:, here])
            if logical < (lengths[row] - 1) // size:
                store.seal(page, keys[row][:, here])
    width = max(len(table) for table in tables)
    return Case(
        shape=shape,
        pages=store.cut(segments, random.Random(placement)),
        q=q,
        tables=tables,
        page_table=torch.tensor([table + [-1] * (width - len(table)) for table in tables]),
        lengths=torch.tensor(lengths),
        keys=keys,
        values=values,
        scale=shape.head_dim**-0.5,
    )


def _common_tokens(kind: str, row: int, lengths: list[int], size: int) -> int:
    if row == 0 or kind == "own":
        return 0
    if kind == "view":
        return lengths[row]
    return min(lengths[row], lengths[row - 1]) // size * size


def _place(lengths: list[int], kinds: list[str], size: int, free_pages: int, placement: int) -> list[list[int]]:
    total = free_pages + sum(-(-length // size) for length in lengths)
    tables: list[list[int]] = []
    fresh = iter(range(total))
    for row, (length, kind) in enumerate(zip(lengths, kinds, strict=True)):
        if kind == "view" and row:
            tables.append(list(tables[-1]))
            continue
        shared = _common_tokens(kind, row, lengths, size) // size
        table = tables[-1][:shared] if shared else []
        tables.append(table + [next(fresh) for _ in range(-(-length // size) - shared)])
    used = len({page for table in tables for page in table})
    physical = list(range(used + free_pages))
    random.Random(placement).shuffle(physical)
    return [[physical[page] for page in table] for table in tables]


class _Store:
    """All pages as one tensor, poisoned until written; cut into segments at the end."""

    def __init__(self, shape: Shape, num_pages: int, poison: float) -> None:
        tokens = (shape.kv_heads, num_pages, shape.page_size)
        self.keys = torch.full((*tokens, shape.head_dim), poison, dtype=shape.dtype)
        self.values = torch.full((*tokens, shape.value_dim), poison, dtype=shape.dtype)
        bounds = (shape.kv_heads, num_pages, 2, shape.head_dim)
        self.scales: torch.Tensor | None = None
        if shape.box_dtype == "int8":
            self.boxes = torch.full(bounds, 99, dtype=torch.int8)
            self.scales = torch.full(bounds[:2], poison)
        else:
            self.boxes = torch.full(bounds, poison, dtype=shape.dtype)

    def write(self, page: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys[:, page, : keys.shape[1]] = keys
        self.values[:, page, : values.shape[1]] = values

    def seal(self, page: int, keys: torch.Tensor) -> None:
        for head, own in enumerate(keys.double()):
            lo, hi = own.min(dim=0).values, own.max(dim=0).values
            bad = not bool(own.isfinite().all())
            if self.scales is None:
                self.boxes[head, page, 0] = torch.full_like(lo, -math.inf) if bad else lo
                self.boxes[head, page, 1] = torch.full_like(hi, math.inf) if bad else hi
                continue
            step = torch.tensor(max(float(own.abs().max()) / 127 * (1 + 1e-6), 2.0**-126)).float().double()
            self.scales[head, page] = math.inf if bad else step
            self.boxes[head, page, 0] = 0 if bad else (lo / step).floor()
            self.boxes[head, page, 1] = 0 if bad else (hi / step).ceil()

    def cut(self, segments: int, rng: random.Random) -> Pages:
        total = self.keys.shape[1]
        cuts = [0, *sorted(rng.sample(range(1, total), min(segments, total) - 1)), total]
        return Pages(
            tuple(
                PageSegment(
                    *(tensor[:, a:b].contiguous() for tensor in (self.keys, self.values, self.boxes)),
                    None if self.scales is None else self.scales[:, a:b].contiguous(),
                )
                for a, b in itertools.pairwise(cuts)
            )
        )


def read_page(case_pages: Pages, page: int, name: str) -> torch.Tensor:
    """[Hkv, ...] one physical page of the tensor called `name`, found by walking the segments (a view)."""
    for segment in case_pages.segments:
        pages = segment.keys.shape[1]
        if page < pages:
            tensor: torch.Tensor = getattr(segment, name)
            return tensor[:, page]
        page -= pages
    raise IndexError(page)


@st.composite
def shapes(draw: st.DrawFn, **fixed: Any) -> Shape:
    drawn = {
        "kv_heads": draw(st.integers(1, 3)),
        "group": draw(st.sampled_from(GROUPS)),
        "head_dim": draw(st.sampled_from(HEAD_DIMS)),
        "page_size": draw(st.sampled_from(PAGE_SIZES)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "box_dtype": draw(st.sampled_from(["int8", "model"])),
        "value_dim": draw(st.sampled_from(VALUE_DIMS)),
    }
    return Shape(**{**drawn, **fixed})


@st.composite
def case_arguments(draw: st.DrawFn, max_rows: int = 4, max_pages: int = 8, **fixed: Any) -> dict[str, Any]:
    """Arguments of `build_case` without placement and poison; lengths of 1, S and S + 1 come often."""
    shape = draw(shapes(**fixed))
    size = shape.page_size
    length = st.one_of(st.sampled_from([1, size, size + 1, 2 * size]), st.integers(1, max_pages * size))
    lengths = draw(st.lists(length, min_size=1, max_size=max_rows))
    kinds = [draw(st.sampled_from(["own", "shared", "view"])) for _ in lengths]
    return {
        "seed": draw(st.integers(0, 2**31)),
        "shape": shape,
        "lengths": lengths,
        "kinds": kinds,
        "segments": draw(st.integers(1, 4)),
    }


@st.composite
def cases(draw: st.DrawFn, **fixed: Any) -> Case:
    return build_case(**draw(case_arguments(**fixed)), placement=draw(st.integers(0, 99)))


@st.composite
def selections(draw: st.DrawFn, case: Case, per_head: bool) -> torch.Tensor:
    """Any valid selection: every head of a row equally many of its sealed pages, ascending, -1 at the end."""
    heads = case.shape.heads if per_head else case.shape.kv_heads
    counts = [draw(st.integers(0, sealed)) for sealed in case.sealed]
    rng = random.Random(draw(st.integers(0, 2**31)))
    width = max(counts) + draw(st.integers(0, 1))
    return torch.tensor(
        [
            [sorted(rng.sample(range(sealed), count)) + [-1] * (width - count) for _ in range(heads)]
            for sealed, count in zip(case.sealed, counts, strict=True)
        ],
        dtype=torch.int64,
    ).reshape(len(counts), heads, width)
