"""The number of threads decides who computes what, and no bit of the result."""

from __future__ import annotations

import pytest
import torch

from kernels.calls import attend, decode, dense, estimate, select
from kernels.cases import DTYPES, GROUP_RULES, Case, Shape, build_case, read_page
from questkv.kernels import append, seal

pytestmark = pytest.mark.usefixtures("every_native")

# Several parts (kernels.h: at least kFewestTokens each), the last one short.
_LONG = 2 * 512 + 67


def _case(rows: int, dtype: torch.dtype = torch.bfloat16, group: int = 2) -> Case:
    """Views of one long row, the longest first, and the second one short."""
    shape = Shape(kv_heads=1, group=group, head_dim=40, page_size=16, dtype=dtype)
    lengths = [_LONG - 37 * row for row in range(rows)]
    return build_case(rows, shape, lengths, kinds=["own", *["view"] * (rows - 1)])


def _results(case: Case, group: str) -> list[torch.Tensor]:
    """Written and read by every operator: boxes, scores, selection, outputs, pages read."""
    size = case.shape.page_size
    tokens = torch.arange(_LONG)
    slots = torch.tensor(case.tables[0])[tokens // size] * size + tokens % size
    append(case.pages, slots, case.keys[0].transpose(0, 1), case.values[0].transpose(0, 1))
    seal(case.pages, torch.tensor(case.tables[0][: case.sealed[0]]))
    boxes = torch.stack([read_page(case.pages, page, "boxes") for page in case.tables[0][: case.sealed[0]]])
    scores = estimate(*case.args, scale=case.scale, group=group)
    counts = torch.tensor([n // 2 if row % 3 else 40 for row, n in enumerate(case.sealed)])
    selection = select(scores, torch.tensor(case.sealed), counts, sink_pages=1, recent_pages=1)
    read = torch.zeros_like(counts)
    softmax = {"scale": case.scale, "softcap": 20.0, "sinks": torch.linspace(-1, 1, case.shape.heads)}
    forced = {"sink_pages": 1, "recent_pages": 1}
    return [
        boxes,
        scores,
        selection,
        attend(*case.args, selection, **softmax),
        dense(*case.args, **softmax),
        decode(*case.args, counts, group=group, pages_read=read, **softmax, **forced),
        read,
    ]


@pytest.mark.parametrize("group", GROUP_RULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 8, 20])
def test_two_and_three_threads_give_the_bits_of_one(rows, dtype, group):
    case = _case(rows, dtype)
    expected = _results(case, group)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        for result, one in zip(_results(case, group), expected, strict=True):
            assert torch.equal(result, one)


@pytest.mark.parametrize("group", GROUP_RULES)
@pytest.mark.parametrize("rows", [2, 7, 8, 9])
def test_a_row_gives_its_own_bits_on_both_sides_of_the_split(rows, group):
    """With 2 threads, fewer than 8 lists are split into parts over the threads, and 8 or more are not."""
    torch.set_num_threads(2)
    case = _case(rows, group=1)
    together = _results(case, group)
    for row in case.rows:
        alone = case.row(row)
        counts = torch.tensor([case.sealed[row] // 2 if row % 3 else 40])
        softmax = {"scale": case.scale, "softcap": 20.0, "sinks": torch.linspace(-1, 1, 1)}
        scores = estimate(*alone.args, scale=case.scale, group=group)
        assert torch.equal(scores[0, :, : case.sealed[row]], together[1][row, :, : case.sealed[row]])
        assert torch.equal(dense(*alone.args, **softmax)[0], together[4][row])
        out = decode(*alone.args, counts, group=group, sink_pages=1, recent_pages=1, **softmax)
        assert torch.equal(out[0], together[5][row])
