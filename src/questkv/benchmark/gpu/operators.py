"""What one case's operators give, called as a program would call them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from questkv import kernels
from questkv.benchmark.gpu.cases import RECENT_PAGES, SINK_PAGES, Inputs
from questkv.kernels import Rows, Scoring, Softmax, Writes

OPTIMISM = 0.5


@dataclass(frozen=True)
class Results:
    """What the operators gave; append and seal wrote into the case's pages.

    Attributes:
        stepped: [R, Hq, D] of `decode` with the rows' last tokens as new ones.
        pages_read: [R] int64 of that call.
        scores: [R, H, P] of `estimate`.
        selection: [R, H, K] of `select` on them.
        attended: [R, Hq, D] of `attend` over the case's own selection.
        everything: [R, Hq, D] of `dense`.
        whole: [R, Hq, D] of `decode` with a budget that covers every page.
        alone: [R, Hq, D] of `decode`, row by row.
    """

    stepped: torch.Tensor
    pages_read: torch.Tensor
    scores: torch.Tensor
    selection: torch.Tensor
    attended: torch.Tensor
    everything: torch.Tensor
    whole: torch.Tensor
    alone: torch.Tensor


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Whatever is allocated holds NaN or the largest int until it is written, so what isn't written is seen."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def write_first(inputs: Inputs, entering: Callable[[str], None] = lambda operator: None) -> None:
    """Every token but the last of each row, by `append` and `seal`."""
    first = inputs.first
    entering("append")
    kernels.append(inputs.pages, first.places.slots, first.keys, first.values, backend=inputs.backend)
    entering("seal")
    kernels.seal(inputs.pages, first.places.sealed, first.places.into, backend=inputs.backend)


def decode_step(
    inputs: Inputs, *, new: Writes | None = None, counts: torch.Tensor | None = None, row: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`decode` of all rows or of one alone: its output, and the pages that it read."""
    chosen = inputs.counts if counts is None else counts
    rows = (inputs.q, inputs.page_table, inputs.row_lengths, chosen)
    if row is not None:
        # Copies: an address in the middle of a tensor would have other kernels compiled for it.
        q, table, lengths, chosen = (tensor[row : row + 1].clone() for tensor in rows)
    else:
        q, table, lengths, chosen = rows
    pages_read = torch.empty_like(chosen)
    out = kernels.decode(
        q,
        inputs.pages,
        Rows(table, lengths, chosen),
        Softmax(inputs.case.scale),
        _scoring(inputs),
        writes=new,
        pages_read=pages_read,
        backend=inputs.backend,
    )
    return out, pages_read


def _scoring(inputs: Inputs) -> Scoring:
    return Scoring(OPTIMISM, inputs.case.rule, SINK_PAGES, RECENT_PAGES)


def call_operators(inputs: Inputs, entering: Callable[[str], None] = lambda operator: None) -> Results:
    """Call every operator once; no result is another call's argument but the scores, which `select` takes.

    Args:
        inputs: A case, nothing written yet.
        entering: Called with an operator's name before it is.
    """
    case = inputs.case
    rows = (inputs.q, inputs.pages, Rows(inputs.page_table, inputs.row_lengths))
    softmax, scoring = Softmax(case.scale), _scoring(inputs)
    sealed = torch.tensor(inputs.sealed, device=inputs.device)
    write_first(inputs, entering)
    entering("decode")
    stepped, pages_read = decode_step(inputs, new=inputs.last)
    entering("estimate")
    scores = kernels.estimate(*rows, case.scale, scoring, backend=inputs.backend)
    entering("select")
    selection = kernels.select(scores, sealed, inputs.counts, scoring, backend=inputs.backend)
    entering("attend")
    attended = kernels.attend(*rows, inputs.selection, softmax, backend=inputs.backend)
    entering("dense")
    everything = kernels.dense(*rows, softmax, backend=inputs.backend)
    entering("decode")
    whole, _ = decode_step(inputs, counts=sealed)
    alone = torch.cat([decode_step(inputs, row=row)[0] for row in range(len(inputs.lengths))])
    return Results(stepped, pages_read, scores, selection, attended, everything, whole, alone)
