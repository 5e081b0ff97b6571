"""The table and the figure of `questkv bench prefill`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from questkv.benchmark.attention import DENSE
from questkv.benchmark.prefill import Row, summarise
from questkv.benchmark.report import save_figure


def prefill_table(rows: Sequence[Row], title: str) -> Table:
    """One line per implementation and length, with a column of speedups for each of our rows."""
    ours = [name for name in dict.fromkeys(row.name for row in rows) if name.startswith(DENSE)]
    with_memory = any(row.peak_mib is not None for row in rows)
    table = Table(title=title, title_justify="left")
    table.add_column("tokens", justify="right")
    table.add_column("implementation")
    headings = ["seconds", "tokens/s", *(["peak MiB"] if with_memory else [])]
    for heading in [*headings, *(f"{name.removeprefix('questkv-')} is faster by" for name in ours)]:
        table.add_column(heading, justify="right")
    for line in summarise(rows):
        here = [row for row in rows if row.context == line["context"]]
        for row in here:
            cells = [f"{row.ms / 1e3:.2f}", f"{row.tokens_per_s:,.0f}"]
            if with_memory:
                cells.append("" if row.peak_mib is None else f"{row.peak_mib:,.0f}")
            speedups = [line["questkv_is_faster_by"].get(name, {}).get(row.name) for name in ours]
            cells += ["" if speedup is None else f"{speedup:.2f}x" for speedup in speedups]
            table.add_row(f"{row.context:,}" if row is here[0] else "", row.name, *cells)
        table.add_section()
    return table


def plot_prefill(rows: Sequence[Row], path: str, title: str) -> None:
    """Tokens a second over the prompt's length, and our gain."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    contexts = list(dict.fromkeys(row.context for row in rows))
    for i, name in enumerate(dict.fromkeys(row.name for row in rows)):
        style, color = "o-" if name.startswith(DENSE) else "x--", f"C{i}"
        line = [(row.context, row.tokens_per_s) for row in rows if row.name == name]
        left.plot(*zip(*line, strict=True), style, color=color, label=name)
        gains = [(at["context"], at["questkv_is_faster_by"][DENSE].get(name)) for at in summarise(rows)]
        if name != DENSE:
            right.plot(*zip(*gains, strict=True), style, color=color, label=name)
    left.set(xscale="log", xlabel="prompt (tokens)", ylabel="tokens a second", title=title)
    left.set_ylim(bottom=0)
    right.set(xscale="log", xlabel="prompt (tokens)", ylabel=f"{DENSE} is faster by")
    right.axhline(1.0, color="grey", linewidth=0.8)
    for axes in (left, right):
        axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    save_figure(figure, path)
    pyplot.close(figure)
