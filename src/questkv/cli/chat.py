"""``questkv chat``: one question after another about one document, on one cache."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from questkv.cli import options, output, streams, text
from questkv.cli.document import STDIN, read_document
from questkv.cli.failures import one_line_failures
from questkv.cli.opening import Opening
from questkv.cli.targets import check_targets
from questkv.errors import DocumentError

if TYPE_CHECKING:
    from questkv.cli.session import Session

_ROOM_FOR_QUESTION = 64


def chat(
    document: options.Document,
    model: options.Model = options.MODEL,
    rope_factor: options.RopeFactor = 1.0,
    tail: options.Tail = False,
    max_new_tokens: options.MaxNewTokens = 256,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    budget: options.Budget = None,
    page_size: options.PageSize = options.PAGE_SIZE,
    kv_dtype: options.KvDtype = options.KV_DTYPE,
    span_pages: options.SpanPages = options.SPAN_PAGES,
    offload: options.Offload = options.OFFLOAD,
    dense: options.Dense = False,
    dtype: options.Dtype = "auto",
    weights: options.Weights = "model",
    threads: options.Threads = None,
    compile: options.Compile = False,
    trust_remote_code: options.TrustRemoteCode = False,
    json_target: Annotated[
        str | None,
        typer.Option(
            "--json",
            metavar="FILE|-",
            help="Write each answer and its numbers as one line of JSON; with - nothing else is written to standard "
            "output.",
        ),
    ] = None,
) -> None:
    """Ask one question after another about a document that is read once.

    Questions come a line each, from the terminal or a pipe, and each sees what was said before. Ctrl-C ends the answer
    that is being given and keeps the conversation; a second one, or one between answers, ends the command. So does the
    end of the input (Ctrl-D).
    """
    with one_line_failures():
        config = options.quest_config(budget, page_size, dense, kv_dtype, span_pages, offload)
        if document == STDIN:
            raise typer.BadParameter("the questions come from standard input, so the document must be a file")
        if sys.stdin is None:
            raise typer.BadParameter("the questions come from standard input, and it is closed")
        check_targets({"--json": json_target}, model=model, inputs={"the document": document})
        content = read_document(document)
        opening = Opening(
            model, config, dtype, weights, rope_factor, threads, seed, tail, max_new_tokens, compile, trust_remote_code
        )
        session = opening.load()
        # room for a question, so that the first one doesn't find the context full
        opening.read(session, document, content, len(session.prompter.question("?")) + _ROOM_FOR_QUESTION)
        _converse(session, max_new_tokens, temperature, json_target)


def _converse(session: Session, max_new_tokens: int, temperature: float, json_target: str | None) -> None:
    """Answer questions until there are no more."""
    only_json = json_target == output.STDOUT
    lines = None if json_target is None else output.JsonLines(json_target)
    first = True
    while (question := _next_question()) is not None:
        if not question:
            continue
        asked = session.prompter.question(question, first=first)
        room = session.room()
        if room is not None and len(asked) + max_new_tokens > room:
            raise DocumentError(
                f"the conversation is full: the question and its answer need {len(asked) + max_new_tokens:,} tokens "
                f"and {max(room, 0):,} of the model's context are left; start again, with --tail or --rope-factor"
            )
        with _OneAnswer() as stop:
            answer = session.answer(
                asked,
                prefix=[],
                on_text=(lambda piece: None) if only_json else output.stream_text,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                stop=stop.asked,
            )
        first = False
        if not only_json:
            streams.write("\n")
        output.note(("stopped; " if stop.asked() else "") + answer.summary())
        if lines is not None:
            lines.add({"question": question, **answer.as_json(session.config)})


def _next_question() -> str | None:
    """The next line of the input, without its blanks; None at the end.

    At a terminal a line that isn't text is asked for again; in a pipe it ends the command, since whoever wrote the
    lines counts on an answer to each.

    Raises:
        DocumentError: A line of a pipe isn't valid in the input's encoding.
    """
    at_terminal = sys.stdin.isatty()
    while True:
        try:
            line = _prompted_line() if at_terminal else sys.stdin.buffer.readline().decode(_input_encoding())
            text.check_valid(line)
        except EOFError:
            streams.say("")
            return None
        except UnicodeError as error:
            message = f"the question {text.what_is_invalid(error, _input_encoding())}"
            if not at_terminal:
                raise DocumentError(message) from None
            output.note(f"{message}; it was not asked")
            continue
        return line.strip() if line else None


def _prompted_line() -> str:
    """A line that a person types behind ``> ``, which never goes into a file that standard output is sent to."""
    if sys.stdout.isatty():
        return input("\n> ") + "\n"
    if sys.stderr.isatty():
        print("\n> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


def _input_encoding() -> str:
    return sys.stdin.encoding or "utf-8"


class _OneAnswer:
    """While an answer is given, the first Ctrl-C asks it to stop; a second is an ordinary Ctrl-C again.

    The answer stops between two tokens, so the cache holds whole tokens in all layers and the conversation goes on.
    """

    def __init__(self) -> None:
        self._asked = False

    def asked(self) -> bool:
        """Whether Ctrl-C was pressed."""
        return self._asked

    def __enter__(self) -> _OneAnswer:
        self._before = signal.getsignal(signal.SIGINT)
        self._taken = callable(self._before)
        if self._taken:
            signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(self, *details: object) -> None:
        if self._taken:
            signal.signal(signal.SIGINT, self._before)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
