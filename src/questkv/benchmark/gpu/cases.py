"""Random inputs for the kernels: rows of many lengths over pages scattered through segments, all else poisoned."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
from functools import cached_property

import torch

from questkv.benchmark.shapes import DTYPES
from questkv.kernels import Pages, PageSegment, Places, Writes

SINK_PAGES, RECENT_PAGES = 1, 2
_FREE_PAGES = 3


@dataclass(frozen=True)
class Case:
    """A layer's shape and storage, and how it is decoded.

    Attributes:
        dtype: float32, bfloat16 or float16.
        head_dim: D.
        kv_heads: Hkv.
        group: G.
        page_size: S.
        rule: Group rule.
        box_dtype: ``int8`` or ``model``.
        coded: Whether sealed pages are coded in eight bits.
        segments: Segments of plain pages; coded pages are one more.
        pages: Pages of the longest row, about.
    """

    dtype: str
    head_dim: int
    kv_heads: int
    group: int
    page_size: int = 16
    rule: str = "mean"
    box_dtype: str = "int8"
    coded: bool = False
    segments: int = 1
    pages: int = 200

    def __str__(self) -> str:
        parts = [
            f"{self.dtype} D={self.head_dim} Hkv={self.kv_heads} G={self.group} S={self.page_size} {self.rule}",
            "boxes in the keys' type" if self.box_dtype == "model" else "",
            "pages in eight bits" if self.coded else "",
            f"{self.segments} segments" if self.segments > 1 else "",
        ]
        return ", ".join(part for part in parts if part)

    @property
    def heads(self) -> int:
        """Hq."""
        return self.kv_heads * self.group

    @property
    def scale(self) -> float:
        """Softmax scale."""
        return 1 / math.sqrt(self.head_dim)


# The shapes that are timed come first: where time runs out, what is left unchecked isn't published either.
CASES = (
    Case("bfloat16", 128, 32, 1),  # Llama 2 7B
    Case("bfloat16", 128, 8, 4),  # Llama 3 8B
    Case("bfloat16", 128, 32, 1, coded=True),
    Case("bfloat16", 128, 8, 4, coded=True),
    Case("float16", 128, 32, 1),
    Case("float32", 64, 3, 3),  # SmolLM2 135M
    Case("bfloat16", 128, 4, 7, rule="per_head", segments=3),  # Qwen2 7B
    Case("float16", 128, 8, 8, page_size=32, rule="softmax_mean", segments=3),
    Case("float16", 128, 8, 4, rule="per_head", coded=True, segments=2),
    Case("float32", 128, 8, 4, rule="per_head", coded=True),
    Case("bfloat16", 128, 4, 8, page_size=32, rule="softmax_mean", coded=True, segments=2),
    Case("float32", 128, 4, 7, box_dtype="model", segments=2),
    Case("bfloat16", 256, 1, 4, rule="per_head"),  # Gemma 3
    Case("bfloat16", 80, 4, 1, box_dtype="model"),
    Case("float16", 96, 4, 4, page_size=64),
    Case("float16", 64, 4, 7, coded=True, page_size=64),
    Case("bfloat16", 64, 1, 71, page_size=17, pages=60),  # Falcon 7B's heads
)


class Inputs:
    """What one case's operators are called with, and what the rows hold.

    Attributes:
        case: The case.
        device: Where everything lies.
        backend: What the operators are called on.
        lengths: Tokens of every row: 1, S, S + 1, some pages, many pages.
        keys: Of every row [Hkv, L, D]; one key of the fourth row is NaN, in KV head 0.
        values: Of every row [Hkv, L, D].
        plain: Of every row, its pages' ids in the plain pages' store (not physical).
        coded: Of every row, its sealed pages' ids in the coded pages' store, empty where nothing is coded.
        pages: The layer, poisoned, with nothing written yet.
        q: [R, Hq, D].
        page_table: [R, P] after the last token.
        row_lengths: [R] int64 of `lengths`.
        counts: [R] int64 sealed pages that a row may read.
        selection: [R, H, K] random, valid.
        first: Every token but the rows' last ones, and the pages they seal.
        last: The rows' last tokens, and the pages they seal.
    """

    def __init__(self, case: Case, seed: int, device: torch.device, backend: str = "triton") -> None:
        self.case, self.device, self.backend = case, device, backend
        self._rng = random.Random(seed)
        size, longest = case.page_size, case.pages * case.page_size
        middle = self._rng.randint(longest // 6, longest // 4)
        self.lengths = [1, size, size + 1, middle, self._rng.randint(longest // 2, longest)]
        self._generator = torch.Generator(device).manual_seed(seed)
        self.q = self._random(len(self.lengths), case.heads, case.head_dim)
        self.keys, self.values = [], []
        # A few channels are large, as in real keys.
        large = torch.rand(case.kv_heads, 1, case.head_dim, generator=self._generator, device=device) > 0.9
        for length in self.lengths:
            self.keys.append(self._random(case.kv_heads, length, case.head_dim) * (1 + 3 * large).to(self.dtype))
            self.values.append(self._random(case.kv_heads, length, case.head_dim))
        if self.sealed[3]:
            self.keys[3][0, self.bad_page * size + size // 2, self._rng.randrange(case.head_dim)] = math.nan
        self._place()
        self._choose()

    @property
    def dtype(self) -> torch.dtype:
        """Of queries, keys and values."""
        return DTYPES[self.case.dtype]

    @cached_property
    def sealed(self) -> list[int]:
        """Sealed pages of every row after its last token."""
        return [(length - 1) // self.case.page_size for length in self.lengths]

    @property
    def bad_page(self) -> int:
        """The logical page of the fourth row that holds a NaN key."""
        return self.sealed[3] // 2

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator, device=self.device).to(self.dtype)

    def _long(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _place(self) -> None:
        """Pages for every row, in random order and segments, and the tokens' slots."""
        case, size = self.case, self.case.page_size
        held = [-(-length // size) for length in self.lengths]
        self.num_plain, self.num_coded = sum(held) + _FREE_PAGES, (sum(self.sealed) + _FREE_PAGES) * case.coded
        cuts = [0, *sorted(self._rng.sample(range(1, self.num_plain), case.segments - 1)), self.num_plain]
        sizes = [(end - start, False) for start, end in itertools.pairwise(cuts)]
        if case.coded:
            sizes.insert(1, (self.num_coded, True))
        self.pages = Pages(tuple(self._segment(*one) for one in sizes))
        self._physical: dict[bool, list[int]] = {False: [], True: []}
        for (_, is_coded), (start, end) in zip(sizes, itertools.pairwise(self.pages.starts), strict=True):
            self._physical[is_coded] += range(start, end)
        plain = iter(self._rng.sample(range(self.num_plain), sum(held)))
        coded = iter(self._rng.sample(range(self.num_coded), sum(self.sealed) if case.coded else 0))
        self.plain = [list(itertools.islice(plain, n)) for n in held]
        self.coded = [list(itertools.islice(coded, n * case.coded)) for n in self.sealed]
        self.page_table = self.table_of(self.lengths)
        self.row_lengths = self._long(self.lengths)
        self.first = self.tokens_of([range(length - 1) for length in self.lengths])
        self.last = self.tokens_of([range(length - 1, length) for length in self.lengths])

    def table_of(self, lengths: list[int]) -> torch.Tensor:
        """[R, P] page table of the rows when they have these lengths, of one width whatever they are."""
        width = max(map(len, self.plain))
        tables = []
        for length, own, twins in zip(lengths, self.plain, self.coded, strict=True):
            sealed = (length - 1) // self.case.page_size if self.case.coded else 0
            table = [self._physical[True][page] for page in twins[:sealed]]
            table += [self._physical[False][page] for page in own[sealed : -(-length // self.case.page_size)]]
            tables.append(table + [-1] * (width - len(table)))
        return torch.tensor(tables, dtype=torch.int64, device=self.device)

    def _segment(self, num_pages: int, coded: bool) -> PageSegment:
        case = self.case
        tokens = (case.kv_heads, num_pages, case.page_size)
        kind, poison = (torch.uint8, 200.0) if coded else (self.dtype, math.nan)
        int8 = case.box_dtype == "int8"
        box_kind, box_poison = (torch.int8, 99.0) if int8 else (self.dtype, math.nan)
        keys = torch.full((*tokens, case.head_dim), poison, dtype=kind, device=self.device)
        return PageSegment(
            keys,
            keys.clone(),
            torch.full((*tokens[:2], 2, case.head_dim), box_poison, dtype=box_kind, device=self.device),
            torch.full(tokens[:2], math.nan, device=self.device) if int8 else None,
            torch.full((*tokens, 2), math.nan, device=self.device) if coded else None,
        )

    def tokens_of(self, written: list[range]) -> Writes:
        """Some tokens of every row, and the pages that they seal."""
        size, plain, coded = self.case.page_size, self._physical[False], self._physical[True]
        slots, sealed, into = [], [], []
        for row, tokens in enumerate(written):
            slots += [plain[self.plain[row][t // size]] * size + t % size for t in tokens]
            # A page is sealed by the token behind its last one.
            pages = [t // size - 1 for t in tokens if t and not t % size]
            sealed += [plain[self.plain[row][page]] for page in pages]
            into += [coded[self.coded[row][page]] for page in pages if self.case.coded]
        cut = [slice(tokens.start, tokens.stop) for tokens in written]
        keys, values = (
            torch.cat([own[:, here].transpose(0, 1) for own, here in zip(rows, cut, strict=True)])
            for rows in (self.keys, self.values)
        )
        coded_into = self._long(into) if self.case.coded else None
        return Writes(keys, values, Places(self._long(slots), self._long(sealed), coded_into))

    def _choose(self) -> None:
        """How many pages a row may read, and some selection."""
        forced = SINK_PAGES + RECENT_PAGES
        counts = [self._rng.randint(min(n, forced + 1), max(n // 2, min(n, forced + 1))) for n in self.sealed]
        self.counts = self._long(counts)
        heads = self.case.heads if self.case.rule == "per_head" else self.case.kv_heads
        lists = [
            sorted(self._rng.sample(range(n), k)) + [-1] * (max(counts) - k)
            for n, k in zip(self.sealed, counts, strict=True)
            for _ in range(heads)
        ]
        self.selection = self._long([page for pages in lists for page in pages]).view(len(counts), heads, max(counts))
