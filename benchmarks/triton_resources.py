"""What the compiler makes of the Triton kernels, with or without a GPU: registers, spills, shared memory, occupancy.

    python benchmarks/triton_resources.py                          # every kernel for sm_80 and sm_90, as a table
    python benchmarks/triton_resources.py --write docs/triton.md   # the same, into the page that explains it
    python benchmarks/triton_resources.py --json - --quick         # a few layers that need every kernel, as JSON

The operators are called with small tensors, and what they would launch is compiled for each architecture instead: the
same specialisation, block sizes and options as on a GPU. `cuobjdump`, which comes with Triton, reports on the result.
It exits with 1 where a kernel spills registers, or wants more shared memory than there is.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

# Before anything imports Triton: interpreted kernels can't be compiled.
os.environ.pop("TRITON_INTERPRET", None)

import torch

from questkv.kernels import Pages, PageSegment, Places, Rows, Scoring, Softmax, Writes
from questkv.kernels.triton import decode, dense, launch, select, transfer

ARCHITECTURES = (80, 90)
# Bytes of shared memory that one program may have and that a multiprocessor has, its registers and warps (CUDA's
# programming guide, compute capabilities 8.0 and 9.0).
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
SHARED = {80: 164 * 1024, 90: 228 * 1024}
REGISTERS, WARPS, PROGRAMS, SYSTEM_SHARED = 65536, 64, 32, 1024
BEGIN, END = "<!-- resources: begin -->", "<!-- resources: end -->"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Layer:
    """A layer's shape, and how it is decoded."""

    dtype: str
    head_dim: int
    kv_heads: int
    group: int
    page_size: int = 16
    rule: str = "mean"
    coded: bool = False
    segments: int = 1
    value_dim: int = 0  # as the keys

    def __str__(self) -> str:
        width = f" Dv={self.value_dim}" if self.value_dim else ""
        extra = f"{' int8 pages' if self.coded else ''}{f' {self.segments} segments' if self.segments > 1 else ''}"
        rule = "" if self.rule == "mean" else f" {self.rule}"
        return (
            f"{self.dtype} D={self.head_dim}{width} Hkv={self.kv_heads} G={self.group} S={self.page_size}{rule}{extra}"
        )


LAYERS = (
    Layer("fp16", 128, 32, 1),  # Llama 2 7B
    Layer("bf16", 128, 8, 4),  # Llama 3 8B
    Layer("bf16", 128, 8, 8, page_size=32, segments=3),
    Layer("bf16", 64, 8, 8, page_size=64),
    Layer("bf16", 64, 1, 71),  # Falcon 7B
    Layer("bf16", 80, 32, 1),
    Layer("bf16", 96, 32, 1),
    Layer("bf16", 256, 1, 4, rule="per_head"),  # Gemma 3
    Layer("bf16", 128, 8, 4, rule="per_head", segments=3, coded=True),
    Layer("bf16", 128, 8, 4, rule="softmax_mean", segments=3, coded=True),
    Layer("fp16", 128, 32, 1, segments=2, coded=True),
    Layer("fp16", 64, 3, 3, page_size=32, segments=2, coded=True),
    Layer("bf16", 256, 4, 2, page_size=64, segments=2, coded=True),
    Layer("fp32", 64, 3, 3),  # SmolLM2 135M
    Layer("fp32", 128, 8, 4, rule="per_head"),
    Layer("fp32", 256, 1, 4, segments=2, coded=True),
    Layer("bf16", 192, 128, 1, value_dim=128),  # DeepSeek-V3
    Layer("bf16", 192, 16, 1, segments=2, coded=True, value_dim=128),  # DeepSeek-V2 Lite
)
# Between them they launch every kernel, in every type and with every option.
QUICK = (LAYERS[0], LAYERS[2], LAYERS[4], LAYERS[8], LAYERS[9], LAYERS[11], LAYERS[14], *LAYERS[16:])


