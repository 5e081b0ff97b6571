"""On a machine with a GPU, in under 5 minutes: is every Triton kernel right, and how fast is it?

    python benchmarks/gpu.py                                          # checks, then timings
    python benchmarks/gpu.py --json gpu.json --plot gpu.png           # the same, kept
    python benchmarks/gpu.py --checks                                 # checks alone
    python benchmarks/gpu.py --contexts 32768 --batches 1 --kv-dtype int8

Checks: append, seal, estimate, select, attend, dense and decode, eager and in a CUDA graph, on fresh random inputs (all
types, pages in eight bits, groups, ragged rows, a NaN key, everything unused poisoned), against float64 formulas; and
decoding from pages in host memory, against the same from the GPU's own. What is wrong is named with its case and its
error; it exits with 1 then, and times nothing.

Timings: one decode step of one layer, as a CUDA graph over layers that no cache holds, beside PyTorch's attention
(flash, cuDNN, flex_attention), and FlashInfer's and vLLM's where they are installed. Results are checked before they
are timed. Without a GPU it says so and exits with 0.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time

from questkv.config import GROUP_RULES, KV_DTYPES, QuestConfig
from questkv.errors import ConfigError, QuestKVError

# Before PyTorch is imported, which takes some of the five minutes.
STARTED = time.monotonic()
# Whatever happens, it ends here; an ordinary run stops itself before.
LAST_SECOND = 290


def numbers(text: str) -> tuple[int, ...]:
    """Read ``8192,32768``."""
    values = tuple(int(part) for part in text.split(","))
    if min(values) < 1:
        raise ValueError(text)
    return values


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checks", action="store_true", help="check the kernels and time nothing")
    parser.add_argument("--presets", default="llama2-7b,llama3-8b", help="shapes to time")
    parser.add_argument("--contexts", type=numbers, default=(8192, 16384, 32768, 65536, 131072, 262144))
    parser.add_argument("--batches", type=numbers, default=(1, 4, 16))
    parser.add_argument("--budget", type=int, default=2048, help="tokens that a sparse step may read")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="model")
    parser.add_argument("--group", choices=GROUP_RULES, default="mean")
    parser.add_argument("--seconds", type=float, default=255.0, help="what all of it may take, 270 at most")
    parser.add_argument("--seed", type=int, help="of the checks' inputs; a new one every time by default")
    parser.add_argument("--no-flex", action="store_true", help="leave out flex_attention, whose compilation takes long")
    parser.add_argument("--json", metavar="FILE|-", help="write the rows as JSON")
    parser.add_argument("--plot", metavar="FILE", help="draw a figure for each shape and batch (needs matplotlib)")
    options = parser.parse_args(argv)
    options.seconds = min(options.seconds, 270.0)
    return options


def stop_at(second: float, said: list[str]) -> None:
    """End the process so many seconds after its start, even where a kernel hangs; `said` ends with the last line."""

    def stop() -> None:
        print(f"stopped after {second:.0f} s, behind: {said[-1] if said else 'nothing'}", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(max(second - (time.monotonic() - STARTED), 0.0), stop)
    timer.daemon = True
    timer.start()


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    options = parse(argv)
    import torch

    if not torch.cuda.is_available():
        print("no GPU: PyTorch finds none here, so there is nothing to check or time")
        return 0
    try:
        return run_on_gpu(options)
    except QuestKVError as error:
        print(error, file=sys.stderr)
        return 1


def run_on_gpu(options: argparse.Namespace) -> int:
    """Checks and timings on the current CUDA device."""
    from rich.console import Console

    from questkv.benchmark.gpu.cases import CASES
    from questkv.benchmark.gpu.compiling import compile_ahead
    from questkv.benchmark.gpu.machine import CudaMachine
    from questkv.benchmark.gpu.plan import Plan
    from questkv.benchmark.gpu.run import run
    from questkv.benchmark.report import require_figure
    from questkv.benchmark.shapes import PRESETS
    from questkv.kernels.dispatch import resolve

    if options.plot is not None:
        require_figure(options.plot)
    presets = tuple(options.presets.split(","))
    if unknown := [preset for preset in presets if preset not in PRESETS]:
        raise ConfigError(f"[gpu] --presets: expected some of {', '.join(PRESETS)}, got {', '.join(unknown)}")
    config = QuestConfig(token_budget=options.budget, kv_dtype=options.kv_dtype, group=options.group, backend="triton")
    size = config.page_size
    if wrong := [context for context in options.contexts if context % size or context <= options.budget + size]:
        raise ConfigError(f"[gpu] --contexts: expected multiples of {size} above the budget, got {wrong}")
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    plan = Plan(
        presets,
        options.contexts,
        options.batches,
        options.dtype,
        config,
        options.seconds,
        seed,
        timings=not options.checks,
        with_flex=not options.no_flex,
    )
    machine = CudaMachine()
    resolve("triton", machine.device)
    console = Console(stderr=options.json == "-")
    # Names are long, and a file has no width.
    console.width = max(console.width, 110)
    said: list[str] = []

    def say(what: object) -> None:
        said.append(str(what))
        console.print(what, highlight=False, markup=False, soft_wrap=True)

    stop_at(LAST_SECOND, said)
    say(f"{machine.describe()['gpu']}, seed {seed}: compiling the kernels")
    compile_ahead(CASES, machine.device)
    say(f"compiled after {time.monotonic() - STARTED:.0f} s")
    return run(plan, machine, CASES, say, started=STARTED, json=options.json, plot=options.plot)


if __name__ == "__main__":
    sys.exit(main())
