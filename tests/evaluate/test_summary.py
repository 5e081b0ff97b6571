"""Rows to tables, against tables made by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from questkv.evaluate import figures, report
from questkv.evaluate.figures import draw_needle, draw_perplexity, draw_scores, figure, running_perplexity
from questkv.evaluate.passkey import Passkey
from questkv.evaluate.perplexity import Perplexity
from questkv.evaluate.summary import budgets_needed, summarise
from questkv.evaluate.task import Row
from questkv.evaluate.text import Text

RUN: dict[str, Any] = {
    "model": {"name": "tiny", "dtype": "float32", "rope_factor": 4.0},
    "settings": {"lengths": (500, 900), "text": {"name": "novel.txt", "sha256": "0"}},
    "quest": {"page_size": 16},
    "environment": {
        "questkv": "1",
        "torch": "2",
        "transformers": "5",
        "backend": "native",
        "cpu": "a CPU",
        "threads": 2,
    },
}
PASSKEY, PERPLEXITY = Passkey(), Perplexity(text=Text("novel.txt", "."))


def row(method: str, budget: int | None, score: float, length: int = 500, **more: Any) -> Row:
    return {"method": method, "budget": budget, "score": score, "length": length, "sample": "0", **more}


def test_scores_are_averaged_by_length_method_and_budget() -> None:
    rows = [row("full", None, 1.0), row("quest", 64, 1.0), row("quest", 64, 0.0), row("quest", 64, 0.0, length=900)]
    got = [(cell.table, cell.method, cell.budget, cell.score, cell.samples) for cell in summarise(PASSKEY, rows)]
    assert got == [(500, "full", None, 1.0, 1), (500, "quest", 64, 0.5, 2), (900, "quest", 64, 0.0, 1)]


@pytest.mark.parametrize(
    ("scores", "needed"),
    [
        ({64: 0.5, 128: 1.0, 256: 1.0}, 128),
        ({64: 1.0, 128: 0.5, 256: 1.0}, 256),  # a lucky small budget isn't enough
        ({64: 1.0, 128: 1.0, 256: 0.5}, None),
        ({256: 1.0, 64: 0.5, 128: 1.0}, 128),
    ],
)
def test_a_budget_is_enough_if_no_larger_one_falls_short(scores: dict[int, float], needed: int | None) -> None:
    rows = [row("full", None, 1.0), *(row("quest", budget, score) for budget, score in scores.items())]
    (got,) = budgets_needed(PASSKEY, summarise(PASSKEY, rows))
    assert (got.method, got.budget, got.largest) == ("quest", needed, 256)


def test_a_perplexity_is_kept_within_one_percent() -> None:
    rows = [row("full", None, 0, nll=[2.0]), row("quest", 64, 0, nll=[2.0101]), row("quest", 128, 0, nll=[2.0099])]
    (got,) = budgets_needed(PERPLEXITY, summarise(PERPLEXITY, rows))
    assert got.budget == 128


def test_no_budget_is_named_where_the_full_cache_finds_nothing_or_was_not_run() -> None:
    assert budgets_needed(PASSKEY, summarise(PASSKEY, [row("full", None, 0.0), row("quest", 64, 0.0)])) == []
    assert budgets_needed(PASSKEY, summarise(PASSKEY, [row("quest", 64, 1.0)])) == []


def test_the_markdown_has_methods_down_and_budgets_across() -> None:
    lowered = {"lowered": {"sink_tokens": 16, "recent_tokens": 0}}
    rows = [
        row("full", None, 1.0),
        row("quest", 1024, 1.0),
        row("quest", 64, 0.0, **lowered),
        row("h2o", 64, 0.0),
        row("full", None, 1.0, length=900),
    ]
    page = report.markdown(PASSKEY, rows, RUN, "questkv eval passkey")
    assert page == (
        "# passkey\n\n`questkv eval passkey`\n\n"
        "## 500 tokens: keys found (1 sample)\n\n"
        "| method | 64 | 1024 | all |\n|---|--:|--:|--:|\n"
        "| full |  |  | 100% |\n| quest | 0%\u2020 | 100% |  |\n| h2o | 0% |  |  |\n\n"
        "\u2020 At 64, quest ran with sink_tokens=16 and recent_tokens=0: the budget has no room for more.\n\n"
        "Smallest budget with the full cache's score: quest 1024, h2o more than 64.\n\n"
        "## 900 tokens: keys found (1 sample)\n\n| method | all |\n|---|--:|\n| full | 100% |\n\n"
        "tiny in float32, rope factor 4; lengths=500 900, text=novel.txt. Quest: page_size=16. questkv 1, torch 2, "
        "transformers 5, backend native, a CPU, 2 threads.\n"
    )


def test_running_perplexity_counts_every_token_so_far() -> None:
    tokens, values = running_perplexity([[1.0, 3.0], [3.0, 5.0]])
    assert tokens == [1, 2]
    assert values == pytest.approx([7.389056098930650, 20.085536923187668])  # e^2, e^3


def test_a_rare_first_word_does_not_flatten_the_perplexity_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="the figures need matplotlib")
    drawn: list[Any] = []

    @contextmanager
    def keep_axes(path: str, panels: int, **more: Any) -> Iterator[list[Any]]:
        with figure(path, panels, **more) as axes:
            drawn.extend(axes)
            yield axes

    monkeypatch.setattr(figures, "figure", keep_axes)
    # the first word alone would reach e^9 = 8103; behind three words of thirty nothing is above e^(15 / 4) = 43
    row_of_words = row("full", None, 0.5, nll=[9.0, *[2.0] * 29])
    draw_perplexity(PERPLEXITY, [row_of_words], str(tmp_path / "figure.svg"))
    (curve,) = drawn[0].get_lines()
    assert list(curve.get_xdata()) == list(range(4, 31))
    assert curve.get_ydata()[0] == pytest.approx(42.52108200006278)  # e^3.75
    assert drawn[0].get_ylim()[1] < 50


@pytest.mark.parametrize("suffix", [".png", ".svg"])
@pytest.mark.parametrize("draw", [draw_scores, draw_perplexity, draw_needle])
def test_a_figure_is_the_same_picture_each_time(tmp_path: Any, draw: Any, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="the figures need matplotlib")
    more = [{"nll": [1.0, 2.0, 1.5], "depth": depth} for depth in (0.0, 1.0)]
    methods = (("full", None), ("quest", 64), ("quest", 128), ("snapkv", 64))
    rows = [row(m, b, 0.5, length, **extra) for m, b in methods for length in (500, 900) for extra in more]
    task = PERPLEXITY if draw is draw_perplexity else PASSKEY
    pictures = []
    for name in ("first", "second"):
        draw(task, rows, str(tmp_path / f"{name}{suffix}"))
        pictures.append((tmp_path / f"{name}{suffix}").read_bytes())
    assert pictures[0] == pictures[1]
    assert pictures[0].startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
