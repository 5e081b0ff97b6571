"""``questkv bench``: how fast, against what, on this machine."""

from __future__ import annotations

import typer

from questkv.cli.bench_attention import attention
from questkv.cli.bench_decode import decode
from questkv.cli.bench_prefill import prefill

app = typer.Typer(name="bench", help="Time questkv and others on this machine.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Time questkv and others on this machine."""


app.command()(attention)
app.command()(decode)
app.command()(prefill)
