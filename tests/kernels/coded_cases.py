"""Cases whose sealed pages are partly in eight bits, coded here by docs/method.md's formulas and not by `seal`."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from kernels.cases import Case, build_case, case_arguments
from kernels.eight_bits import decoded_keys, decoded_values, key_codes, value_codes
from questkv.kernels import Pages, PageSegment

FREE_CODED = 2


def code_pages(case: Case, *, share: float = 0.7, seed: int = 0, placement: int = 0) -> Case:
    """The same rows with about `share` of their sealed pages coded; a row's keys and values are then what those hold.

    Args:
        case: Rows with int8 boxes.
        share: Of the sealed pages.
        seed: Decides which of them.
        placement: Decides physical pages and segments, and nothing else.
    """
    store = {name: torch.cat([getattr(s, name) for s in case.pages.segments], dim=1) for name in _PLAIN}
    sealed = list(dict.fromkeys(p for table, n in zip(case.tables, case.sealed, strict=True) for p in table[:n]))
    chosen_by = random.Random(seed)
    chosen = [page for page in sealed if chosen_by.random() < share]
    coded = _coded(store, chosen)
    where = _Placement(store["keys"].shape[1], len(chosen) + FREE_CODED, random.Random(placement))
    twins = {page: i for i, page in enumerate(chosen)}

    keys, values = ([tensor.float() for tensor in rows] for rows in (case.keys, case.values))
    tables, still_plain = [], set()
    for row, (table, n) in enumerate(zip(case.tables, case.sealed, strict=True)):
        new = []
        for logical, page in enumerate(table):
            if logical < n and page in twins:
                at, size = twins[page], case.shape.page_size
                here = slice(logical * size, (logical + 1) * size)
                box, scale = coded["boxes"][:, at], coded["scales"][:, at]
                keys[row][:, here] = decoded_keys(coded["keys"][:, at], box, scale)
                values[row][:, here] = decoded_values(coded["values"][:, at], coded["value_scales"][:, at])
                new.append(where.coded[at])
            else:
                still_plain.add(page)
                new.append(where.plain[page])
        tables.append(new)
    for page in set(range(store["keys"].shape[1])) - still_plain:  # its content lies in a coded page now
        for name in ("keys", "values"):
            store[name][:, page] = math.nan
    width = max(map(len, tables))
    return replace(
        case,
        pages=where.cut(store, coded),
        tables=tables,
        page_table=torch.tensor([table + [-1] * (width - len(table)) for table in tables]),
        keys=keys,
        values=values,
    )


_PLAIN = ("keys", "values", "boxes", "scales")


def _coded(store: dict[str, torch.Tensor], chosen: list[int]) -> dict[str, torch.Tensor]:
    """Every tensor of the coded pages, and behind them `FREE_CODED` that nobody holds, poisoned."""
    heads, _, size, dim = store["keys"].shape
    tokens = (heads, len(chosen) + FREE_CODED, size)
    coded = {
        "keys": torch.full((*tokens, dim), 200, dtype=torch.uint8),
        "values": torch.full((*tokens, store["values"].shape[3]), 200, dtype=torch.uint8),
        "boxes": torch.full((heads, tokens[1], 2, dim), 99, dtype=torch.int8),
        "scales": torch.full(tokens[:2], math.nan),
        "value_scales": torch.full((*tokens, 2), math.nan),
    }
    for at, page in enumerate(chosen):
        box, scale = store["boxes"][:, page], store["scales"][:, page]
        coded["boxes"][:, at], coded["scales"][:, at] = box, scale
        coded["keys"][:, at] = key_codes(store["keys"][:, page], box, scale)
        coded["values"][:, at], coded["value_scales"][:, at] = value_codes(store["values"][:, page])
    return coded


class _Placement:
    """Cuts plain and coded pages into segments, in an order of its own, the first segment plain."""

    def __init__(self, plain: int, coded: int, rng: random.Random) -> None:
        pieces = [(False, *cut) for cut in _cuts(plain, rng)]
        rest = pieces[1:] + [(True, *cut) for cut in _cuts(coded, rng)]
        rng.shuffle(rest)
        self.segments = [pieces[0], *rest]
        self.plain: dict[int, int] = {}
        self.coded: dict[int, int] = {}
        start = 0
        for is_coded, first, end in self.segments:
            ids = self.coded if is_coded else self.plain
            ids.update({page: start + page - first for page in range(first, end)})
            start += end - first

    def cut(self, plain: dict[str, torch.Tensor], coded: dict[str, torch.Tensor]) -> Pages:
        return Pages(
            tuple(
                PageSegment(**{name: t[:, a:b].contiguous() for name, t in (coded if is_coded else plain).items()})
                for is_coded, a, b in self.segments
            )
        )


def _cuts(pages: int, rng: random.Random) -> list[tuple[int, int]]:
    inner = rng.sample(range(1, pages), min(rng.randint(0, 2), pages - 1))
    return list(itertools.pairwise([0, *sorted(inner), pages]))


@st.composite
def coded_cases(draw: st.DrawFn, **fixed: Any) -> Case:
    case = build_case(**draw(case_arguments(box_dtype="int8", **fixed)))
    share = draw(st.sampled_from([0.5, 1.0]))
    return code_pages(case, share=share, seed=draw(st.integers(0, 99)), placement=draw(st.integers(0, 99)))
