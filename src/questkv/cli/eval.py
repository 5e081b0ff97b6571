"""``questkv eval``: what a budget costs in quality, against the full cache and the methods people know."""

from __future__ import annotations

from typing import Annotated

import typer

from questkv.cli import options
from questkv.cli.document import read_document
from questkv.cli.eval_harness import harness
from questkv.cli.eval_longbench import longbench
from questkv.cli.eval_options import RunOptions, shared_options
from questkv.cli.eval_recall import recall
from questkv.cli.eval_run import evaluate
from questkv.cli.output import quiet_libraries

app = typer.Typer(name="eval", help="Measure what a budget costs in quality.", no_args_is_help=True)
_START = Annotated[int, typer.Option(metavar="TOKEN", min=0, help="First token of the text that is used.")]


_PROMPT = Annotated[
    str,
    typer.Option(metavar="plain|chat", help="One paragraph, as in the paper, or a turn of the model's chat template."),
]


@app.callback()
def eval_group() -> None:
    """Measure what a budget costs in quality, against the full cache and other methods.

    Every task prefills a prompt once, with the full cache, and lets each method decode behind it with each budget, the
    question token by token, the first two layers dense for all. Finished rows are written at once: a run that was
    stopped goes on with --resume.
    """


@app.command()
@shared_options()
def passkey(run: RunOptions, prompt: _PROMPT = "plain") -> None:
    """Find a number hidden in repeated filler, at evenly spaced places (the paper's table 1)."""
    quiet_libraries()
    from questkv.evaluate.figures import draw_scores
    from questkv.evaluate.passkey import Passkey

    task = Passkey(lengths=run.length_counts(), positions=run.samples, seed=run.seed, prompt=prompt)
    evaluate(task, run, draw_scores)


@app.command()
@shared_options(methods="full,quest", budgets="256,1024", lengths="2000,4000,6000")
def needle(document: options.Document, run: RunOptions, start: _START = 0) -> None:
    """Find a number hidden in a real text, at every depth (--samples) of every length; --plot draws a heat map."""
    text = read_document(document)
    quiet_libraries()
    from questkv.evaluate.figures import draw_needle
    from questkv.evaluate.needle import Needle
    from questkv.evaluate.text import Text

    task = Needle(
        text=Text(document, text), lengths=run.length_counts(), depths=run.samples, start=start, seed=run.seed
    )
    evaluate(task, run, draw_needle)


@app.command()
@shared_options(budgets="128,256,512,1024,2048", lengths="6000", samples=1)
def perplexity(
    document: options.Document,
    run: RunOptions,
    start: _START = 0,
    scored: Annotated[int, typer.Option(metavar="TOKENS", min=1, help="Tokens predicted behind each prompt.")] = 300,
) -> None:
    """Predict a text behind a long prompt, one token a step (the paper's figure 6)."""
    text = read_document(document)
    quiet_libraries()
    from questkv.evaluate.figures import draw_perplexity
    from questkv.evaluate.perplexity import Perplexity
    from questkv.evaluate.text import Text

    task = Perplexity(
        text=Text(document, text), lengths=run.length_counts(), scored=scored, windows=run.samples, start=start
    )
    evaluate(task, run, draw_perplexity)


app.command()(recall)
app.command()(longbench)
app.command()(harness)
