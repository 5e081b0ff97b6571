"""What append and seal wrote, against the tokens: keys and values, boxes, codes, and nothing anywhere else."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from questkv.benchmark.gpu.cases import Inputs
from questkv.benchmark.gpu.findings import Finding, finding
from questkv.benchmark.gpu.formulas import decoded_keys, decoded_values

# Float64 formulas, worked out in another order.
_ROUNDING = 1e-9


class Stored:
    """The pages' tensors, those of all plain segments in one, and those of the coded ones.

    Attributes:
        plain: By name, [Hkv, N, ...].
        coded: The same of coded segments; empty where there are none.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        names = ("keys", "values", "boxes", "scales", "value_scales")
        self.plain, self.coded = (
            {
                name: torch.cat([getattr(segment, name) for segment in segments], dim=1)
                for name in names
                if segments and getattr(segments[0], name) is not None
            }
            for segments in (
                [segment for segment in inputs.pages.segments if segment.coded == coded] for coded in (False, True)
            )
        )

    def sealed_pages(self, row: int) -> tuple[dict[str, torch.Tensor], list[int]]:
        """Where the row's sealed pages have their boxes, and which pages of it they are."""
        twins = self.inputs.coded[row]
        return (self.coded, twins) if twins else (self.plain, self.inputs.plain[row][: self.inputs.sealed[row]])

    def bounds(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[Hkv, n, D] float64 lo and hi of the row's sealed pages; a hidden page's are not finite."""
        store, pages = self.sealed_pages(row)
        boxes = store["boxes"][:, pages].double()
        if "scales" in store:
            boxes = boxes * store["scales"][:, pages].double()[..., None, None]
        return boxes[:, :, 0], boxes[:, :, 1]

    def tokens(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[Hkv, L, D] float64 keys and values that the row's pages stand for."""
        keys, values = self.inputs.keys[row].double(), self.inputs.values[row].double()
        pages = self.inputs.coded[row]
        if pages:
            coded = {name: tensor[:, pages] for name, tensor in self.coded.items()}
            decoded = (
                decoded_keys(coded["keys"], coded["boxes"], coded["scales"]).flatten(1, 2),
                decoded_values(coded["values"], coded["value_scales"]).flatten(1, 2),
            )
            rest = decoded[0].shape[1]
            keys, values = (
                torch.cat([part, own[:, rest:]], dim=1) for part, own in zip(decoded, (keys, values), strict=True)
            )
        return keys, values


def check_stored(stored: Stored) -> Iterator[Finding]:
    """One finding for what append wrote, one for boxes, one for codes, one for what nobody should have written."""
    inputs = stored.inputs
    expected = {name: torch.full_like(stored.plain[name], math.nan) for name in ("keys", "values")}
    for row, pages in enumerate(inputs.plain):
        for name, own in (("keys", inputs.keys[row]), ("values", inputs.values[row])):
            room = own.new_full((own.shape[0], len(pages) * inputs.case.page_size, own.shape[2]), math.nan)
            room[:, : own.shape[1]] = own
            expected[name][:, pages] = room.unflatten(1, (len(pages), inputs.case.page_size))
    for name, tensor in expected.items():
        yield finding("append", f"plain {name}", stored.plain[name], tensor)
    rows = [row for row, sealed in enumerate(inputs.sealed) if sealed]
    yield from (_boxes(stored, row) for row in rows)
    if inputs.case.coded:
        yield from (one for row in rows for one in _codes(stored, row))
    yield from _untouched(stored)


def _pages_of(inputs: Inputs, row: int, tokens: list[torch.Tensor]) -> torch.Tensor:
    """[Hkv, n, S, D] float64 of the row's sealed pages."""
    size, sealed = inputs.case.page_size, inputs.sealed[row]
    pages: torch.Tensor = tokens[row][:, : sealed * size].double().unflatten(1, (sealed, size))
    return pages


def _boxes(stored: Stored, row: int) -> Finding:
    """Boxes hold every key and are as tight as their type lets them; steps by which they don't."""
    keys = _pages_of(stored.inputs, row, stored.inputs.keys)
    bad = ~keys.isfinite().all(dim=3).all(dim=2)  # [Hkv, n]
    lo, hi = keys.amin(dim=2), keys.amax(dim=2)
    store, pages = stored.sealed_pages(row)
    what = f"boxes of row {row}"
    if "scales" not in store:
        boxes = store["boxes"][:, pages].double()
        expected = torch.stack([lo, hi], dim=2)
        expected[bad] = torch.tensor([-math.inf, math.inf], dtype=torch.float64, device=lo.device)[:, None]
        return finding("seal", what, boxes, expected)
    codes, scales = store["boxes"][:, pages].double(), store["scales"][:, pages].double()
    largest = torch.maximum(lo.abs(), hi.abs()).amax(dim=2)
    step = scales.masked_fill(bad, 1.0)[..., None]
    # In steps: a key outside its box, a bound that could be a step tighter, a scale that is larger than it must be.
    outside = torch.maximum(codes[:, :, 0] - lo / step, hi / step - codes[:, :, 1])
    loose = torch.maximum(lo / step - codes[:, :, 0], codes[:, :, 1] - hi / step) - 1
    wide = (scales * 127 / largest - 1 - 2.0**-20)[..., None].expand_as(outside)
    # A bound in whole steps is exact where the key is: float64 may put it on either side by its last bit.
    wrong = torch.maximum(torch.maximum(outside, loose), wide) - _ROUNDING
    hidden = (scales == math.inf) & (codes == 0).all(dim=3).all(dim=2)
    wrong = wrong.masked_fill(bad[..., None], 0.0).masked_fill((hidden != bad)[..., None], math.inf)
    return finding("seal", f"{what}, in steps", wrong.clamp(min=0.0), torch.zeros_like(wrong))


def _codes(stored: Stored, row: int) -> Iterator[Finding]:
    """Codes are the nearest ones, and values' steps and offsets those of their range."""
    store, pages = stored.coded, stored.inputs.coded[row]
    keys, values = (_pages_of(stored.inputs, row, rows) for rows in (stored.inputs.keys, stored.inputs.values))
    bad = ~keys.isfinite().all(dim=3).all(dim=2)[..., None, None]
    lo, hi = (bound[:, :, None] for bound in stored.bounds(row))
    place = ((keys - lo) * 255 / (hi - lo)).nan_to_num(0.0).masked_fill(bad, 0.0).clamp(0, 255)
    yield finding("seal", f"codes of keys of row {row}", store["keys"][:, pages], place, 0.5 + _ROUNDING * 255)
    step, offset = store["value_scales"][:, pages].double()[..., None].unbind(dim=3)
    lowest, width = values.amin(dim=3, keepdim=True), values.amax(dim=3, keepdim=True) - values.amin(3, keepdim=True)
    yield finding("seal", f"offsets of values of row {row}", offset, lowest)
    # The width is rounded to float32, and its share of 255 again.
    yield finding("seal", f"steps of values of row {row}", step, width / 255, width / 255 * 2.0**-22)
    place = ((values - offset) / step).clamp(0, 255)
    yield finding("seal", f"codes of values of row {row}", store["values"][:, pages], place, 0.5 + _ROUNDING * 255)


def _untouched(stored: Stored) -> Iterator[Finding]:
    """Pages that nobody holds, and boxes of pages that aren't sealed, hold what they held."""
    inputs = stored.inputs
    sealed = [page for own, n in zip(inputs.plain, inputs.sealed, strict=True) for page in own[:n]]
    taken = [page for twins in inputs.coded for page in twins]
    for kind, store, used in (
        ("plain", stored.plain, [] if inputs.case.coded else sealed),
        ("coded", stored.coded, taken),
    ):
        for name, tensor in store.items():
            if kind == "plain" and name in ("keys", "values"):
                continue
            free = torch.ones(tensor.shape[1], dtype=torch.bool, device=tensor.device)
            free[used] = False
            poison = 99 if tensor.dtype == torch.int8 else 200 if tensor.dtype == torch.uint8 else math.nan
            left = tensor[:, free]
            yield finding("seal", f"{name} of {kind} pages that aren't sealed", left, torch.full_like(left, poison))
