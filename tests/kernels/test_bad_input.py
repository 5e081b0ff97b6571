"""Every argument of every operator: a mistake raises ValueError or TypeError as `[op] name: expected X, got Y`."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from kernels import calls
from kernels.cases import Shape, build_case
from questkv import kernels
from questkv.kernels import available_backends


def call(op: str, arguments: dict[str, Any]) -> Any:
    """Call an operator, with the fields of its structs among its arguments."""
    return getattr(calls if hasattr(calls, op) else kernels, op)(**arguments)


def _valid() -> dict[str, dict[str, Any]]:
    """Arguments that every operator takes: 2 rows of 7 and 4 tokens, Hkv 2, G 3, D 8, S 3, 9 physical pages."""
    case = build_case(0, Shape(head_dim=8, page_size=3), [7, 4], free_pages=4)
    rows = {"q": case.q, "pages": case.pages, "page_table": case.page_table, "lengths": case.lengths}
    tokens = torch.zeros(2, 2, 8)
    rule = {"optimism": 1.0, "group": "mean"}
    softmax = {"scale": 1.0, "softcap": None, "sinks": None}
    selection = torch.tensor([[[0, 1], [0, 1]], [[0, -1], [0, -1]]])
    counts = torch.tensor([2, 1])
    forced = {"sink_pages": 0, "recent_pages": 0}
    valid: dict[str, dict[str, Any]] = {
        "append": {"pages": case.pages, "slots": torch.tensor([0, 4]), "keys": tokens, "values": tokens},
        "seal": {"pages": case.pages, "page_ids": torch.tensor([0, 3])},
        "estimate": {**rows, **rule, "scale": 1.0},
        "select": {"scores": torch.zeros(2, 2, 3), "num_pages": counts, "num_selected": counts, **forced},
        "attend": {**rows, **softmax, "selection": selection},
        "dense": {**rows, **softmax},
        "prefill": {
            "q": torch.zeros(5, 6, 8),
            "pages": case.pages,
            "page_table": case.page_table[0],
            "length": 7,
            **softmax,
        },
        "decode": {**rows, **rule, **softmax, **forced, "num_selected": counts, "pages_read": torch.zeros_like(counts)},
    }
    return {op: {**arguments, "backend": "auto"} for op, arguments in valid.items()}


_ROWS = ("estimate", "attend", "dense", "decode")
_SOFTMAX = ("attend", "dense", "prefill", "decode")
_INDEX = torch.int64


def _index(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=_INDEX)


def _of_type(dtype: torch.dtype) -> Any:
    return lambda value: value.to(dtype)


def _meta(value: torch.Tensor) -> torch.Tensor:
    return value.to("meta")


# (operators, argument, what is wrong with it, a value or a function of the valid value, error)
_MISTAKES: list[tuple[tuple[str, ...], str, str, Any, type[Exception]]] = [
    (_ROWS + ("prefill",), "q", "2 dimensions", lambda q: q[0], ValueError),
    (_ROWS + ("prefill",), "q", "another head dim", lambda q: q[..., :7], ValueError),
    (_ROWS + ("prefill",), "q", "heads not a multiple of Hkv", lambda q: q[:, :5], ValueError),
    (_ROWS + ("prefill",), "q", "no heads", lambda q: q[:, :0], ValueError),
    (_ROWS + ("prefill",), "q", "another float type", _of_type(torch.bfloat16), TypeError),
    (_ROWS + ("prefill",), "q", "another device", _meta, ValueError),
    (_ROWS + ("prefill",), "page_table", "another dimension", lambda table: table[..., None], ValueError),
    (_ROWS, "page_table", "too few rows", lambda table: table[:1], ValueError),
    (_ROWS + ("prefill",), "page_table", "int32", _of_type(torch.int32), TypeError),
    (_ROWS + ("prefill",), "page_table", "another device", _meta, ValueError),
    (_ROWS, "page_table", "a page past the pool", _index([0, 1, 9], [2, 3, -1]), ValueError),
    (_ROWS, "page_table", "a page below -1", _index([0, 1, 2], [3, 4, -2]), ValueError),
    (_ROWS, "page_table", "padding within the row", _index([0, -1, 2], [3, 4, -1]), ValueError),
    (_ROWS, "page_table", "padding for the open page", _index([0, 1, -1], [3, 4, -1]), ValueError),
    (("prefill",), "page_table", "a page past the pool", _index(0, 1, 9), ValueError),
    (("prefill",), "page_table", "padding", _index(0, -1, 2), ValueError),
    (_ROWS, "lengths", "2 dimensions", lambda n: n[None], ValueError),
    (_ROWS, "lengths", "too few", lambda n: n[:1], ValueError),
    (_ROWS, "lengths", "int32", _of_type(torch.int32), TypeError),
    (_ROWS, "lengths", "float", _of_type(torch.float32), TypeError),
    (_ROWS, "lengths", "another device", _meta, ValueError),
    (_ROWS, "lengths", "0", _index(0, 4), ValueError),
    (_ROWS, "lengths", "negative", _index(7, -1), ValueError),
    (_ROWS, "lengths", "more than the table holds", _index(10, 4), ValueError),
    (("prefill",), "length", "fewer than the queries", 4, ValueError),
    (("prefill",), "length", "more than the table holds", 10, ValueError),
    (("prefill",), "length", "a float", 7.0, TypeError),
    (("prefill",), "length", "a bool", True, TypeError),
    (_ROWS + ("prefill",), "scale", "negative", -1.0, ValueError),
    (_ROWS + ("prefill",), "scale", "0", 0.0, ValueError),
    (_ROWS + ("prefill",), "scale", "NaN", math.nan, ValueError),
    (_ROWS + ("prefill",), "scale", "infinite", math.inf, ValueError),
    (_ROWS + ("prefill",), "scale", "a string", "1", ValueError),
    (_ROWS + ("prefill",), "scale", "None", None, ValueError),
    (("estimate", "decode"), "optimism", "negative", -0.1, ValueError),
    (("estimate", "decode"), "optimism", "NaN", math.nan, ValueError),
    (("estimate", "decode"), "optimism", "infinite", math.inf, ValueError),
    (("estimate", "decode"), "optimism", "a string", "1", ValueError),
    (("estimate", "decode"), "optimism", "None", None, ValueError),
    (("estimate", "decode"), "group", "unknown", "max", ValueError),
    (("estimate", "decode"), "group", "None", None, ValueError),
    (_SOFTMAX, "softcap", "negative", -1.0, ValueError),
    (_SOFTMAX, "softcap", "0", 0.0, ValueError),
    (_SOFTMAX, "softcap", "NaN", math.nan, ValueError),
    (_SOFTMAX, "softcap", "a string", "1", ValueError),
    (_SOFTMAX, "sinks", "one per KV head", torch.zeros(2), ValueError),
    (_SOFTMAX, "sinks", "2 dimensions", torch.zeros(1, 6), ValueError),
    (_SOFTMAX, "sinks", "integers", torch.zeros(6, dtype=_INDEX), TypeError),
    (_SOFTMAX, "sinks", "another device", torch.zeros(6, device="meta"), ValueError),
    (("attend",), "selection", "2 dimensions", lambda s: s[0], ValueError),
    (("attend",), "selection", "too few rows", lambda s: s[:1], ValueError),
    (("attend",), "selection", "heads neither Hkv nor Hq", lambda s: s[:, :1], ValueError),
    (("attend",), "selection", "int32", _of_type(torch.int32), TypeError),
    (("attend",), "selection", "another device", _meta, ValueError),
    (("attend",), "selection", "the open page", _index([[0, 2], [0, 1]], [[0, -1], [0, -1]]), ValueError),
    (("attend",), "selection", "beyond a shorter row", _index([[0, 1], [0, 1]], [[0, 1], [0, 1]]), ValueError),
    (("attend",), "selection", "below -1", _index([[0, 1], [0, 1]], [[0, -2], [0, -2]]), ValueError),
    (("attend",), "selection", "a page twice", _index([[1, 1], [0, 1]], [[0, -1], [0, -1]]), ValueError),
    (("attend",), "selection", "descending", _index([[1, 0], [0, 1]], [[0, -1], [0, -1]]), ValueError),
    (("attend",), "selection", "padding first", _index([[-1, 1], [-1, 1]], [[0, -1], [0, -1]]), ValueError),
    (("attend",), "selection", "unequal counts", _index([[0, 1], [0, -1]], [[0, -1], [0, -1]]), ValueError),
    (("append",), "slots", "2 dimensions", lambda s: s[None], ValueError),
    (("append",), "slots", "no dimension", lambda s: s[0], ValueError),
    (("append",), "slots", "int32", _of_type(torch.int32), TypeError),
    (("append",), "slots", "another device", _meta, ValueError),
    (("append",), "slots", "negative", _index(0, -1), ValueError),
    (("append",), "slots", "past the pool", _index(0, 27), ValueError),
    (("append",), "slots", "more than tokens", _index(0, 1, 2), ValueError),
    (("append",), "keys", "heads and tokens swapped", torch.zeros(2, 8, 2), ValueError),
    (("append",), "values", "2 dimensions", torch.zeros(2, 16), ValueError),
    (("append",), "values", "too few", torch.zeros(1, 2, 8), ValueError),
    (("append",), "keys", "another float type", _of_type(torch.float16), TypeError),
    (("append",), "values", "another float type", _of_type(torch.float64), TypeError),
    (("append",), "keys", "another device", _meta, ValueError),
    (("append",), "values", "another device", _meta, ValueError),
    (("seal",), "page_ids", "2 dimensions", lambda p: p[None], ValueError),
    (("seal",), "page_ids", "int32", _of_type(torch.int32), TypeError),
    (("seal",), "page_ids", "bool", _of_type(torch.bool), TypeError),
    (("seal",), "page_ids", "another device", _meta, ValueError),
    (("seal",), "page_ids", "negative", _index(-1), ValueError),
    (("seal",), "page_ids", "past the pool", _index(0, 9), ValueError),
    (("select",), "scores", "2 dimensions", lambda s: s[0], ValueError),
    (("select",), "scores", "bfloat16", _of_type(torch.bfloat16), TypeError),
    (("select",), "num_pages", "too few", lambda n: n[:1], ValueError),
    (("select",), "num_pages", "int32", _of_type(torch.int32), TypeError),
    (("select",), "num_pages", "another device", _meta, ValueError),
    (("select",), "num_pages", "more than scores", _index(2, 4), ValueError),
    (("select",), "num_pages", "negative", _index(2, -1), ValueError),
    (("select", "decode"), "num_selected", "2 dimensions", lambda n: n[None], ValueError),
    (("select", "decode"), "num_selected", "int32", _of_type(torch.int32), TypeError),
    (("select", "decode"), "num_selected", "another device", _meta, ValueError),
    (("select", "decode"), "num_selected", "negative", _index(2, -1), ValueError),
    (("select", "decode"), "sink_pages", "negative", -1, ValueError),
    (("select", "decode"), "recent_pages", "negative", -1, ValueError),
    (("select", "decode"), "sink_pages", "a float", 1.0, TypeError),
    (("select", "decode"), "recent_pages", "a string", "1", TypeError),
    (("decode",), "pages_read", "too few", lambda n: n[:1], ValueError),
    (("decode",), "pages_read", "int32", _of_type(torch.int32), TypeError),
    (("decode",), "pages_read", "another device", _meta, ValueError),
]
_EACH = [
    pytest.param(op, name, value, error, id=f"{op}-{name}-{what}")
    for ops, name, what, value, error in _MISTAKES
    for op in ops
]


@pytest.mark.parametrize("op", _valid())
@pytest.mark.parametrize("backend", available_backends())
def test_the_arguments_that_the_mistakes_start_from_are_taken(op, backend):
    result = call(op, {**_valid()[op], "backend": backend})
    assert (result is None) == (op in ("append", "seal"))


@pytest.mark.parametrize("backend", available_backends())
@pytest.mark.parametrize(("op", "name", "value", "error"), _EACH)
def test_a_mistake_is_named(op, name, value, error, backend):
    arguments = _valid()[op]
    arguments[name] = value(arguments[name]) if callable(value) else value
    arguments["backend"] = backend
    with pytest.raises(error) as caught:
        call(op, arguments)
    # Wrong `slots` show by the keys' shape where their number is wrong, a wrong `page_table` by the lengths' likewise.
    names = {"slots": "(slots|keys)", "page_table": "(page_table|lengths)"}.get(name, name)
    # What needs no other argument is refused when the struct is made.
    assert re.match(rf"\[({op}|Rows|Scoring|Softmax)\] {names}: expected .*, got ", str(caught.value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("op", _valid())
@pytest.mark.parametrize("backend", ["cuda", "", "AUTO", None, 3])
def test_an_unknown_backend_is_refused_with_the_names_there_are(op, backend):
    with pytest.raises(ValueError, match=r"^\[kernels\] backend: expected 'auto' or one of .*'reference'.*, got "):
        call(op, {**_valid()[op], "backend": backend})


@pytest.mark.parametrize("op", ["select", "decode"])
def test_too_few_pages_for_sink_and_recent_are_refused(op):
    arguments = _valid()[op]
    arguments.update(sink_pages=1, recent_pages=1, num_selected=torch.tensor([1, 1]))
    with pytest.raises(ValueError, match=rf"^\[{op}\] num_selected: expected at least the 2 sink and recent"):
        call(op, arguments)
    arguments["num_selected"] = torch.tensor([2, 1])  # the second row has one sealed page: it is enough
    call(op, arguments)


def test_prefill_of_no_sequence_is_refused():
    arguments = _valid()["prefill"]
    arguments.update(q=torch.zeros(0, 6, 8), length=0)
    with pytest.raises(ValueError, match=r"^\[prefill\] length: expected 1 "):
        call("prefill", arguments)
