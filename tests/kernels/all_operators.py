"""A ragged batch in several segments through all operators, each checked in float64."""

from __future__ import annotations

import math

import torch

from kernels.calls import attend, decode, dense, estimate, select
from kernels.cases import Case, Shape, build_case, read_page
from kernels.formulas import attention, group_scores, head_scores
from questkv.kernels import append, seal


def _written_by_the_operators(case: Case) -> None:
    """Write the rows' tokens and boxes again, with append and seal, over pages that hold nothing but NaN."""
    size = case.shape.page_size
    for segment in case.pages.segments:
        segment.keys.fill_(math.nan)
        segment.values.fill_(math.nan)
        segment.boxes.fill_(99 if segment.scales is not None else math.nan)
    for row, length in enumerate(case.lengths.tolist()):
        table, tokens = torch.tensor(case.tables[row]), torch.arange(length)
        slots = table[tokens // size] * size + tokens % size
        append(case.pages, slots, case.keys[row].transpose(0, 1), case.values[row].transpose(0, 1))
        seal(case.pages, table[: case.sealed[row]])


def _bounds(case: Case, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[Hkv, n, D] float64 lo and hi of the row's sealed pages; they hold the pages' keys."""
    pages = case.tables[row][: case.sealed[row]]
    boxes = torch.stack([read_page(case.pages, page, "boxes") for page in pages], dim=1).double()
    if case.pages.segments[0].scales is not None:
        scales = torch.stack([read_page(case.pages, page, "scales") for page in pages], dim=1).double()
        boxes *= scales[..., None, None]
    size = case.shape.page_size
    keys = case.keys[row][:, : len(pages) * size].double().unflatten(1, (len(pages), size))
    assert bool((boxes[:, :, :1] <= keys).all())
    assert bool((keys <= boxes[:, :, 1:]).all())
    return boxes[:, :, 0], boxes[:, :, 1]


def _positions(case: Case, row: int, listed: list[int]) -> list[int]:
    size = case.shape.page_size
    pages = [page for page in listed if page >= 0] + [case.sealed[row]]
    return [t for page in pages for t in range(page * size, min((page + 1) * size, int(case.lengths[row])))]


def assert_all_operators_are_right(shape: Shape, lengths: list[int], group: str) -> None:
    case = build_case(shape.head_dim + shape.page_size, shape, lengths, kinds=["own", "shared", "own"])
    _written_by_the_operators(case)
    scores = estimate(*case.args, scale=case.scale, group=group)
    counts = torch.tensor([max(min(n, 2), n // 2) for n in case.sealed])
    selection = select(scores, torch.tensor(case.sealed), counts, sink_pages=1, recent_pages=1)
    sparse, full = attend(*case.args, selection, scale=case.scale), dense(*case.args, scale=case.scale)
    forced = {"sink_pages": 1, "recent_pages": 1}
    out = decode(*case.args, counts, scale=case.scale, group=group, **forced)
    for row, sealed in enumerate(case.sealed):
        if sealed:
            exact = head_scores(case.q[row], *_bounds(case, row), case.scale, 1.0)
            expected, tolerance = group_scores(*exact, shape.kv_heads, group)
            assert bool(((scores[row, :, :sealed].double() - expected).abs() <= tolerance).all())
        listed = selection[row].repeat_interleave(shape.heads // selection.shape[1], dim=0).tolist()
        chosen = [_positions(case, row, pages) for pages in listed]
        everything = [list(range(int(case.lengths[row])))] * shape.heads
        for result, tokens in ((sparse, chosen), (full, everything)):
            expected, tolerance = attention(case.q[row], case.keys[row], case.values[row], tokens, case.scale)
            assert bool(((result[row].double() - expected).abs() <= tolerance).all())
        assert torch.equal(out[row], sparse[row] if int(counts[row]) < sealed else full[row])
