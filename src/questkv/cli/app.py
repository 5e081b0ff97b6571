"""The ``questkv`` command: its subcommands, and nothing heavy, so that ``--help`` comes at once."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from questkv import __version__
from questkv.cli.ask import ask
from questkv.cli.bench import app as bench
from questkv.cli.chat import chat
from questkv.cli.eval import app as evaluation
from questkv.cli.failures import INTERRUPTED
from questkv.cli.info import info

app = typer.Typer(
    name="questkv",
    help="Ask long documents: a language model that reads only the part of its KV cache that each token needs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(ask)
app.command()(chat)
app.command()(info)
app.add_typer(bench)
app.add_typer(evaluation)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"questkv {__version__}")
        raise typer.Exit


@app.callback()
def questkv(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Ask long documents: a language model that reads only the part of its KV cache that each token needs."""


def main() -> None:
    """Run the command line; the entry point of the ``questkv`` script."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
