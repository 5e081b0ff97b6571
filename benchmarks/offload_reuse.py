"""How many of the pages that a token reads the GPU has already, with `offload="host"`: no GPU is needed to count them.

    python benchmarks/offload_reuse.py                                       # SmolLM2-135M over a novel
    python benchmarks/offload_reuse.py --context 7000 --budget 512 --json -  # another budget, as JSON

A model reads a text and then goes on in it, token by token. What every sparse layer's heads select is looked up in
lists of the pages that were read last, of several sizes, as `questkv.pages.fetched` keeps them.
"""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from questkv import QuestCache, QuestConfig, kernels
from questkv.hf.prefill import cache_argument, prefill
from questkv.hf.rotary import read_as
from questkv.kernels import Softmax
from questkv.models import load_model

NOVEL = Path(__file__).parents[1] / "examples" / "sherlock_holmes.txt"
# Places on the GPU, in token budgets.
SIZES = (1.0, 1.5, 2.0, 3.0, 4.0)


class Counter:
    """What is selected, looked up in the lists of all sizes; an observer of a cache."""

    def __init__(self, cache: QuestCache, skipped: int) -> None:
        self.cache = cache
        self.skipped = skipped
        self.steps: dict[int, int] = {}
        self.lists: dict[tuple[int, int, float], OrderedDict[int, None]] = {}
        self.there = dict.fromkeys(SIZES, 0)
        self.asked = 0

    def __call__(self, layer: int, query: torch.Tensor, softmax: Softmax) -> None:
        """Count one layer of one token; the first tokens only fill the lists."""
        config = self.cache.config
        if config.is_dense_layer(layer):
            return
        self.steps[layer] = self.steps.get(layer, 0) + 1
        for head, pages in enumerate(self._selected(layer, query, softmax)):
            counted = self.steps[layer] > self.skipped
            self.asked += counted * len(pages)
            for size in SIZES:
                places = int(size * config.budget_at(0) / config.page_size)
                kept = self.lists.setdefault((layer, head, size), OrderedDict())
                self.there[size] += counted * sum(page in kept for page in pages)
                for page in pages:
                    kept[page] = None
                    kept.move_to_end(page)
                while len(kept) > places:
                    kept.popitem(last=False)

    def _selected(self, layer: int, query: torch.Tensor, softmax: Softmax) -> list[list[int]]:
        """Logical pages that every KV head of the layer selects."""
        group = next(group for group in self.cache.state.groups.values() if layer in group.layers)
        assert group.plan is not None
        pages, rows = group.pool.layer(group.layers[layer]), group.plan.rows_in(layer)
        scores = kernels.estimate(query[0].transpose(0, 1), pages, rows, softmax.scale, group.plan.scoring)
        sealed = torch.tensor(group.plan.sealed_counts)
        selection = kernels.select(scores, sealed, rows.num_selected, group.plan.scoring)
        return selection[0].tolist()


def count(arguments: argparse.Namespace) -> dict[str, Any]:
    """The model's run, and what came of it."""
    loaded = load_model(arguments.model, attention="questkv", device="cpu")
    model, config = loaded.model, QuestConfig(token_budget=arguments.budget, page_size=arguments.page_size)
    text = Path(arguments.text).read_text(encoding="utf-8")
    ids = loaded.tokenizer(text[: 8 * arguments.context], return_tensors="pt")["input_ids"]
    ids = ids[:, : arguments.context + arguments.tokens]
    cache = QuestCache(model.config, config)
    counter = Counter(cache, arguments.skipped)
    with read_as(model, ids.shape[1]):
        prefill(model, cache, ids[:, : arguments.context], total_tokens=ids.shape[1])
        with cache.observe(counter), torch.no_grad():
            for i in range(arguments.context, ids.shape[1]):
                model(input_ids=ids[:, i : i + 1], use_cache=True, **{cache_argument(model): cache})
    rows = [{"offload_cache": size, "there": counter.there[size] / counter.asked} for size in SIZES]
    return {"rows": rows, "arguments": vars(arguments), "config": config.to_dict()}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", default=str(NOVEL))
    parser.add_argument("--context", type=int, default=6000, help="tokens read first")
    parser.add_argument("--tokens", type=int, default=128, help="tokens decoded after it")
    parser.add_argument("--skipped", type=int, default=16, help="the first of them, which only fill the lists")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--json", help="a file, or - for standard output")
    arguments = parser.parse_args()
    found = count(arguments)
    if arguments.json == "-":
        print(json.dumps(found, indent=2))
        return
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print("| offload_cache | pages that were there |\n|--:|--:|")
    for row in found["rows"]:
        print(f"| {row['offload_cache']} | {row['there']:.1%} |")


if __name__ == "__main__":
    main()
