"""What a selection keeps, against sums over single tokens in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.eight_bits import decoded_keys, decoded_values, key_codes, value_codes
from questkv.evaluate.recall_steps import LayerSteps
from questkv.evaluate.recall_truth import DenseTruth
from recall_cases import layer_steps, output_over, weights_of

# Sums of some hundred float32 numbers.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
VARIANTS = [{}, {"softcap": 3.0}, {"sinks": True}, {"group": 1}, {"kv_heads": 1, "group": 4, "dtype": torch.bfloat16}]


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_and_output_are_those_of_softmax_attention(variant: dict[str, object]) -> None:
    steps = layer_steps(**variant)
    truth = DenseTruth(steps)
    for row in range(len(steps.lengths)):
        for head in range(steps.queries.shape[1]):
            weights, sink = weights_of(steps, row, head)
            torch.testing.assert_close(truth.weights[row, head, : len(weights)], weights.float(), **TOLERANCE)
            assert not truth.weights[row, head, len(weights) :].any()
            assert float(truth.sink[row, head]) == pytest.approx(sink, abs=1e-6)
            full = output_over(steps, row, head, list(range(len(weights))))
            torch.testing.assert_close(truth.out[row, head], full.float(), **TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_a_selection_keeps_what_its_tokens_keep(variant: dict[str, object], page_size: int) -> None:
    steps = layer_steps(**variant)
    truth = DenseTruth(steps)
    contents = truth.contents(page_size)
    rows, heads = steps.queries.shape[:2]
    gen = torch.Generator().manual_seed(3)
    chosen = torch.rand(4, rows, heads, contents.num_pages, generator=gen) < 0.4
    sealed = (steps.lengths - 1) // page_size
    pages = torch.arange(contents.num_pages)
    chosen = (chosen | (pages == sealed[:, None])[None, :, None]) & (pages <= sealed[:, None])[None, :, None]
    page_tokens = (steps.lengths[:, None] - pages * page_size).clamp(0, page_size)
    kept = contents.kept(chosen, page_tokens)
    for c in range(4):
        for row in range(rows):
            length = int(steps.lengths[row])
            lists = [[t for t in range(length) if chosen[c, row, head, t // page_size]] for head in range(heads)]
            for head, tokens in enumerate(lists):
                weights, sink = weights_of(steps, row, head)
                top = weights.topk(10).indices.tolist()
                assert float(kept.mass[c, row, head]) == pytest.approx(
                    float(weights[tokens].sum()) / (1 - sink), abs=1e-5
                )
                assert float(kept.top[c, row, head]) == pytest.approx(len(set(top) & set(tokens)) / 10, abs=1e-6)
            full = torch.stack([output_over(steps, row, head, list(range(length))) for head in range(heads)])
            part = torch.stack([output_over(steps, row, head, tokens) for head, tokens in enumerate(lists)])
            assert float(kept.error[c, row]) == pytest.approx(float((part - full).norm() / full.norm()), abs=1e-5)
            read = sum(
                len({t for head in range(first, first + steps.group) for t in lists[head]})
                for first in range(0, heads, steps.group)
            )
            assert int(kept.tokens[c, row]) == read


def test_a_row_of_few_tokens_has_all_of_them_among_its_top() -> None:
    steps = layer_steps(6, rows=1)
    assert DenseTruth(steps).top.sum(dim=-1).allclose(torch.ones(1, 6))


@pytest.mark.parametrize("variant", VARIANTS)
def test_pages_in_eight_bits_add_their_coding_to_the_error_and_leave_the_mass(variant: dict[str, object]) -> None:
    size = 8
    steps = layer_steps(**variant)
    truth = DenseTruth(steps)
    coded = steps.coded(size, "auto")
    kept = truth.contents(size, coded).kept(*_everything(steps, size))
    assert kept.mass.allclose(torch.ones_like(kept.mass))
    for row, length in enumerate(steps.lengths.tolist()):
        sealed = (length - 1) // size * size
        keys, values = (
            torch.cat([eight[:, :sealed], own[:, sealed:].float()], dim=1)
            for eight, own in zip(coded, (steps.keys, steps.values), strict=True)
        )
        read = replace(steps, keys=keys, values=values)
        every = list(range(length))
        heads = range(steps.queries.shape[1])
        full, part = (torch.stack([output_over(of, row, head, every) for head in heads]) for of in (steps, read))
        error = float((part - full).norm() / full.norm())
        assert float(kept.error[0, row]) == pytest.approx(error, abs=1e-6)
        assert 1e-4 < error < 0.1


def test_tokens_in_eight_bits_are_those_of_the_formulas() -> None:
    steps, size = layer_steps(77), 16
    keys, values = steps.coded(size, "auto")
    segment = steps.paged(size, "int8", "auto").segments[0]
    for page in range(77 // size):
        own = slice(page * size, (page + 1) * size)
        box, scale = segment.boxes[:, page], segment.scales[:, page]
        assert torch.equal(keys[:, own], decoded_keys(key_codes(steps.keys[:, own], box, scale), box, scale))
        assert torch.equal(values[:, own], decoded_values(*value_codes(steps.values[:, own])))
    assert torch.equal(keys[:, own.stop :], steps.keys[:, own.stop :])
    assert torch.equal(values[:, own.stop :], steps.values[:, own.stop :])


def _everything(steps: LayerSteps, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[1, R, Hq, P] every page that a row sees, chosen, and [R, P] tokens of each."""
    pages = torch.arange(-(-steps.keys.shape[1] // page_size))
    tokens = (steps.lengths[:, None] - pages * page_size).clamp(0, page_size)
    return (tokens > 0)[None, :, None].expand(-1, -1, steps.queries.shape[1], -1), tokens
