"""Pages in eight bits: written as the formulas say, and read as what they stand for by every operator."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.calls import attend, decode, dense, estimate, prefill, select
from kernels.cases import DTYPES, GROUP_RULES, Case, Shape, build_case, case_arguments, read_page, selections
from kernels.coded_cases import code_pages, coded_cases
from kernels.eight_bits import decoded_keys, decoded_values, half_step_of_keys, key_codes, rounding_of_keys, value_codes
from kernels.formulas import attention, group_scores, head_scores
from questkv.kernels import Pages, PageSegment, Places, Writes, append, seal

pytestmark = pytest.mark.usefixtures("every_backend")

# A folded query and a weight may be rounded to this part of the largest one, where codes are multiplied as integers
# (docs/method.md, "Pages in eight bits").
_STEP = 1 / (127 * 256)


def _pages(keys: torch.Tensor, values: torch.Tensor, coded: int) -> Pages:
    """Plain pages [Hkv, N, S, D], and behind them `coded` poisoned coded ones."""
    heads, plain, size, dim = keys.shape
    tokens = (heads, coded, size)
    return Pages(
        (
            PageSegment(
                keys.contiguous(),
                values.contiguous(),
                torch.full((heads, plain, 2, dim), 99, dtype=torch.int8),
                torch.full((heads, plain), math.nan),
            ),
            PageSegment(
                torch.full((*tokens, dim), 200, dtype=torch.uint8),
                torch.full((*tokens, dim), 200, dtype=torch.uint8),
                torch.full((heads, coded, 2, dim), 99, dtype=torch.int8),
                torch.full(tokens[:2], math.nan),
                torch.full((*tokens, 2), math.nan),
            ),
        )
    )


def _same(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def _assert_is_coded(pages: Pages, source: int, target: int) -> None:
    """Page `target` holds the codes of page `source` by the formulas, and the box that sealing it in place gives."""
    keys, values = read_page(pages, source, "keys").clone(), read_page(pages, source, "values").clone()
    box, scale = read_page(pages, target, "boxes"), read_page(pages, target, "scales")
    assert torch.equal(read_page(pages, target, "keys"), key_codes(keys, box, scale))
    codes, steps = value_codes(values)
    assert torch.equal(read_page(pages, target, "values"), codes)
    _same(read_page(pages, target, "value_scales"), steps)
    seal(pages, torch.tensor([source]))
    assert torch.equal(box, read_page(pages, source, "boxes"))
    assert torch.equal(scale, read_page(pages, source, "scales"))
    finite = keys.double().isfinite().all(dim=2).all(dim=1)
    decoded, half = decoded_keys(read_page(pages, target, "keys"), box, scale).double(), half_step_of_keys(box, scale)
    wrong = (decoded - keys.double()).abs()
    assert bool((wrong <= half * (1 + 1e-9) + rounding_of_keys(decoded, box, scale))[finite].all())
    bounds = box.double() * scale.double()[:, None, None]
    slack = decoded.abs() * 2.0**-24 + 2.0**-149
    assert bool((bounds[:, :1] <= decoded + slack)[finite].all())
    assert bool((decoded - slack <= bounds[:, 1:])[finite].all())
    assert bool(decoded[~finite].isnan().all())


@given(
    size=st.sampled_from([1, 3, 16, 17]),
    dim=st.sampled_from([1, 8, 33, 64]),
    dtype=st.sampled_from(DTYPES),
    spread=st.sampled_from([1e-6, 1.0, 1e4]),
    seed=st.integers(0, 2**31),
)
def test_a_page_is_coded_as_the_formulas_say_and_decodes_within_half_a_step(size, dim, dtype, spread, seed):
    gen = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn((2, 3, size, dim), generator=gen).mul(spread).to(dtype) for _ in range(2))
    keys[0, 1, :, 0] = keys[0, 1, 0, 0]  # a channel without width, but for what the box is rounded outward
    keys[0, 2] = 0
    values[1, 2, 0] = values[1, 2, 0, 0]
    pages = _pages(keys, values, 5)
    before = [tensor.clone() for tensor in (keys, values)]
    seal(pages, torch.tensor([2, 0, 1]), torch.tensor([7, 3, 5]))
    for source, target in ((2, 7), (0, 3), (1, 5)):
        _assert_is_coded(pages, source, target)
    assert torch.equal(pages.segments[0].keys, before[0])
    assert torch.equal(pages.segments[0].values, before[1])
    for free in (4, 6):
        assert bool((read_page(pages, free, "keys") == 200).all())
        assert bool(read_page(pages, free, "scales").isnan().all())


def test_coding_leaves_the_box_of_the_plain_page_alone():
    pages = _pages(torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 8), 2)
    seal(pages, torch.tensor([0, 1]), torch.tensor([2, 3]))
    assert bool((pages.segments[0].boxes == 99).all())
    assert bool(pages.segments[0].scales.isnan().all())


@given(bits=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=16, max_size=16), dtype=st.sampled_from(DTYPES))
def test_any_bit_pattern_is_coded_as_the_formulas_say(bits, dtype):
    raw = torch.tensor(bits, dtype=torch.int32).view(torch.float32).to(dtype).view(2, 1, 2, 4)
    pages = _pages(raw, raw.flip(0), 1)
    seal(pages, torch.tensor([0]), torch.tensor([1]))
    _assert_is_coded(pages, 0, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bad_key_or_value_is_never_hidden(bad, dtype):
    keys, values = (torch.randn(2, 3, 3, 8).to(dtype) for _ in range(2))
    keys[1, 1, 2, 5] = bad
    values[0, 0, 1, 4] = bad
    pages = _pages(keys, values, 3)
    seal(pages, torch.tensor([0, 1]), torch.tensor([3, 4]))
    args = (torch.randn(1, 4, 8).to(dtype), pages, torch.tensor([[3, 4, 2]]), torch.tensor([8]))
    scores = estimate(*args, scale=1.0)
    assert scores[0, 1, 1].item() == math.inf
    assert bool(scores[0, 0, :2].isfinite().all())
    out = attend(*args, torch.tensor([[[1], [0]]]), scale=1.0)  # each head reads the page that isn't bad for it
    assert bool(out.isfinite().all())
    out = attend(*args, torch.tensor([[[0], [1]]]), scale=1.0)
    assert bool(out.isnan().all())
    assert bool(dense(*args, scale=1.0).isnan().all())


def _assert_is_attention(out: torch.Tensor, case: Case, tokens: list[list[list[int]]], backend: str) -> None:
    assert out.dtype == case.shape.dtype
    for row in case.rows:
        keys, values = case.keys[row], case.values[row]
        expected, tolerance = attention(case.q[row], keys, values, tokens[row], case.scale)
        if backend != "reference":
            tolerance = tolerance + _rounded_products(case, row, tokens[row])
        assert bool(((out[row].double() - expected).abs() <= tolerance).all())


def _rounded_products(case: Case, row: int, tokens: list[list[int]]) -> torch.Tensor:
    """[Hq, 1] what rounding folded queries and weights may add; float32 decoding (a few roundings) is far below."""
    added = []
    for head, seen in enumerate(tokens):
        kv_head = head // case.shape.group
        keys, values = (rows[row][kv_head, seen].double() for rows in (case.keys, case.values))
        query = case.q[row, head].double() * case.scale
        # A box is at most one code wider on either side than a page's keys, and a code 1 / 127 of the largest key.
        width = 2 * keys.abs().max() * (1 + 2 / 127)
        folded = float((query.abs() * width).max())
        logit = case.shape.head_dim * folded * _STEP / 2 + 8 * case.shape.head_dim * 2.0**-24 * folded
        spread = float((values.amax(dim=1) - values.amin(dim=1)).max())
        size = float(values.abs().max())
        added.append(1.01 * (math.expm1(2 * logit) * size + len(seen) * spread * _STEP / 2))
    return torch.tensor(added, dtype=torch.float64)[:, None]


def _seen(case: Case, row: int, pages: list[int]) -> list[int]:
    size, length = case.shape.page_size, int(case.lengths[row])
    return [t for page in pages if page >= 0 for t in range(page * size, min((page + 1) * size, length))]


@given(data=st.data(), case=coded_cases(), per_head=st.booleans())
def test_attention_is_that_of_the_decoded_tokens(every_backend, data, case, per_head):
    selection = data.draw(selections(case, per_head))
    heads = case.shape.heads
    listed = [
        [[*selection[row, head * selection.shape[1] // heads].tolist(), case.sealed[row]] for head in range(heads)]
        for row in case.rows
    ]
    chosen = [[_seen(case, row, pages) for pages in listed[row]] for row in case.rows]
    _assert_is_attention(attend(*case.args, selection, scale=case.scale), case, chosen, every_backend)
    everything = [[list(range(n))] * heads for n in case.lengths.tolist()]
    _assert_is_attention(dense(*case.args, scale=case.scale), case, everything, every_backend)


@given(case=coded_cases(), group=st.sampled_from(GROUP_RULES))
def test_scores_are_those_of_the_coded_pages_boxes(case, group):
    scores = estimate(*case.args, scale=case.scale, group=group)
    for row, sealed in enumerate(case.sealed):
        if not sealed:
            continue
        boxes, scales = (
            torch.stack([read_page(case.pages, p, name) for p in case.tables[row][:sealed]], dim=1).double()
            for name in ("boxes", "scales")
        )
        bounds = boxes * scales[..., None, None]
        exact = head_scores(case.q[row], bounds[:, :, 0], bounds[:, :, 1], case.scale, 1.0)
        expected, tolerance = group_scores(*exact, case.shape.kv_heads, group)
        assert bool(((scores[row, :, :sealed].double() - expected).abs() <= tolerance).all())
        if group == "softmax_mean":
            continue
        # With optimism 1 no decoded key has a larger logit.
        size = case.shape.page_size
        own = case.keys[row][:, : sealed * size].double().unflatten(1, (sealed, size))
        ratio = case.shape.group
        logits = torch.stack([(own[h // ratio] @ q * case.scale).amax(-1) for h, q in enumerate(case.q[row].double())])
        largest, _ = group_scores(logits, logits, case.shape.kv_heads, group)
        assert bool((scores[row, :, :sealed].double() >= largest - 2 * tolerance).all())


@pytest.mark.slow
@given(data=st.data(), case=coded_cases(), group=st.sampled_from(GROUP_RULES))
def test_decode_is_estimate_select_and_attend_and_dense_with_enough_pages(data, case, group):
    counts = torch.tensor([data.draw(st.integers(min(n, 2), n + 1)) for n in case.sealed])
    forced = {"sink_pages": 1, "recent_pages": 1}
    scores = estimate(*case.args, scale=case.scale, group=group)
    selection = select(scores, torch.tensor(case.sealed), counts, **forced)
    out = decode(*case.args, counts, scale=case.scale, group=group, **forced)
    sparse, full = attend(*case.args, selection, scale=case.scale), dense(*case.args, scale=case.scale)
    for row, sealed in enumerate(case.sealed):
        assert torch.equal(out[row], sparse[row] if int(counts[row]) < sealed else full[row])


@given(arguments=case_arguments(box_dtype="int8", max_rows=3), seed=st.integers(0, 99), placement=st.integers(1, 99))
def test_a_row_gives_the_same_bits_alone_and_on_other_pages(arguments, seed, placement):
    case = code_pages(build_case(**arguments), seed=seed)
    moved = code_pages(build_case(**arguments, poison=31000.0, free_pages=7), seed=seed, placement=placement)
    counts = torch.tensor([max(n // 2, min(n, 2)) for n in case.sealed])
    rest = {"scale": case.scale, "sink_pages": 1, "recent_pages": 1}
    out, full = decode(*case.args, counts, **rest), dense(*case.args, scale=case.scale)
    assert torch.equal(decode(*moved.args, counts, **rest), out)
    assert torch.equal(dense(*moved.args, scale=case.scale), full)
    for row in case.rows:
        one = case.row(row)
        assert torch.equal(decode(*one.args, counts[row : row + 1], **rest)[0], out[row])
        assert torch.equal(dense(*one.args, scale=case.scale)[0], full[row])


@given(case=coded_cases(max_rows=1), data=st.data())
def test_prefill_is_dense_over_the_past_that_is_coded_and_the_new_tokens_that_are_plain(every_backend, case, data):
    length, size = int(case.lengths[0]), case.shape.page_size
    n = data.draw(st.integers(1, (length - 1) % size + 1))  # all in the open page: plain, as a run's own tokens are
    q = torch.randn(n, case.shape.heads, case.shape.head_dim).to(case.shape.dtype)
    out = prefill(q, case.pages, case.page_table[0], length, scale=case.scale)
    for i in range(n):
        seen = [list(range(length - n + i + 1))] * case.shape.heads
        expected, tolerance = attention(q[i], case.keys[0], case.values[0], seen, case.scale)
        # Merging pieces of the past by their log-sum-exps costs a few more roundings than one softmax.
        assert bool(((out[i].double() - expected).abs() <= 4 * tolerance).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_writes_codes_and_reads_new_tokens_in_one_call(dtype):
    shape = Shape(kv_heads=2, group=2, head_dim=16, page_size=3, dtype=dtype)
    gen = torch.Generator().manual_seed(1)
    keys, values = (torch.randn((10, 2, 16), generator=gen).to(dtype) for _ in range(2))
    q = torch.randn((1, 4, 16), generator=gen).to(dtype)
    results = []
    for together in (True, False):
        empty = torch.full((2, 4, 3, 16), math.nan, dtype=dtype)
        pages = _pages(empty, empty.clone(), 4)
        append(pages, torch.arange(9), keys[:9], values[:9])
        seal(pages, torch.tensor([0, 1]), torch.tensor([5, 6]))
        last = Places(torch.tensor([9]), torch.tensor([2]), torch.tensor([4]))
        if not together:
            append(pages, last.slots, keys[9:], values[9:])
            seal(pages, last.sealed, last.into)
        results.append(
            decode(
                q,
                pages,
                torch.tensor([[5, 6, 4, 3]]),
                torch.tensor([10]),
                torch.tensor([2]),
                scale=0.3,
                writes=Writes(keys[9:], values[9:], last) if together else None,
                sink_pages=1,
                recent_pages=1,
            )
        )
        assert torch.equal(
            decoded_values(read_page(pages, 4, "values"), read_page(pages, 4, "value_scales")),
            decoded_values(*value_codes(values[6:9].transpose(0, 1))),
        )
    assert bool(results[0].isfinite().all())
    assert torch.equal(*results)
    assert shape.heads == 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: seal(p, torch.tensor([3])), r"\[seal\] page_ids: expected plain pages .*got the coded page 3"),
        (lambda p: seal(p, torch.tensor([0]), torch.tensor([1])), r"\[seal\] into: expected coded .*the plain page 1"),
        (
            lambda p: seal(p, torch.tensor([0, 1]), torch.tensor([3])),
            r"\[seal\] into: expected a page for each of the 2",
        ),
        (lambda p: seal(p, torch.tensor([0]), torch.tensor([5])), r"\[seal\] into: expected physical pages 0 to 4"),
        (
            lambda p: append(p, torch.tensor([9]), torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)),
            r"\[append\] slots: expected plain pages .*got the coded page 3",
        ),
        (
            lambda p: dense(torch.zeros(1, 2, 8), p, torch.tensor([[0, 3]]), torch.tensor([5]), scale=1.0),
            r"\[dense\] page_table: expected plain pages .*got the coded page 3",
        ),
        (
            lambda p: prefill(torch.zeros(1, 2, 8), p, torch.tensor([0, 3]), 5, scale=1.0),
            r"\[prefill\] page_table: expected plain pages .*got the coded page 3",
        ),
    ],
)
def test_a_page_of_the_wrong_kind_is_named(call, message):
    pages = _pages(torch.zeros(2, 3, 3, 8), torch.zeros(2, 3, 3, 8), 2)
    with pytest.raises(ValueError, match=message) as caught:
        call(pages)
    assert "\n" not in str(caught.value)


def test_coding_into_pages_of_a_cache_without_coded_ones_is_refused():
    case = build_case(0, Shape(page_size=3), [7])
    with pytest.raises(ValueError, match=r"\[seal\] into: expected coded pages, got the plain page 1"):
        seal(case.pages, torch.tensor([0]), torch.tensor([1]))
