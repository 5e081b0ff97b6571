"""Tables, JSON and figures of a benchmark."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from questkv.benchmark.attention import DENSE, DENSE_MODEL, PARTS, SPARSE, SPARSE_MODEL, Row, is_memory
from questkv.errors import ConfigError, MissingPackageError
from questkv.files import write_whole

_FORMATS = (".png", ".svg", ".pdf")
_STYLES = {SPARSE: "o-", DENSE: "s-", SPARSE_MODEL: "o:", DENSE_MODEL: "s:"}


def attention_table(rows: Sequence[Row], title: str) -> Table:
    """One line per implementation and context."""
    table = Table(title=title, title_justify="left")
    table.add_column("context", justify="right")
    table.add_column("implementation")
    for heading in ("median ms", "min ms", "GB/s", "sparse is faster by", "max error"):
        table.add_column(heading, justify="right")
    for context in dict.fromkeys(row.context for row in rows):
        here = [row for row in rows if row.context == context]
        sparse = next(row for row in here if row.name == SPARSE)
        for row in here:
            part, memory = row.name in PARTS, is_memory(row.name)
            table.add_row(
                f"{row.context:,}" if row is here[0] else "",
                f"  {row.name}" if part else row.name,
                _milliseconds(row.median_ms),
                _milliseconds(row.min_ms),
                f"{row.gb_per_s:.1f}",
                "" if part or memory or row is sparse else f"{row.median_ms / sparse.median_ms:.2f}x",
                "" if part or memory else f"{row.max_error:.1e}",
            )
        table.add_section()
    return table


def _milliseconds(value: float) -> str:
    """Three decimals, of short times a fourth: a GPU's steps take some hundredths."""
    return f"{value:.3f}" if value >= 0.1 else f"{value:.4f}"


def require_figure(path: str) -> None:
    """Fail before the measurement, not after it.

    Raises:
        ConfigError: The file's name ends in another format.
        MissingPackageError: matplotlib is not installed.
    """
    if Path(path).suffix.lower() not in _FORMATS:
        raise ConfigError(f"[bench] --plot: expected a file that ends in {', '.join(_FORMATS)}, got {path}")
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingPackageError("[bench] --plot: expected matplotlib; install it: pip install matplotlib")


def plot_attention(rows: Sequence[Row], path: str, title: str) -> None:
    """Time over context, and our sparse step's gain: the form of the paper's figures 8 and 9."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    names = [row.name for row in rows if row.name not in PARTS and not is_memory(row.name)]
    sparse = {row.context: row.median_ms for row in rows if row.name == SPARSE}
    for i, name in enumerate(dict.fromkeys(names)):
        line = [(row.context, row.median_ms) for row in rows if row.name == name]
        style, color = _STYLES.get(name, "x--"), f"C{i}"
        left.plot(*zip(*line, strict=True), style, color=color, label=name)
        if name != SPARSE:
            right.plot([c for c, _ in line], [ms / sparse[c] for c, ms in line], style, color=color, label=name)
    left.set(xscale="log", yscale="log", xlabel="context (tokens)", ylabel="ms per step and layer", title=title)
    right.set(xscale="log", yscale="log", xlabel="context (tokens)", ylabel="questkv-sparse is faster by")
    for axes in (left, right):
        axes.set_xticks(list(sparse), [f"{c // 1024}K" for c in sparse])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    save_figure(figure, path)
    pyplot.close(figure)


def save_figure(figure: Any, path: str) -> None:
    """Save a figure in the format that its file's name ends in, whole or not at all.

    Raises:
        OutputError: It can't be written.
    """
    picture = io.BytesIO()
    figure.savefig(picture, format=Path(path).suffix[1:].lower(), dpi=150)
    write_whole(path, picture.getvalue(), "--plot")
