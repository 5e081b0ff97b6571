"""A long answer in one run: does memory stay flat, and is the last token as fast as its context lets one expect?

    python benchmarks/decode_soak.py
    python benchmarks/decode_soak.py --weights int4 --tokens 4000 --budget 1024

The model reads the novel in examples/ and then decodes its own greedy tokens. Memory is the process's resident memory
without the pages that the cache holds, which have to grow. What a token may take at the end is what it takes on a fresh
cache filled with the same keys and values: steps on the two caches alternate, so a change of the machine's speed meets
both. Exits with 1 if memory grew by more than 32 MiB or the run's own cache is more than 10 % slower. Linux only.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from questkv import QuestCache, QuestConfig
from questkv.hf.prefill import cache_argument, prefill
from questkv.models import WEIGHTS, load_model

NOVEL = Path(__file__).parents[1] / "examples" / "sherlock_holmes.txt"
MOST_GROWTH_MIB, MOST_SLOWDOWN = 32.0, 1.10
# Tokens between two looks at memory; the first ones still allocate what is used again and again.
INTERVAL = 200


def resident_mib() -> float:
    """Resident memory of this process."""
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in status if line.startswith("VmRSS")).split()[1]) / 1024


def outside_mib(cache: QuestCache) -> float:
    """Resident memory without the cache's pages."""
    return resident_mib() - cache.report().bytes_held / 2**20


def step(model: Any, cache: QuestCache, token: torch.Tensor) -> tuple[torch.Tensor, float]:
    """One decode step: the next token [1, 1] and the seconds."""
    start = time.perf_counter()
    logits = model(input_ids=token, use_cache=True, **{cache_argument(model): cache}).logits
    return logits[:, -1:].argmax(dim=-1), time.perf_counter() - start


def refilled(model: Any, cache: QuestCache) -> QuestCache:
    """A fresh cache with the same keys and values."""
    fresh = QuestCache(model.config, cache.config)
    held = [cache.keys_values(layer) for layer in range(len(cache.layers))]
    fresh.fill([(keys[None], values[None]) for keys, values in held])
    return fresh


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--weights", choices=WEIGHTS, default="model")
    parser.add_argument("--compared", type=int, default=40, help="steps on either cache at the end")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.tokens < 2 * INTERVAL:
        parser.error(f"--tokens: expected at least {2 * INTERVAL}, got {options.tokens}")
    if options.threads:
        torch.set_num_threads(options.threads)
    model, tokenizer = load_model(options.model, attention="questkv", weights=options.weights)
    ids = torch.tensor([tokenizer(NOVEL.read_text(encoding="utf-8"))["input_ids"][: options.prompt + 1]])
    cache = QuestCache(model.config, QuestConfig(token_budget=options.budget))
    table = Table("tokens decoded", "context", "ms a token (last 200, median)", "MiB outside the cache")
    times: list[float] = []
    memory: list[float] = []
    with torch.inference_mode():
        prefill(model, cache, ids[:, :-1])
        token = ids[:, -1:]
        for done in range(1, options.tokens + 1):
            token, seconds = step(model, cache, token)
            times.append(seconds)
            if done % INTERVAL == 0:
                memory.append(outside_mib(cache))
            if done % 500 == 0 or done == options.tokens:
                median = statistics.median(times[-INTERVAL:]) * 1e3
                table.add_row(f"{done:,}", f"{cache.get_seq_length():,}", f"{median:.1f}", f"{outside_mib(cache):.1f}")
        fresh = refilled(model, cache)
        spent: tuple[list[float], list[float]] = ([], [])
        for _ in range(options.compared):
            (chosen, ours), (_, expected) = step(model, cache, token), step(model, fresh, token)
            token = chosen
            spent[0].append(ours)
            spent[1].append(expected)
    slowdown = statistics.median(spent[0]) / statistics.median(spent[1])
    growth = memory[-1] - memory[0]
    console = Console()
    console.print(table)
    console.print(
        f"memory outside the cache grew by {growth:.1f} MiB after the first {INTERVAL} tokens; a step on this cache "
        f"takes {slowdown:.3f} times one on a fresh cache of {fresh.get_seq_length():,} tokens",
        highlight=False,
    )
    return 0 if growth <= MOST_GROWTH_MIB and slowdown <= MOST_SLOWDOWN else 1


if __name__ == "__main__":
    sys.exit(main())
