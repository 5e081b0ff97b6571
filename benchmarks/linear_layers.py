"""A model's linear layers alone: torch's, ours (fast, eight and four bits) and torchao's, for one token and many.

    python benchmarks/linear_layers.py
    python benchmarks/linear_layers.py --rows 1,16,512 --dtype float32

Weights are random in SmolLM2-135M's shapes, which no cache holds together; all kinds are run in turn.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from questkv.hf.linear_layers import make_linear_fast
from questkv.models import pick_dtype
from questkv.weights import Int4Linear, Int8Linear

HIDDEN, INNER, KV, LAYERS, VOCABULARY = 576, 1536, 192, 30, 49152
# (in, out) of each linear layer: q, k, v, o, gate, up, down.
SHAPES = [
    (HIDDEN, HIDDEN),
    (HIDDEN, KV),
    (HIDDEN, KV),
    (HIDDEN, HIDDEN),
    (HIDDEN, INNER),
    (HIDDEN, INNER),
    (INNER, HIDDEN),
] * LAYERS
HEAD = [(HIDDEN, VOCABULARY)]


def torchao_kind(bits: int) -> Callable[[nn.Linear], nn.Module]:
    """A linear layer as torchao makes it."""
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    config = Int8WeightOnlyConfig() if bits == 8 else PrototypeInt4WeightOnlyConfig(group_size=32)

    def make(linear: nn.Linear) -> nn.Module:
        holder = nn.Sequential(linear)
        quantize_(holder, config)
        return holder[0]

    return make


def fast(linear: nn.Linear) -> nn.Module:
    """A linear layer that reads its weights at the memory's speed."""
    make_linear_fast(linear)
    return linear


def seconds(modules: list[nn.Module], inputs: dict[int, torch.Tensor], shapes: list[tuple[int, int]]) -> float:
    """Time of one pass over all layers."""
    start = time.perf_counter()
    for module, (width, _) in zip(modules, shapes, strict=True):
        module(inputs[width])
    return time.perf_counter() - start


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", default="1,512", help="tokens at once")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    logging.getLogger("torchao").setLevel(logging.ERROR)
    dtype = pick_dtype(options.dtype, "cpu")
    kinds: dict[str, Callable[[nn.Linear], nn.Module]] = {
        "torch": lambda linear: linear,
        "fast": fast,
        "int8": Int8Linear,
        "int4": Int4Linear,
        "torchao int8": torchao_kind(8),
        "torchao int4": torchao_kind(4),
    }
    table = Table(
        "tokens", "kind", "layers, ms", "output layer, ms", title=f"{dtype}, {torch.get_num_threads()} threads"
    )
    with torch.inference_mode():
        made = {
            (kind, name): [
                make(nn.Linear(width, out, bias=False, dtype=dtype).requires_grad_(False)) for width, out in shapes
            ]
            for kind, make in kinds.items()
            for name, shapes in (("layers", SHAPES), ("head", HEAD))
        }
        for rows in map(int, options.rows.split(",")):
            inputs = {width: torch.randn(1, rows, width, dtype=dtype) for width in (HIDDEN, INNER)}
            spent: dict[tuple[str, str], list[float]] = {key: [] for key in made}
            for _ in range(options.repeats if rows < 100 else 3):
                for key, modules in made.items():
                    spent[key].append(seconds(modules, inputs, SHAPES if key[1] == "layers" else HEAD))
            for kind in kinds:
                medians = [f"{statistics.median(spent[kind, name]) * 1e3:.1f}" for name in ("layers", "head")]
                table.add_row(f"{rows}", kind, *medians)
            table.add_section()
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
