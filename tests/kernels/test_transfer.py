"""transfer copies whole pages, head by head, and attention reads them through a page table of each head's own."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from interpreter import has_triton, patch_once
from kernels.calls import attend, decode, dense
from kernels.cases import Case, Shape, build_case
from kernels.coded_cases import code_pages
from questkv.errors import UnsupportedError
from questkv.kernels import Pages, PageSegment, native, transfer

NAMES = ("keys", "values", "boxes", "scales", "value_scales")
BACKENDS = ["reference", *(["triton"] if has_triton() else [])]
CASES = {
    "float32": Shape(kv_heads=2, group=3, head_dim=8, page_size=3),
    "bfloat16, boxes in its type": Shape(2, 1, 16, 4, torch.bfloat16, "model"),
    "odd sizes": Shape(kv_heads=3, group=2, head_dim=33, page_size=17, dtype=torch.float16),
    "eight bits": Shape(kv_heads=2, group=4, head_dim=8, page_size=3, dtype=torch.bfloat16),
    "narrow values": Shape(kv_heads=2, group=2, head_dim=12, value_dim=7, page_size=3, dtype=torch.bfloat16),
}


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "triton":
        patch_once()
    return request.param


def a_case(name: str) -> Case:
    """Rows whose pages lie in several segments; of those in eight bits some are coded."""
    case = build_case(3, CASES[name], [40, 23, 40], kinds=["own", "own", "view"])
    return code_pages(case, seed=1) if name in ("eight bits", "narrow values") else case


def kinds(pages: Pages) -> list[bool]:
    """Of every physical page, whether it is coded."""
    return [segment.coded for segment in pages.segments for _ in range(segment.keys.shape[1])]


def stored(pages: Pages, head: int, page: int) -> list[torch.Tensor]:
    """All that is stored of one page of a head, found by walking the segments."""
    for segment in pages.segments:
        if page < segment.keys.shape[1]:
            return [t[head, page] for t in (getattr(segment, name) for name in NAMES) if t is not None]
        page -= segment.keys.shape[1]
    raise IndexError(page)


def another(case: Case, plain: int, coded: int, *, host: bool = False) -> Pages:
    """Pages of the same shapes full of NaN: plain ones, coded ones if there are any, and one plain one more."""
    segments = []
    first = case.pages.segments[0]
    other = next((segment for segment in case.pages.segments if segment.coded), first)
    for like, count in ((first, plain), (other, coded), (first, 1)):
        if count:
            shapes = {n: t for n in NAMES if (t := getattr(like, n)) is not None}
            tensors = {n: torch.empty(t.shape[0], count, *t.shape[2:], dtype=t.dtype) for n, t in shapes.items()}
            for tensor in tensors.values():
                tensor.fill_(math.nan if tensor.is_floating_point() else 77)
            segments.append(PageSegment(**{"scales": None, **tensors}, host=host and bool(segments)))
    return Pages(tuple(segments))


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8)) for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("host", [False, True])
def test_pages_are_copied_as_they_are_and_nothing_else_is_written(backend: str, name: str, host: bool) -> None:
    case = a_case(name)
    coded = kinds(case.pages)
    shape, gen = case.shape, torch.Generator().manual_seed(1)
    target = another(case, 9, 7 if any(coded) else 0, host=host)
    room = kinds(target)
    # For each head other pages, in another order, with padding between them.
    source, into = torch.full((2, shape.kv_heads, 8), -1).unbind()
    for head in range(shape.kv_heads):
        places = torch.randperm(8, generator=gen)[:6].tolist()
        free = {kind: [page for page, other in enumerate(room) if other == kind] for kind in (False, True)}
        for place, page in zip(places, torch.randperm(len(coded), generator=gen).tolist(), strict=False):
            source[head, place], into[head, place] = page, free[coded[page]].pop(1)
    before = [[[t.clone() for t in stored(target, h, p)] for p in range(len(room))] for h in range(shape.kv_heads)]
    transfer(case.pages, source, target, into, backend=backend)
    for head in range(shape.kv_heads):
        copied = {int(to): int(page) for page, to in zip(source[head], into[head], strict=True) if page >= 0}
        assert len(copied) == 6
        for page in range(len(room)):
            expected = stored(case.pages, head, copied[page]) if page in copied else before[head][page]
            assert same(stored(target, head, page), expected)


def test_a_page_is_copied_within_its_own_layer(backend: str) -> None:
    case = a_case("float32")
    free = sorted(set(range(case.pages.num_pages)) - {page for table in case.tables for page in table})
    source, into = torch.tensor([case.tables[0][:2]] * 2), torch.tensor([free[:2]] * 2)
    transfer(case.pages, source, case.pages, into, backend=backend)
    for head in range(2):
        for i in range(2):
            assert same(stored(case.pages, head, case.tables[0][i]), stored(case.pages, head, free[i]))


def scattered(case: Case) -> tuple[Pages, torch.Tensor]:
    """Copies of the rows' pages at places that differ from head to head, and the table [R, Hkv, P] that leads there."""
    shape, gen = case.shape, torch.Generator().manual_seed(4)
    coded = kinds(case.pages)
    used = sorted({page for table in case.tables for page in table})
    room = another(case, 2 * len(used), 2 * len(used) if any(coded) else 0)
    table = case.page_table[:, None].repeat(1, shape.kv_heads, 1)
    source = torch.tensor(used).expand(shape.kv_heads, -1)
    into = torch.empty_like(source)
    for head in range(shape.kv_heads):
        order = torch.randperm(2 * len(used), generator=gen)[: len(used)]
        into[head] = order + torch.tensor([2 * len(used) * coded[page] for page in used])
        for page, to in zip(used, into[head], strict=True):
            table[:, head][case.page_table == page] = to
    transfer(case.pages, source, room, into, backend="reference")
    return room, table


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("per_head", [False, True])
def test_each_heads_own_table_gives_the_same_bits(backend: str, name: str, per_head: bool) -> None:
    case = a_case(name)
    pages, table = scattered(case)
    heads, gen = case.shape.heads if per_head else case.shape.kv_heads, torch.Generator().manual_seed(2)
    width = max(case.sealed)
    selection = torch.full((len(case.q), heads, width), -1)
    for row, sealed in enumerate(case.sealed):
        for head in range(heads):
            chosen = torch.randperm(sealed, generator=gen)[: max(sealed // 2, 1)]
            selection[row, head, : len(chosen)] = chosen.sort().values
    extra = {"softcap": 2.0, "sinks": torch.linspace(-1, 1, case.shape.heads)} if per_head else {}
    how = {"scale": case.scale, "backend": backend, **extra}
    args = (case.q, pages, table, case.lengths)
    assert torch.equal(attend(*args, selection, **how), attend(*case.args, selection, **how))
    assert torch.equal(dense(*args, **how), dense(*case.args, **how))


def test_pages_in_host_memory_are_not_attended() -> None:
    case = a_case("float32")
    pages = Pages(tuple(replace(segment, host=i > 0) for i, segment in enumerate(case.pages.segments)))
    args = (case.q, pages, case.page_table, case.lengths)
    selection = torch.zeros(3, 2, 1, dtype=torch.int64)
    calls = {
        "attend": lambda: attend(*args, selection, scale=1.0),
        "dense": lambda: dense(*args, scale=1.0),
        "decode": lambda: decode(*args, torch.tensor(case.sealed), scale=1.0),
    }
    for name, call in calls.items():
        with pytest.raises(UnsupportedError, match=rf"\[{name}\] pages: expected keys and values on cpu, got some in"):
            call()
    with pytest.raises(ValueError, match=r"\[Pages\] host: expected a first segment on the layer's device"):
        Pages(pages.segments[1:])


@pytest.mark.skipif(not native.is_built(), reason="the compiled module isn't built")
def test_the_compiled_backend_says_that_it_has_no_such_thing() -> None:
    case = a_case("float32")
    table = case.page_table[:, None].repeat(1, 2, 1)
    ids = torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(
        UnsupportedError, match=r"\[transfer\] backend: expected 'triton' \(or 'reference'\), got 'native'"
    ):
        transfer(case.pages, ids, case.pages, ids + 1, backend="native")
    with pytest.raises(UnsupportedError, match=r"\[attend\] page_table: expected \[R, P\] with backend 'native'"):
        dense(case.q, case.pages, table, case.lengths, scale=1.0, backend="native")


def test_what_does_not_fit_is_named() -> None:
    case, other = a_case("float32"), a_case("bfloat16, boxes in its type")
    ids = torch.tensor([[0, 1], [2, -1]])
    last = case.pages.num_pages - 1
    wrong = [
        ((case.pages, ids, other.pages, ids), ValueError, "target: expected page_size 3 like the source's, got 4"),
        ((case.pages, ids[:1], case.pages, ids), ValueError, r"page_ids: expected \[Hkv=2, n\], got \[1, 2\]"),
        ((case.pages, ids, case.pages, ids[:, :1]), ValueError, r"into: expected \[2, 2\] like page_ids, got \[2, 1\]"),
        ((case.pages, ids.int(), case.pages, ids), TypeError, "page_ids: expected int64, got torch.int32"),
        ((case.pages, ids + last, case.pages, ids), ValueError, f"page_ids: expected physical pages 0 to {last}"),
        ((case.pages, ids, case.pages, ids - 1), ValueError, f"into: expected physical pages 0 to {last}, got -1"),
    ]
    for args, error, message in wrong:
        with pytest.raises(error, match=rf"\[transfer\] {message}"):
            transfer(*args, backend="reference")
    coded = a_case("eight bits")
    plain_page, coded_page = (kinds(coded.pages).index(kind) for kind in (False, True))
    one, other_kind = torch.full((2, 1), plain_page), torch.full((2, 1), coded_page)
    with pytest.raises(ValueError, match=r"\[transfer\] into: expected pages of the kind of those in page_ids"):
        transfer(coded.pages, one, coded.pages, other_kind, backend="reference")
    table = case.page_table[:, None].repeat(1, 3, 1)
    with pytest.raises(ValueError, match=r"\[dense\] page_table: expected \[R=3, P\] or \[R, Hkv=2, P\], got"):
        dense(case.q, case.pages, table, case.lengths, scale=1.0, backend="reference")
