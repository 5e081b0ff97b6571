"""Pages in host memory: decoded bit for bit as from the GPU's own memory, and how fast the bus brings them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from questkv import kernels
from questkv.benchmark.gpu.cases import RECENT_PAGES, SINK_PAGES
from questkv.benchmark.gpu.findings import Finding, finding
from questkv.benchmark.gpu.machine import Machine
from questkv.benchmark.shapes import DTYPES
from questkv.kernels import Scoring, Softmax
from questkv.pages import PageGeometry, PagePool, SequenceBatch, offload

_LENGTHS = (700, 33, 257)
_STEPS = 3
# Pages of a layer whose copying is timed: 128 MiB in 16 bits.
_TIMED_PAGES, _TIMED_HEADS = 2048, 8


@dataclass(frozen=True)
class _Case:
    dtype: str
    head_dim: int
    kv_heads: int
    group: int
    rule: str
    kv_dtype: str

    def __str__(self) -> str:
        kind = ", in eight bits" if self.kv_dtype == "int8" else ""
        return f"{self.dtype} D={self.head_dim} Hkv={self.kv_heads} G={self.group} {self.rule}{kind}"


_CASES = (
    _Case("bfloat16", 128, 4, 4, "mean", "model"),
    _Case("float16", 64, 2, 3, "per_head", "int8"),
    _Case("float32", 80, 2, 1, "softmax_mean", "model"),
)


class _Layer:
    """One layer of some sequences, its closed pages on the device or in host memory."""

    def __init__(self, case: _Case, device: torch.device, where: str) -> None:
        geometry = PageGeometry(
            *(case.kv_heads, case.head_dim, 16, DTYPES[case.dtype], device), kv_dtype=case.kv_dtype, offload=where
        )
        self.pool = PagePool(geometry)
        self.pool.add_layer(host=where == "host")
        self.batch = SequenceBatch(self.pool, len(_LENGTHS))

    def write(self, counts: list[int], keys: torch.Tensor, values: torch.Tensor, backend: str) -> None:
        """New tokens of every sequence [T, Hkv, D]."""
        self.batch.reserve(counts)
        self.batch.write(0, keys, values, backend=backend)

    def decode(self, q: torch.Tensor, share: float, rule: str, backend: str) -> tuple[torch.Tensor, ...]:
        """Decode the newest token of every sequence.

        Args:
            q: [R, Hq, D].
            share: Of a sequence's sealed pages that it may read.
            rule: Group rule.
            backend: Whose kernels.

        Returns:
            Attention [R, Hq, D], pages read [R], and pages [2] that the device had and that were copied.
        """
        step = self.batch.step
        assert step is not None
        sealed = [(length - 1) // 16 for length in step.lengths]
        counts = [max(int(share * n), min(n, SINK_PAGES + RECENT_PAGES)) for n in sealed]
        budget = torch.tensor(counts, device=q.device)
        pages_read, fetches = torch.zeros_like(step.rows.lengths), torch.zeros(2, dtype=torch.int64, device=q.device)
        softmax, scoring = Softmax(q.shape[2] ** -0.5), Scoring(0.5, rule, SINK_PAGES, RECENT_PAGES)
        rows = step.rows.selecting(budget)
        how: dict[str, Any] = {"pages_read": pages_read, "backend": backend}
        fetched = self.pool.fetched(0)
        if fetched is None:
            out = kernels.decode(q, self.pool.layer(0), rows, softmax, scoring, **how)
        else:
            each_head = offload.lists_a_kv_head(q, self.pool.geometry.kv_heads, rule)
            fetched.reserve(max(sealed[0], each_head * counts[0]))
            known = offload.HostRows(rows, step.lengths, counts)
            out = offload.decode(q, fetched, known, softmax, scoring, fetches=fetches, **how)
        return out, pages_read, fetches


def check_offload(device: torch.device, seed: int, backend: str = "triton") -> Iterator[Finding]:
    """Decode steps from host memory against the same from the device's, with few pages and with all of them.

    Args:
        device: Where queries and boxes lie.
        seed: Decides keys, values and queries.
        backend: Whose kernels.
    """
    generator = torch.Generator(device).manual_seed(seed)
    for case in _CASES:
        here, there = (_Layer(case, device, where) for where in ("none", "host"))
        for turn, share in enumerate((0.0, *[0.3] * _STEPS, 1.0)):
            counts = [1] * len(_LENGTHS) if turn else list(_LENGTHS)
            shape = (2, sum(counts), case.kv_heads, case.head_dim)
            keys, values = torch.randn(shape, generator=generator, device=device).to(DTYPES[case.dtype])
            for layer in (here, there):
                layer.write(counts, keys, values, backend)
            if not turn:
                continue
            heads = case.kv_heads * case.group
            q = torch.randn(len(_LENGTHS), heads, case.head_dim, generator=generator, device=device).to(keys.dtype)
            expected, got = (layer.decode(q, share, case.rule, backend) for layer in (here, there))
            what = f"{case}, step {turn}"
            yield finding("transfer", f"{what}, attention", got[0], expected[0])
            yield finding("transfer", f"{what}, pages read", got[1], expected[1])
            # Open pages are on the device.
            closed = expected[1].sum() - len(_LENGTHS) * case.kv_heads
            yield finding("transfer", f"{what}, pages that were there or came", got[2].sum(), closed)


def bus_gb_per_s(machine: Machine, backend: str = "triton") -> float:
    """Gigabytes a second at which `transfer` brings pages [S 16, D 128, bfloat16] from host memory in random order."""
    geometry = PageGeometry(_TIMED_HEADS, 128, 16, torch.bfloat16, machine.device, offload="host")
    plain = geometry.allocate(1)
    source = kernels.Pages((plain, geometry.allocate(_TIMED_PAGES, closed=True, host=True)))
    target = kernels.Pages((plain, geometry.allocate(_TIMED_PAGES, closed=True)))
    order = torch.stack([torch.randperm(_TIMED_PAGES) for _ in range(_TIMED_HEADS)]).to(machine.device) + 1
    into = torch.arange(1, _TIMED_PAGES + 1, device=machine.device).expand(_TIMED_HEADS, -1).contiguous()

    def run() -> None:
        kernels.transfer(source, order, target, into, backend=backend)

    run()
    fastest = min(machine.time([run] * 5))
    return _TIMED_PAGES * geometry.page_bytes / fastest / 1e6
