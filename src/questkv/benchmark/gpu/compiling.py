"""Compile what the checks will launch, in all of the machine's cores: one after another takes minutes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from questkv.benchmark.gpu.cases import Case, Inputs
from questkv.benchmark.gpu.operators import call_operators


def compile_ahead(cases: Sequence[Case], device: torch.device) -> None:
    """Call every case's operators with kernels compiled and not launched. What doesn't compile fails again later."""
    with _compiled_only(), ThreadPoolExecutor(os.cpu_count()) as pool:
        # One alone first: it sets up the compiler.
        for some in (cases[:1], cases[1:]):
            for done in [pool.submit(_call, case, device) for case in some]:
                done.exception()


def _call(case: Case, device: torch.device) -> None:
    call_operators(Inputs(case, 0, device))


@contextmanager
def _compiled_only() -> Iterator[None]:
    """A launch compiles its kernel and leaves it at that, as Triton's own `warmup` does."""
    from triton.runtime import JITFunction

    launch = JITFunction.run

    def only_compile(self: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, warmup=True, **options)

    JITFunction.run = only_compile
    try:
        yield
    finally:
        JITFunction.run = launch
