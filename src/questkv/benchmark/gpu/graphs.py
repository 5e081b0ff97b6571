"""A decode step in a graph: captured with one set of lengths, replayed with another."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch

from questkv.benchmark.gpu.cases import Inputs
from questkv.benchmark.gpu.findings import Finding, finding
from questkv.benchmark.gpu.machine import Machine
from questkv.benchmark.gpu.operators import Results, decode_step, write_first
from questkv.kernels import Places, Writes


def check_graph(inputs: Inputs, results: Results, machine: Machine) -> Iterator[Finding]:
    """Replay the step that gave `results.stepped`; it must give the same bits.

    The graph is captured over rows of a third of the tokens, with other queries and budgets and no new tokens. Then the
    step's own arguments are copied over those.

    Args:
        inputs: The same case, made anew from its seed: nothing written yet.
        results: What its operators gave.
        machine: What captures and replays.
    """
    write_first(inputs)
    lengths = [-(-length // 3) for length in inputs.lengths]
    static = copy.copy(inputs)
    static.q, static.row_lengths, static.page_table, static.counts, new = (
        -inputs.q,
        torch.tensor(lengths, device=inputs.device),
        inputs.table_of(lengths),
        torch.full_like(inputs.counts, max(inputs.sealed) // 6 + 3),
        _nothing_new(inputs, lengths),
    )
    replay = machine.capture(lambda: decode_step(static, new=new))
    for target, source in (
        (static.q, inputs.q),
        (static.row_lengths, inputs.row_lengths),
        (static.page_table, inputs.page_table),
        (static.counts, inputs.counts),
        *((getattr(new, name), getattr(inputs.last, name)) for name in ("keys", "values")),
        *((getattr(new.places, name), getattr(inputs.last.places, name)) for name in ("slots", "sealed", "into")),
    ):
        if target is not None:
            target.copy_(source)
    out, pages_read = replay()
    machine.synchronize()
    yield finding("decode", "a graph's replay with other lengths", out, results.stepped)
    yield finding("decode", "pages read by a graph's replay", pages_read, results.pages_read)


def _nothing_new(inputs: Inputs, lengths: list[int]) -> Writes:
    """As many new tokens and sealed pages as in the step: on a GPU padding, else some that are there already."""
    new = inputs.tokens_of([range(length - 1, length) for length in lengths])
    last, first = inputs.last.places, inputs.first.places
    count = len(last.sealed)
    if inputs.device.type != "cpu":
        slots, sealed = torch.full_like(new.places.slots, -1), torch.full_like(last.sealed, -1)
        places = Places(slots, sealed, None if last.into is None else sealed.clone())
    else:
        into = None if first.into is None else first.into[:count].clone()
        places = Places(new.places.slots, first.sealed[:count].clone(), into)
    return Writes(new.keys, new.values, places)
