"""What a run on a GPU found: lines, JSON and figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from questkv.benchmark.attention import Row, summarise
from questkv.benchmark.gpu.attention import EAGER
from questkv.benchmark.gpu.plan import Plan, Point
from questkv.benchmark.report import plot_attention
from questkv.benchmark.shapes import Shape
from questkv.environment import environment
from questkv.files import encoded, write_whole


def summary(point: Point, rows: list[Row]) -> dict[str, Any]:
    """One point's figures.

    Returns:
        What `questkv bench attention` says of a context, and besides: ``best_dense`` and ``speedup_over_best_dense``,
        the fastest of the others and our own dense attention; ``read_gb_per_s``, ``copy_gb_per_s`` and
        ``attend_share``, attend's bytes per second over the larger of these; ``eager_ms`` of a sparse step without a
        graph.
    """
    by_name = {row.name: row for row in rows}
    (line,) = summarise(rows)
    read, copy = by_name["memory-read"].gb_per_s, by_name["memory-copy"].gb_per_s
    over_dense, over_peer = line["speedup_over_dense"], line["speedup_over_best_peer"]
    return {
        "preset": point.preset,
        "batch": point.shape.batch,
        **line,
        "best_dense": line["best_peer"] if over_peer < over_dense else "questkv-dense",
        "speedup_over_best_dense": min(over_dense, over_peer),
        "read_gb_per_s": read,
        "copy_gb_per_s": copy,
        "attend_share": by_name["attend"].gb_per_s / max(read, copy),
        "sparse_ms": by_name["questkv-sparse"].median_ms,
        "eager_ms": by_name[f"questkv-sparse{EAGER}"].median_ms,
    }


def sentence(line: dict[str, Any]) -> str:
    """One point's figures in words."""
    return (
        f"sparse {line['sparse_ms'] * 1e3:.1f} us in a graph ({line['eager_ms'] * 1e3:.0f} eager), "
        f"{line['speedup_over_dense']:.2f}x over our dense, {line['speedup_over_best_peer']:.2f}x over "
        f"{line['best_peer']}; attend reads at {line['attend_share']:.0%} of the memory's "
        f"{max(line['read_gb_per_s'], line['copy_gb_per_s']):,.0f} GB/s, our dense at {line['bandwidth_share']:.0%}"
    )


def title(shape: Shape, preset: str, plan: Plan) -> str:
    """Of a table or a figure."""
    kind = shape.dtype if plan.config.kv_dtype == "model" else f"{shape.dtype} and pages in eight bits"
    return f"{preset}, {kind}, batch {shape.batch}, budget {plan.config.token_budget}"


def grouped(results: dict[Point, list[Row]]) -> Iterator[tuple[str, Shape, list[Row]]]:
    """Preset, shape, and the rows of all its contexts in order."""
    keys = dict.fromkeys((point.preset, point.shape) for point in results)
    for preset, shape in keys:
        points = sorted((p for p in results if (p.preset, p.shape) == (preset, shape)), key=lambda p: p.context)
        yield preset, shape, [row for point in points for row in results[point]]


def as_json(
    plan: Plan, machine: dict[str, Any], checks: dict[str, Any], results: dict[Point, list[Row]], notes: list[str]
) -> dict[str, Any]:
    """A run as plain values; `rows` are those of `questkv bench attention`, each with its preset, batch and dtype."""
    return {
        "rows": [
            {"preset": point.preset, "batch": point.shape.batch, "dtype": point.shape.dtype, **asdict(row)}
            for point, rows in results.items()
            for row in rows
        ],
        "by_context": [summary(point, rows) for point, rows in results.items()],
        "checks": checks,
        "notes": notes,
        "config": plan.config.to_dict(),
        "seed": plan.seed,
        "environment": {**environment("triton"), **machine},
    }


def write_json(path: str, values: dict[str, Any]) -> None:
    """To a file, or with ``-`` to standard output."""
    text = json.dumps(values, indent=2)
    if path == "-":
        print(text)
    else:
        write_whole(path, encoded(text + "\n"), "--json")


def plot(path: str, plan: Plan, results: dict[Point, list[Row]]) -> list[str]:
    """One figure for each preset and batch, its name before the file's ending; gives the files."""
    files = []
    for preset, shape, rows in grouped(results):
        file = Path(path)
        file = file.with_name(f"{file.stem}-{preset}-b{shape.batch}{file.suffix or '.png'}")
        plot_attention(rows, str(file), title(shape, preset, plan))
        files.append(str(file))
    return files
