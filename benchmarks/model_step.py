"""Whole decode steps of a real model, in one run: ours sparse, ours dense, transformers' sdpa with its DynamicCache.

    python benchmarks/model_step.py --tokens 7000 --budget 512
    python benchmarks/model_step.py --tokens 28000 --budget 1024 --rope-factor 4

The text is the novel in examples/, repeated if need be. The three decode the same tokens in turn, so a change of the
machine's speed meets them alike; before a time is printed, our dense step's logits must agree with transformers'. The
share of the prefill that sealing pages takes is printed too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

from questkv import QuestCache, QuestConfig, kernels
from questkv.hf.prefill import cache_argument, prefill
from questkv.models import load_model

NOVEL = Path(__file__).parents[1] / "examples" / "sherlock_holmes.txt"


class Stopwatch:
    """Adds up the time spent in a function of a module while it is in use."""

    def __init__(self, module: Any, name: str) -> None:
        self.module, self.name, self.function = module, name, getattr(module, name)
        self.seconds = 0.0

    def __enter__(self) -> Stopwatch:
        setattr(self.module, self.name, self._timed)
        return self

    def __exit__(self, *error: object) -> None:
        setattr(self.module, self.name, self.function)

    def _timed(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return self.function(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - start


def novel_tokens(tokenizer: Any, count: int) -> torch.Tensor:
    """[1, count] int64 tokens of the novel, from its start again where it ends."""
    ids = tokenizer(NOVEL.read_text(encoding="utf-8"))["input_ids"]
    return torch.tensor([(ids * (count // len(ids) + 1))[:count]])


def fill(model: Any, cache: Any, attention: str, ids: torch.Tensor) -> float:
    """Prefill a cache and return the seconds."""
    model.set_attn_implementation(attention)
    start = time.perf_counter()
    prefill(model, cache, ids)
    return time.perf_counter() - start


def step(model: Any, cache: Any, attention: str, token: torch.Tensor) -> tuple[torch.Tensor, float]:
    """One decode step: its logits and its seconds."""
    model.set_attn_implementation(attention)
    start = time.perf_counter()
    logits = model(input_ids=token, use_cache=True, **{cache_argument(model): cache}).logits[:, -1]
    return logits, time.perf_counter() - start


def agree(dense: torch.Tensor, sdpa: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether two steps' logits [1, vocabulary] differ by no more than rounding through the layers explains."""
    # Each of ~30 layers rounds its output to the dtype; the errors add up like a random walk over a few roundings each.
    tolerance = 16 * torch.finfo(dtype).eps * float(sdpa.abs().max())
    return bool((dense.float() - sdpa.float()).abs().max() <= tolerance)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=7000)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--rope-factor", type=float, default=1.0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    model, tokenizer = load_model(options.model, dtype=options.dtype, rope_factor=options.rope_factor)
    ids = novel_tokens(tokenizer, options.tokens + options.steps)
    prompt = ids[:, : options.tokens]
    with torch.inference_mode():
        ours = QuestCache(model.config, QuestConfig(token_budget=1.0))
        with Stopwatch(kernels, "seal") as sealing:
            our_prefill = fill(model, ours, "questkv", prompt)
        theirs = DynamicCache(config=model.config)
        their_prefill = fill(model, theirs, "sdpa", prompt)
        sparse = ours.fork(QuestConfig(token_budget=options.budget))
        runs: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, float]]] = {
            "questkv sparse": lambda token: step(model, sparse, "questkv", token),
            "questkv dense": lambda token: step(model, ours, "questkv", token),
            "transformers sdpa": lambda token: step(model, theirs, "sdpa", token),
        }
        times: dict[str, list[float]] = {name: [] for name in runs}
        for i in range(options.steps):
            token = ids[:, options.tokens + i : options.tokens + i + 1]
            logits = {}
            for name, run in runs.items():
                logits[name], seconds = run(token)
                times[name].append(seconds)
            if not agree(logits["questkv dense"], logits["transformers sdpa"], model.dtype):
                print("our dense step and transformers' disagree: no time is reported", file=sys.stderr)
                return 1
    medians = {name: statistics.median(spent) * 1e3 for name, spent in times.items()}
    title = f"{options.model}, {model.dtype}, {options.tokens:,} tokens, budget {options.budget}"
    table = Table("step", "median ms", "sparse is faster by", title=title, title_justify="left")
    for name, ms in medians.items():
        table.add_row(name, f"{ms:.1f}", f"{ms / medians['questkv sparse']:.2f}x")
    console = Console()
    console.print(table)
    console.print(
        f"prefill: questkv {our_prefill:.1f} s, of which sealing pages {sealing.seconds / our_prefill:.2%}; "
        f"transformers sdpa {their_prefill:.1f} s",
        highlight=False,
    )
    console.print(str(sparse.report()), highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
