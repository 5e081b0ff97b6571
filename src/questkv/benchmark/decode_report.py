"""The table and the figure of `questkv bench decode`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from questkv.benchmark.attention import DENSE, SPARSE
from questkv.benchmark.decode import Row, summarise
from questkv.benchmark.report import save_figure


def decode_table(rows: Sequence[Row], title: str) -> Table:
    """One line per implementation and context, with a column of speedups for each of our sparse rows."""
    sparse = [name for name in dict.fromkeys(row.name for row in rows) if name.startswith(SPARSE)]
    with_memory = any(row.peak_mib is not None for row in rows)
    table = Table(title=title, title_justify="left")
    table.add_column("context", justify="right")
    table.add_column("implementation")
    headings = ["ms a token", "min ms", "tokens/s", *(["peak MiB"] if with_memory else [])]
    for heading in [*headings, *(f"{name.removeprefix('questkv-')} is faster by" for name in sparse)]:
        table.add_column(heading, justify="right")
    for line in summarise(rows):
        here = [row for row in rows if row.context == line["context"]]
        for row in here:
            cells = [f"{row.ms_per_token:.2f}", f"{row.min_ms:.2f}", f"{row.tokens_per_s:.1f}"]
            if with_memory:
                cells.append("" if row.peak_mib is None else f"{row.peak_mib:,.0f}")
            speedups = [line["sparse_is_faster_by"].get(name, {}).get(row.name) for name in sparse]
            cells += ["" if speedup is None else f"{speedup:.2f}x" for speedup in speedups]
            table.add_row(f"{row.context:,}" if row is here[0] else "", row.name, *cells)
        table.add_section()
    return table


def plot_decode(rows: Sequence[Row], path: str, title: str) -> None:
    """Time a token in groups of bars over the context, and our sparse step's gain: the paper's figure 10."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row.name for row in rows))
    contexts = list(dict.fromkeys(row.context for row in rows))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        times = {row.context: row.ms_per_token for row in rows if row.name == name}
        places = [contexts.index(context) + (i - (len(names) - 1) / 2) * width for context in times]
        hatch = "" if name.startswith((SPARSE, DENSE)) else "//"
        left.bar(places, list(times.values()), width, label=name, hatch=hatch, edgecolor="white")
    for sparse in (name for name in names if name.startswith(SPARSE)):
        for i, other in enumerate(name for name in names if not name.startswith(SPARSE)):
            gains = {
                line["context"]: line["sparse_is_faster_by"][sparse][other]
                for line in summarise(rows)
                if other in line["sparse_is_faster_by"].get(sparse, {})
            }
            style = "o-" if sparse == SPARSE else "s--"
            right.plot(list(gains), list(gains.values()), style, color=f"C{i}", label=f"{sparse} over {other}")
    left.set(yscale="log", xlabel="context (tokens)", ylabel="ms a token", title=title)
    left.set_xticks(range(len(contexts)), [f"{context:,}" for context in contexts])
    right.set(xscale="log", yscale="log", xlabel="context (tokens)", ylabel="sparse is faster by")
    right.set_xticks(contexts, [f"{context:,}" for context in contexts])
    right.minorticks_off()
    right.axhline(1.0, color="grey", linewidth=0.8)
    for axes in (left, right):
        axes.grid(alpha=0.3, axis="y")
        axes.legend(fontsize=7)
    save_figure(figure, path)
    pyplot.close(figure)
