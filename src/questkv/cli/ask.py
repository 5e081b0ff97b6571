"""``questkv ask``: one question about one document."""

from __future__ import annotations

from typing import Annotated

import typer

from questkv.cli import options, output, streams, text
from questkv.cli.document import read_document
from questkv.cli.failures import one_line_failures
from questkv.cli.opening import Opening
from questkv.cli.targets import check_targets


def ask(
    document: options.Document,
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="What to ask about it.")],
    answer_prefix: Annotated[
        str, typer.Option(metavar="TEXT", help="Words the answer is made to begin with; small models need it.")
    ] = "",
    model: options.Model = options.MODEL,
    rope_factor: options.RopeFactor = 1.0,
    tail: options.Tail = False,
    max_new_tokens: options.MaxNewTokens = 128,
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
            help="Write the answer and its numbers as JSON; with - nothing else is written to standard output.",
        ),
    ] = None,
) -> None:
    """Answer a question from a long document, reading only the pages of the cache that each token needs.

    The answer comes on standard output; progress and one line of numbers on standard error: tokens in context, tokens
    generated, milliseconds per token (the mean time from one generated token to the next, without the prompt), and
    pages read of pages held (summed over the decode steps, layers and KV heads, dense layers included).
    """
    with one_line_failures():
        config = options.quest_config(budget, page_size, dense, kv_dtype, span_pages, offload)
        check_targets({"--json": json_target}, model=model, inputs={"the document": document})
        text.check_argument("QUESTION", question)
        text.check_argument("--answer-prefix", answer_prefix)
        if not question.strip():
            raise typer.BadParameter("the question is empty")
        content = read_document(document)
        opening = Opening(
            model, config, dtype, weights, rope_factor, threads, seed, tail, max_new_tokens, compile, trust_remote_code
        )
        session = opening.load()
        asked = session.prompter.question(question, answer_prefix)
        opening.read(session, document, content, len(asked))
        only_json = json_target == output.STDOUT
        answer = session.answer(
            asked,
            prefix=session.prompter.prefix(answer_prefix),
            on_text=(lambda piece: None) if only_json else output.stream_text,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
        )
        if not only_json:
            streams.write("\n")
        output.note(answer.summary())
        if json_target is not None:
            output.write_json(json_target, answer.as_json(config))
