"""The ``questkv`` command: its subcommands, and nothing heavy, so that ``--help`` comes at once."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from questkv import __version__
from questkv.cli import streams
from questkv.cli.ask import ask
from questkv.cli.bench import app as bench
from questkv.cli.chat import chat
from questkv.cli.eval import app as evaluation
from questkv.cli.failures import BAD_ARGUMENTS, FAILED, INTERRUPTED, noted_interrupts, report_fault, say_failure
from questkv.cli.info import info
from questkv.errors import OutputError, QuestKVError


class _OneLineGroup(TyperGroup):
    """Commands whose bad arguments are told in one line, as every other failure."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a Ctrl-C that meets none of its lines is told like one that does."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            say_failure("interrupted", INTERRUPTED)
            raise typer.Exit(INTERRUPTED) from None

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line; with `standalone_mode` the process ends with its exit code."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except Exception as error:
            # click's errors; their class is click's own or the one that typer carries, by typer's version
            if not hasattr(error, "format_message"):
                raise
            if type(error).__name__ != "NoArgsIsHelpError":  # then the help was shown
                context = getattr(error, "ctx", None)
                where = f"; see {context.command_path} --help" if context else ""
                say_failure(f"{error.format_message().strip().rstrip('.')}{where}")
            code = getattr(error, "exit_code", BAD_ARGUMENTS)
        sys.exit(code or 0)


app = typer.Typer(
    name="questkv",
    cls=_OneLineGroup,
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
    """Run the command line and end the process; `questkv.__main__` calls it.

    Nothing leaves it as a traceback: what nobody foresaw is one line that says how to report it.
    """
    with noted_interrupts():  # also while what a command held is let go
        code = _run()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done: Python's own end isn't worth interrupting
    sys.exit(code)


def _run() -> int:
    """Run the command line; gives the exit code."""
    code = FAILED
    try:
        streams.prepare()
        app()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else FAILED
    except KeyboardInterrupt:
        code = INTERRUPTED
        say_failure("interrupted", code)
    except QuestKVError as error:
        say_failure(str(error))
    except Exception as error:
        code = report_fault(error) if _output_is_well() else FAILED
    return FAILED if code == 0 and not _output_is_well() else code


def _output_is_well() -> bool:
    """Whether standard output takes what it still holds; says so where it doesn't."""
    if sys.stdout is None:
        return True
    try:
        with streams.guarded():
            sys.stdout.flush()
    except BrokenPipeError:
        streams.drop_output()
        return False
    except OutputError as error:
        say_failure(str(error))
        return False
    return True
