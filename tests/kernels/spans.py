"""Cases whose pages lie so that spans may have boxes."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import torch

from kernels.cases import Case, read_page
from questkv.kernels import Pages, PageSegment


def spanned(case: Case, size: int, placement: int = 0) -> Case:
    """The case with its pages elsewhere, so that spans of `size` pages may have boxes, and those boxes poisoned."""
    logical_of = {page: logical for table in case.tables for logical, page in enumerate(table)}
    places = 2 * (len(logical_of) + size)
    rng = random.Random(placement)
    ends = [p for p in range(places * size) if p % size == size - 1][:places]
    others = [p for p in range(places * size) if p % size != size - 1][:places]
    rng.shuffle(ends)
    rng.shuffle(others)
    moved = {
        page: (ends if logical % size == size - 1 else others).pop() for page, logical in sorted(logical_of.items())
    }
    total = -(-(max(moved.values(), default=0) + 1) // size) * size
    kv_heads, page_size, dim = case.shape.kv_heads, case.shape.page_size, case.shape.head_dim
    keys, values = (
        torch.full((kv_heads, total, page_size, width), math.nan, dtype=case.shape.dtype)
        for width in (dim, case.shape.value_dim)
    )
    int8 = case.shape.box_dtype == "int8"
    boxes = torch.full((kv_heads, total + total // size, 2, dim), 99 if int8 else math.nan, dtype=torch.float64)
    boxes = boxes.to(torch.int8 if int8 else case.shape.dtype)
    scales = torch.full(boxes.shape[:2], math.nan) if int8 else None
    for page, to in moved.items():
        keys[:, to], values[:, to] = (read_page(case.pages, page, name) for name in ("keys", "values"))
        boxes[:, to] = read_page(case.pages, page, "boxes")
        if scales is not None:
            scales[:, to] = read_page(case.pages, page, "scales")
    cut = rng.randrange(0, total // size) * size  # of two segments; 0: one
    bounds = [slice(0, cut), slice(cut, total)] if cut else [slice(0, total)]
    spans = [slice(total + b.start // size, total + b.stop // size) for b in bounds]
    pages = Pages(
        tuple(
            PageSegment(
                keys[:, own].contiguous(),
                values[:, own].contiguous(),
                torch.cat([boxes[:, own], boxes[:, span]], dim=1),
                None if scales is None else torch.cat([scales[:, own], scales[:, span]], dim=1),
            )
            for own, span in zip(bounds, spans, strict=True)
        )
    )
    tables = [[moved[page] for page in table] for table in case.tables]
    width = case.page_table.shape[1]
    table = torch.tensor([table + [-1] * (width - len(table)) for table in tables])
    return replace(case, pages=pages, tables=tables, page_table=table)


def whole_spans(case: Case, row: int) -> list[list[int]]:
    """Physical pages of the row's complete spans."""
    size, table = case.pages.span_pages, case.tables[row]
    return [table[i : i + size] for i in range(0, case.sealed[row] - size + 1, size)]
