"""The examples in the operators' docstrings and in docs/kernels.md run, and compute what they say."""

from __future__ import annotations

import doctest
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cases import Shape, build_case
from kernels.spans import spanned
from questkv import kernels

OPERATORS = [
    *("append", "attend", "decode", "dense", "estimate", "linear", "prefill", "seal", "seal_spans", "select"),
    "transfer",
]


def names() -> dict[str, Any]:
    """What an example may use: two rows of 12 and 10 full pages."""
    shape = Shape(kv_heads=2, group=2, head_dim=16, page_size=4)
    case = build_case(1, shape, [50, 42], poison=0.0)
    with_spans = spanned(build_case(1, shape, [50], poison=0.0), 4)
    return {
        **{name: getattr(kernels, name) for name in kernels.__all__},
        "torch": torch,
        **{"R": 2, "Hq": 4, "Hkv": 2, "D": 16, "S": 4, "C": 4},
        **{"q": case.q, "pages": case.pages, "page_table": case.page_table, "lengths": case.lengths},
        **{"keys": torch.zeros(4, 2, 16), "values": torch.zeros(4, 2, 16)},
        "slots": torch.tensor([case.tables[0][12] * 4 + 1, case.tables[1][10] * 4 + 1]),
        "sealed": torch.tensor([case.tables[0][11]]),
        **{"new_keys": torch.ones(2, 2, 16), "new_values": torch.ones(2, 2, 16)},
        "pages_with_spans": with_spans.pages,
    }


def test_every_operator_has_an_example():
    functions = [name for name in kernels.__all__ if inspect.isfunction(getattr(kernels, name))]
    assert sorted(set(functions) - {"available_backends"}) == OPERATORS


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operators_example_runs(name: str) -> None:
    made = names()
    test = doctest.DocTestParser().get_doctest(getattr(kernels, name).__doc__, made, name, None, None)
    assert test.examples
    report: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=report.append, clear_globs=False)
    assert not result.failed, "".join(report)
    if "out" in test.globs:
        assert bool(test.globs["out"].isfinite().all())


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_takes_at_most_eight_arguments(name: str) -> None:
    assert len(inspect.signature(getattr(kernels, name)).parameters) <= 8


def test_the_page_for_engine_writers_runs_and_gives_what_dense_attention_over_the_pages_read_gives() -> None:
    torch.manual_seed(0)
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    made: dict[str, Any] = {}
    exec(compile(code, "docs/kernels.md", "exec"), made)
    q, pages, rows, length = made["q"], made["layers"][-1], made["rows"], made["length"]
    assert length == 220
    sealed = torch.tensor([(length - 1) // 16])
    scores = kernels.estimate(q, pages, rows, made["softmax"].scale, made["scoring"])
    selection = kernels.select(scores, sealed, rows.num_selected, made["scoring"])
    assert selection.shape == (1, 2, 8)
    segment = pages.segments[0]
    for head in range(8):
        listed = [*selection[0, head // 4].tolist(), int(sealed)]
        ids = made["table"][listed]
        keys, values = (part[head // 4, ids].flatten(0, 1).double() for part in (segment.keys, segment.values))
        seen = 8 * 16 + (length - 1) % 16 + 1
        logits = keys[:seen] @ q[0, head].double() * 64**-0.5
        expected = logits.softmax(dim=0) @ values[:seen]
        # float32 sums of some 140 terms of order 1.
        torch.testing.assert_close(made["out"][0, head].double(), expected, rtol=0, atol=140 * 2**-23)
