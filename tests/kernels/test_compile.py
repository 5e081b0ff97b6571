"""The operators under torch.compile: custom operators that torch accepts, one graph, and the eager results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.cases import Case, Shape, build_case
from kernels.coded_cases import code_pages
from kernels.spans import spanned, whole_spans
from questkv import kernels
from questkv.kernels import NewTokens, Pages, PageSegment

SHAPE = Shape(kv_heads=2, group=3, head_dim=16, page_size=4)
NAMES = ("append", "seal", "estimate", "select", "attend", "dense", "prefill", "decode", "decode_new", "transfer")


@pytest.fixture(autouse=True)
def _fresh_graphs() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def make_case(kind: str = "int8") -> Case:
    """Three rows over pages in several segments, one of which is long enough to be sparse."""
    shape = replace(SHAPE, box_dtype="model" if kind == "model" else "int8")
    if "narrow" in kind:
        shape = replace(shape, value_dim=9)
    case = build_case(3, shape, [37, 4, 22], poison=0.0)
    return code_pages(case, seed=1) if "coded" in kind else case


def copied(pages: Pages) -> Pages:
    """The same pages in memory of their own."""
    return Pages(
        tuple(
            PageSegment(
                *(
                    None if tensor is None else tensor.clone()
                    for tensor in (s.keys, s.values, s.boxes, s.scales, s.value_scales)
                )
            )
            for s in pages.segments
        )
    )


def calls(case: Case) -> dict[str, Callable[..., Any]]:
    """Every operator as a function of (pages, q), the rest of its arguments fixed; what it writes is in the pages."""
    table, lengths, scale = case.page_table, case.lengths, case.scale
    page_size = case.shape.page_size
    open_pages = [table[row, sealed] for row, sealed in enumerate(case.sealed)]
    places = [(length - 1) % page_size for length in lengths.tolist()]
    slots = torch.stack([page * page_size + place for page, place in zip(open_pages, places, strict=True)])
    generator = torch.Generator().manual_seed(5)
    new = [
        torch.randn(len(slots), case.shape.kv_heads, dim, generator=generator)
        for dim in (case.shape.head_dim, case.shape.value_dim)
    ]
    plain = torch.ones(case.pages.num_pages, dtype=torch.bool) if case.pages.coded is None else ~case.pages.coded
    to_seal = torch.tensor([page for page in case.tables[0][:9] if plain[page]][:2])
    coded_free = (
        [] if case.pages.coded is None else [p for p in range(len(plain)) if not plain[p] and not held(case, p)]
    )
    into = torch.tensor(coded_free[: len(to_seal)]) if coded_free else None
    sealed = torch.tensor(case.sealed)
    few = sealed.clamp(max=4)
    scores = kernels.estimate(*case.args, scale=scale)
    selection = kernels.select(scores, sealed, few, sink_pages=1, recent_pages=1)
    sinks = torch.randn(case.shape.heads, generator=generator)

    def decode(pages: Pages, q: torch.Tensor, fresh: NewTokens | None) -> tuple[torch.Tensor, torch.Tensor]:
        read = torch.zeros_like(lengths)
        out = kernels.decode(
            *(q, pages, table, lengths, few),
            **{"scale": scale, "sink_pages": 1, "recent_pages": 1, "sinks": sinks, "pages_read": read, "new": fresh},
        )
        return out, read

    # Pages that change places, of either kind, another way round in every head; -1 copies nothing.
    turned = [kind.nonzero().flatten() for kind in (plain, ~plain)]
    source_ids = torch.stack([torch.cat(turned), torch.cat([kind.flip(0) for kind in turned])])
    target_ids = torch.cat([kind.roll(1) for kind in turned]).expand(2, -1)
    source_ids[1, 0] = -1
    return {
        "append": lambda pages, q: kernels.append(pages, slots, *new),
        "seal": lambda pages, q: kernels.seal(pages, to_seal, into),
        "estimate": lambda pages, q: kernels.estimate(q, pages, table, lengths, scale=scale, group="per_head"),
        "select": lambda pages, q: kernels.select(scores * q.mean(), sealed, few, sink_pages=1, recent_pages=1),
        "attend": lambda pages, q: kernels.attend(q, pages, table, lengths, selection, scale=scale, softcap=3.0),
        "dense": lambda pages, q: kernels.dense(q, pages, table, lengths, scale=scale, sinks=sinks),
        "prefill": lambda pages, q: kernels.prefill(q, pages, table[0], 37, scale=scale),
        "decode": lambda pages, q: decode(pages, q, None),
        "decode_new": lambda pages, q: decode(pages, q, NewTokens(slots, new[0], new[1], to_seal, into)),
        # The native backend has none.
        "transfer": lambda pages, q: kernels.transfer(case.pages, source_ids, pages, target_ids, backend="reference"),
    }


def held(case: Case, page: int) -> bool:
    return any(page in table for table in case.tables)


def all_tensors(pages: Pages) -> list[torch.Tensor]:
    return [tensor for tensors in pages.tensors() for tensor in tensors]


def with_selection_padded(name: str, result: Any, width: int) -> Any:
    """`select` gives [R, H, P] inside a graph."""
    if name != "select":
        return result
    return torch.nn.functional.pad(result, (0, width - result.shape[2]), value=-1)


@pytest.mark.parametrize("kind", ["int8", "model", "coded", "narrow", "narrow, coded"])
@pytest.mark.parametrize("name", NAMES)
def test_a_whole_graph_gives_the_eager_result(name: str, kind: str) -> None:
    case = make_case(kind)
    call = calls(case)[name]
    eager_pages, graph_pages = copied(case.pages), copied(case.pages)
    expected = with_selection_padded(name, call(eager_pages, case.q), case.page_table.shape[1])
    # aot_eager: the graph as torch sees it, with every write made explicit, without minutes of C++ compilation.
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(graph_pages, case.q)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(all_tensors(graph_pages), all_tensors(eager_pages), rtol=0, atol=0, equal_nan=True)


def test_spans_in_a_graph_give_the_eager_result() -> None:
    case = spanned(build_case(3, Shape(page_size=2), [2 * 40 + 1]), 4)
    spans, few = torch.tensor(whole_spans(case, 0)), torch.tensor([3])
    kernels.seal_spans(case.pages, spans[:-1])
    new = case.keys[0][:, -1:].transpose(0, 1), case.values[0][:, -1:].transpose(0, 1)
    slots, sealed = torch.tensor([case.tables[0][40] * 2]), torch.tensor(case.tables[0][39:40])

    def step(pages: Pages, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kernels.seal_spans(pages, spans[:3])
        scores = kernels.estimate(q, pages, case.page_table, case.lengths, few, scale=0.3)
        fresh = NewTokens(slots, *new, sealed, None, spans[-1:])
        rest = {"scale": 0.3, "sink_pages": 1, "recent_pages": 1, "new": fresh}
        return scores, kernels.decode(q, pages, case.page_table, case.lengths, few, **rest)

    eager_pages, graph_pages = copied(case.pages), copied(case.pages)
    expected = step(eager_pages, case.q)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(graph_pages, case.q)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    torch.testing.assert_close(all_tensors(graph_pages), all_tensors(eager_pages), rtol=0, atol=0, equal_nan=True)


def test_a_whole_step_is_one_graph_under_inductor() -> None:
    case = make_case()
    few = torch.tensor(case.sealed).clamp(max=4)

    def step(pages: Pages, q: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        kernels.append(pages, slots, new[0] * 2, new[1])
        scores = kernels.estimate(q * 2, pages, case.page_table, case.lengths, scale=case.scale)
        selection = kernels.select(scores, (case.lengths - 1) // 4, few, sink_pages=1, recent_pages=1)
        return kernels.attend(q * 2, pages, case.page_table, case.lengths, selection, scale=case.scale) + 1

    slots = torch.tensor([case.tables[row][n] * 4 for row, n in enumerate(case.sealed)])
    new = torch.randn(2, 3, 2, 16)
    eager_pages, graph_pages = copied(case.pages), copied(case.pages)
    torch._dynamo.utils.counters.clear()
    got = torch.compile(step, fullgraph=True)(graph_pages, case.q, slots, new)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(got, step(eager_pages, case.q, slots, new), rtol=0, atol=0)
    torch.testing.assert_close(all_tensors(graph_pages), all_tensors(eager_pages), rtol=0, atol=0)


class Recorder(torch.fx.Interpreter):
    """Runs a graph and notes the arguments with which a custom operator is called."""

    def __init__(self, graph: torch.fx.GraphModule, seen: dict[str, tuple[Any, ...]]) -> None:
        super().__init__(graph)
        self.seen = seen

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        namespace, _, name = str(target).removesuffix(".default").partition(".")
        if namespace == "questkv":
            self.seen[name] = args
        return super().call_function(target, args, kwargs)


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("name", NAMES)
def test_torch_accepts_the_operator(name: str, backend: str) -> None:
    if backend not in kernels.available_backends():
        pytest.skip("the compiled module is not built here")
    if (name, backend) == ("transfer", "native"):
        pytest.skip("pages in host memory are for GPUs")
    case, seen = make_case("coded"), {}
    pages = copied(case.pages)
    torch.compile(calls(case)[name], fullgraph=True, backend=lambda graph, _: Recorder(graph, seen).run)(pages, case.q)
    results = torch.library.opcheck(getattr(torch.ops.questkv, name).default, (*seen[name][:-1], backend))
    assert set(results.values()) == {"SUCCESS"}


def test_a_wrong_argument_is_named_when_the_graph_runs() -> None:
    case = make_case()
    dense = torch.compile(
        lambda q, lengths: kernels.dense(q, case.pages, case.page_table, lengths, scale=case.scale),
        fullgraph=True,
        backend="aot_eager",
    )
    with pytest.raises(ValueError, match=r"\[dense\] lengths: expected 1 to"):
        dense(case.q, case.lengths + 1000)