@dataclass(frozen=True)
class Resources:
    """One compiled kernel: registers a thread, bytes of spilled registers a thread and of shared memory a program."""

    kernel: str
    variant: str
    layer: str
    arch: int
    warps: int
    stages: int
    registers: int
    spilled: int
    shared: int

    @property
    def occupancy(self) -> float:
        """Share of a multiprocessor's warps that its registers and shared memory let it keep."""
        a_warp = -(-self.registers * 32 // 256) * 256
        programs = min(
            REGISTERS // a_warp // self.warps,
            SHARED[self.arch] // (self.shared + SYSTEM_SHARED),
            WARPS // self.warps,
            PROGRAMS,
        )
        return programs * self.warps / WARPS

    @property
    def fits(self) -> bool:
        """No register is spilled, and the shared memory is there."""
        return not self.spilled and self.shared <= SHARED_LIMIT[self.arch]


def make_pages(layer: Layer) -> Pages:
    """Segments of 4 pages, the last one coded where the layer has codes."""
    dtype, tokens = DTYPES[layer.dtype], (layer.kv_heads, 4, layer.page_size)
    segments = []
    for i in range(layer.segments):
        coded = layer.coded and i == layer.segments - 1
        keys, values = (
            torch.zeros((*tokens, dim), dtype=torch.uint8 if coded else dtype)
            for dim in (layer.head_dim, layer.value_dim or layer.head_dim)
        )
        boxes = torch.zeros((*tokens[:2], 2, layer.head_dim), dtype=torch.int8)
        steps = torch.zeros((*tokens, 2)) if coded else None
        segments.append(PageSegment(keys, values, boxes, torch.zeros(tokens[:2]), steps))
    return Pages(tuple(segments))


def call_operators(layer: Layer) -> None:
    """A decode step with new tokens, dense attention, select and transfer: together they launch every kernel."""
    pages = make_pages(layer)
    dtype, heads = DTYPES[layer.dtype], layer.kv_heads * layer.group
    q = torch.zeros((2, heads, layer.head_dim), dtype=dtype)
    table = torch.arange(3).repeat(2, 1)
    lengths = torch.full((2,), 2 * layer.page_size + 1)
    counts = torch.ones(2, dtype=torch.int64)
    key, value = (torch.zeros((2, layer.kv_heads, dim), dtype=dtype) for dim in (pages.head_dim, pages.value_dim))
    into = torch.full((1,), pages.num_pages - 1) if layer.coded else None
    writes = Writes(key, value, Places(torch.tensor([2, 3]) * layer.page_size, torch.tensor([1]), into))
    rows, softmax, scoring = Rows(table, lengths, counts), Softmax(0.1), Scoring(0.5, layer.rule, 0, 0)
    decode(q, pages, rows, softmax, scoring, writes, torch.zeros_like(counts))
    dense(q, pages, rows, softmax)
    select(torch.zeros(2, layer.kv_heads, 3), counts, counts, scoring)
    ids = torch.zeros((layer.kv_heads, 2), dtype=torch.int64)
    transfer(pages, ids, pages, ids + 1)


@contextmanager
def recorded(launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]], arch: int) -> Iterator[None]:
    """Calls of kernels are kept, not launched; block sizes are those of the architecture."""
    from triton.runtime import JITFunction

    run, architecture = JITFunction.run, launch.architecture
    attend = sys.modules["questkv.kernels.triton.attend"]

    def keep(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append((self, args, kwargs))

    JITFunction.run, attend.architecture = keep, lambda device: arch
    try:
        yield
    finally:
        JITFunction.run, attend.architecture = run, architecture


def sources(layer: Layer, arch: int) -> Iterator[tuple[str, str, Callable[[], Any], int, int]]:
    """Name, variant, a call that compiles it, warps and stages of every kernel that a layer's operators launch."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.compiler import compile as compile_kernel
    from triton.runtime.jit import create_function_from_signature

    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    with recorded(launches, arch):
        call_operators(layer)
    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    for kernel, args, kwargs in launches:
        # As JITFunction.run has it, which asks the driver for the target.
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, options = binder(*args, **kwargs)
        packed = kernel._pack_args(backend, kwargs, bound, specialization, options)
        options, signature, constants, attributes = packed
        source = ASTSource(kernel, signature, constants, attributes)
        call = partial(compile_kernel, source, target=target, options=options.__dict__)
        variant = "" if "LISTED" not in kwargs else "sparse" if kwargs["LISTED"] else "dense"
        yield kernel.fn.__name__, variant, call, options.num_warps, options.num_stages


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and bytes a thread in local memory: what was spilled."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", told)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def compile_all(layers: tuple[Layer, ...]) -> list[Resources]:
    """Every kernel that the layers' operators launch, the same one of a layer only once."""
    todo = [(layer, arch, *kernel) for layer in layers for arch in ARCHITECTURES for kernel in sources(layer, arch)]
    # The compiler gives up Python's lock.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = list(pool.map(lambda one: one[4](), todo))
    results: dict[str, Resources] = {}
    for (layer, arch, name, variant, _, warps, stages), kernel in zip(todo, compiled, strict=True):
        used = (*usage(kernel.asm["cubin"]), kernel.metadata.shared)
        found = Resources(name, variant, str(layer), arch, warps, stages, *used)
        results.setdefault(f"{layer} {kernel.hash}", found)
    return list(results.values())


def table(results: list[Resources]) -> str:
    """Markdown, the architectures side by side: attend and estimate for every layer, of the others what needs most."""
    lines = [
        "| kernel | layer | warps | registers | spilled | shared KiB | occupancy |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    rows: dict[tuple[str, str], list[list[Resources]]] = {}
    for found in results:
        each = found.kernel in ("attend_part", "score_pages")
        key = (f"{found.kernel} {found.variant}".strip(), found.layer) if each else (found.kernel, "")
        by_arch = rows.setdefault(key, [[] for _ in ARCHITECTURES])
        by_arch[ARCHITECTURES.index(found.arch)].append(found)
    for (kernel, layer), by_arch in sorted(rows.items()):
        worst = [max(some, key=lambda found: (found.spilled, found.registers)) for some in by_arch]
        cells = [
            " / ".join(cell)
            for cell in (
                [str(found.registers) for found in worst],
                [str(found.spilled) for found in worst],
                [f"{found.shared / 1024:.1f}" for found in worst],
                [f"{found.occupancy:.0%}" for found in worst],
            )
        ]
        lines.append(f"| {kernel} | {layer or 'the one that needs most'} | {worst[0].warps} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_into(page: Path, text: str) -> None:
    """Replace what stands between the page's two marks."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few layers that launch every kernel")
    parser.add_argument("--write", type=Path, help="a Markdown page with the two marks")
    parser.add_argument("--json", help="a file, or - for standard output")
    arguments = parser.parse_args()
    results = compile_all(QUICK if arguments.quick else LAYERS)
    if arguments.json:
        text = json.dumps([asdict(found) | {"fits": found.fits} for found in results], indent=2)
        if arguments.json == "-":
            print(text)
        else:
            Path(arguments.json).write_text(text + "\n", encoding="utf-8")
    else:
        print(table(results))
    if arguments.write:
        write_into(arguments.write, table(results))
    wrong = [found for found in results if not found.fits]
    for found in wrong:
        print(f"{found.kernel} for {found.layer} on sm_{found.arch}: doesn't fit: {found}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
