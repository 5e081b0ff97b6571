"""Every kernel of the Triton backend on random inputs, against float64 formulas."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from questkv import kernels
from questkv.benchmark.gpu import formulas
from questkv.benchmark.gpu.cases import RECENT_PAGES, SINK_PAGES, Inputs
from questkv.benchmark.gpu.findings import Finding, finding
from questkv.benchmark.gpu.operators import OPTIMISM, Results
from questkv.benchmark.gpu.stored import Stored, check_stored


def compare(inputs: Inputs, results: Results) -> Iterator[Finding]:
    """Everything that the operators wrote and returned, in the order in which they were called."""
    stored = Stored(inputs)
    yield from check_stored(stored)
    sealed, rows = inputs.sealed, range(len(inputs.lengths))
    read = [_pages_read(inputs, results.selection, row) for row in rows]
    expected_read = torch.tensor(read, device=inputs.device)
    yield finding("decode", "pages read", results.pages_read, expected_read)
    for row in rows:
        yield from _scores(stored, results, row)
        count = min(int(inputs.counts[row]), sealed[row])
        chosen = formulas.chosen(results.scores[row, :, : sealed[row]], count, SINK_PAGES, RECENT_PAGES)
        padding = chosen.new_full((len(chosen), results.selection.shape[2] - count), -1)
        yield finding("select", f"row {row}", results.selection[row], torch.cat([chosen, padding], dim=1))
        yield from _attention(stored, results, row)
    yield finding("decode", "rows alone, against the same rows in a batch", results.alone, results.stepped)
    yield finding("decode", "with a budget for every page, against dense", results.whole, results.everything)


def _scores(stored: Stored, results: Results, row: int) -> Iterator[Finding]:
    inputs, sealed = stored.inputs, stored.inputs.sealed[row]
    case, what = inputs.case, f"row {row} of {inputs.lengths[row]} tokens"
    got = results.scores[row]
    behind = got[:, sealed:]
    yield finding("estimate", f"{what}, behind its sealed pages", behind, torch.full_like(behind, -math.inf))
    if sealed:
        exact, bound = formulas.scores(inputs.q[row], *stored.bounds(row), case.scale, OPTIMISM, case.rule)
        yield finding("estimate", what, got[:, :sealed], exact, bound)


def _attention(stored: Stored, results: Results, row: int) -> Iterator[Finding]:
    inputs = stored.inputs
    keys, values = stored.tokens(row)
    what = f"row {row} of {inputs.lengths[row]} tokens"
    everything = torch.ones(inputs.case.heads, inputs.lengths[row], dtype=torch.bool, device=inputs.device)
    for kernel, got, seen in (
        ("attend", results.attended, _seen(inputs, inputs.selection[row], row)),
        ("decode", results.stepped, _seen(inputs, results.selection[row], row)),
        ("dense", results.everything, everything),
    ):
        exact, bound = formulas.attention(
            inputs.q[row], keys, values, seen, inputs.case.scale, coded=bool(inputs.coded[row])
        )
        yield finding(kernel, what, got[row], exact, bound)


def _page_mask(inputs: Inputs, selection: torch.Tensor, row: int) -> torch.Tensor:
    """[Hkv or Hq, P] bool of one row's selection [Hkv or Hq, K] and its open page."""
    sealed = inputs.sealed[row]
    pages = torch.zeros(len(selection), sealed + 2, dtype=torch.bool, device=inputs.device)
    # What isn't a page of the row, padding among it, goes into a column of its own.
    pages.scatter_(1, selection.where((selection >= 0) & (selection < sealed), sealed + 1), True)
    pages[:, sealed] = True
    return pages[:, : sealed + 1]


def _seen(inputs: Inputs, selection: torch.Tensor, row: int) -> torch.Tensor:
    """[Hq, L] bool: the tokens that each query head of a row sees."""
    pages = _page_mask(inputs, selection, row)
    tokens = pages.repeat_interleave(inputs.case.page_size, dim=1)[:, : inputs.lengths[row]]
    return tokens.repeat_interleave(inputs.case.heads // len(tokens), dim=0)


def _pages_read(inputs: Inputs, selection: torch.Tensor, row: int) -> int:
    """Pages that a row reads, summed over KV heads: a page that several heads of a group chose counts once."""
    pages = _page_mask(inputs, selection[row], row)
    return int(pages.unflatten(0, (inputs.case.kv_heads, -1)).any(dim=1).sum())


def check_select(
    device: torch.device, seed: int, widths: tuple[int, ...], backend: str = "triton"
) -> Iterator[Finding]:
    """`select` on scores of every kind: random, with many ties, all equal, with infinities and NaN.

    Args:
        device: Where.
        seed: Decides the scores.
        widths: Pages of the longest row.
        backend: Whose.
    """
    generator = torch.Generator(device).manual_seed(seed)
    for width in widths:
        scores = torch.randn(5, 3, width, generator=generator, device=device)
        scores[1] = (scores[1] * 2).round()
        scores[2] = 1.5
        scores[3, :, ::7] = math.nan
        scores[3, :, 1::5] = math.inf
        scores[4] *= 1e-39  # subnormal, of both signs
        num_pages = torch.tensor([width, width - 1, width, width, max(width // 3, 1)], device=device)
        count = max(width // 8, 4)
        num_selected = torch.tensor([count, count, count, count, width], device=device)
        scoring = kernels.Scoring(sink_pages=SINK_PAGES, recent_pages=RECENT_PAGES)
        got = kernels.select(scores, num_pages, num_selected, scoring, backend=backend)
        for row, pages in enumerate(num_pages.tolist()):
            kept = min(int(num_selected[row]), pages)
            chosen = formulas.chosen(scores[row, :, :pages], kept, SINK_PAGES, RECENT_PAGES)
            padding = chosen.new_full((3, got.shape[2] - kept), -1)
            expected = torch.cat([chosen, padding], dim=1)
            yield finding("select", f"{_KINDS[row]} of {pages} pages", got[row], expected)


_KINDS = ("random scores", "scores with ties", "equal scores", "scores with NaN and infinities", "subnormal scores")
