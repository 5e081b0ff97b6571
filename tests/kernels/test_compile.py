"""The operators under torch.compile: the graph breaks at them, and what they give and write is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kernels.cases import Case, Shape, build_case
from questkv import kernels
from questkv.kernels import Pages, Places, Rows, Scoring, Softmax, Writes

SHAPE = Shape(kv_heads=2, group=3, head_dim=16, page_size=4)
SCORING = Scoring(sink_pages=1, recent_pages=1)


@pytest.fixture(autouse=True)
def _fresh_graphs() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def make_case() -> Case:
    """Three rows over pages in several segments, two of which are long enough to be sparse."""
    return build_case(3, SHAPE, [37, 4, 22], poison=0.0)


def stored(pages: Pages) -> list[torch.Tensor]:
    every = ((s.keys, s.values, s.boxes, s.scales) for s in pages.segments)
    return [tensor for tensors in every for tensor in tensors if tensor is not None]


def step_of(case: Case) -> Callable[[torch.Tensor], Any]:
    """Every operator after another, with computations between them, as a function of the queries."""
    pages, softmax = case.pages, Softmax(case.scale)
    sealed = torch.tensor(case.sealed)
    rows = Rows(case.page_table, case.lengths, sealed.clamp(max=4))
    last = [case.tables[row][n] * 4 + (int(case.lengths[row]) - 1) % 4 for row, n in enumerate(case.sealed)]
    places = Places(torch.tensor(last), torch.tensor(case.tables[0][8:9]))
    new = torch.randn(2, 3, 2, 16, generator=torch.Generator().manual_seed(5))

    def step(q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kernels.append(pages, places.slots, new[0] * 3, new[1])
        kernels.seal(pages, places.sealed)
        scores = kernels.estimate(q * 2, pages, rows, case.scale, SCORING)
        selection = kernels.select(scores, sealed, rows.num_selected, SCORING)
        attended = kernels.attend(q * 2, pages, rows, selection, softmax) + 1
        everything = kernels.dense(q + 1, pages, rows, softmax) * 2
        prompt = kernels.prefill(q - 1, pages, case.page_table[0], 37, softmax)
        read = torch.zeros_like(sealed)
        writes = Writes(new[0] * 2, new[1], places)
        decoded = kernels.decode(q * 3, pages, rows, softmax, SCORING, writes=writes, pages_read=read)
        return scores, selection, attended, everything, prompt.flatten(1) * 2, decoded - 1, read + 1

    return step


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_compiled_function_gives_and_writes_what_it_does_uncompiled(every_fast_backend: str) -> None:
    ours, theirs = make_case(), make_case()
    expected = step_of(theirs)(theirs.q)
    compiled = torch.compile(step_of(ours), backend="aot_eager")
    for _ in range(2):  # the second time with whatever was compiled the first time
        torch.testing.assert_close(compiled(ours.q), expected, rtol=0, atol=0)
        torch.testing.assert_close(stored(ours.pages), stored(theirs.pages), rtol=0, atol=0)


def test_one_whole_graph_is_refused_by_torch_and_nothing_is_computed_wrong(every_native: str) -> None:
    case = make_case()
    rows, softmax = Rows(case.page_table, case.lengths), Softmax(case.scale)
    compiled = torch.compile(
        lambda q: kernels.dense(q * 2, case.pages, rows, softmax), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(case.q)
