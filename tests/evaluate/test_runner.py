"""The runner: one prefill for all, and only for what isn't done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from questkv import QuestConfig
from questkv.errors import ConfigError, ResultsError
from questkv.evaluate import runner
from questkv.evaluate.passkey import Passkey
from questkv.evaluate.plan import Plan
from questkv.evaluate.recall import Recall, describe_recall
from questkv.evaluate.results import Results
from questkv.evaluate.text import Text
from questkv.kernels import dispatch
from questkv.models import LoadedModel
from questkv.policies import Quest

TASK = Passkey(lengths=(100, 300), positions=2)
QUEST = QuestConfig(token_budget=1.0)


def plan(*methods: str, budgets: tuple[int, ...] = (64, 128)) -> Plan:
    return Plan(methods=methods, budgets=budgets, quest=QUEST)


class Counted:
    """Counts prefills, and stops the run at a row that it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prefills: list[tuple[int, bool]] = []
        real = runner.prefill_context

        def prefill(model: Any, ids: Any, *arguments: Any, observe: bool, **more: Any) -> Any:
            self.prefills.append((ids.shape[1], observe))
            return real(model, ids, *arguments, observe=observe, **more)

        monkeypatch.setattr(runner, "prefill_context", prefill)


def run(loaded: LoadedModel, folder: Path, chosen: Plan, on_progress: Callable[[float, str], None]) -> list[Any]:
    samples = runner.list_samples(TASK, loaded)
    described = runner.describe(TASK, chosen, loaded, {"name": "tiny", "rope_factor": 1.0})
    with Results.open(folder, described, resume=True) as results:
        runner.run(TASK, loaded, chosen, samples, results, on_progress)
        return results.rows


def ignore(share: float, what: str) -> None:
    pass


def test_what_is_saved_names_the_backend_that_the_models_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_has_triton", lambda: True)
    loaded: Any = SimpleNamespace(model=SimpleNamespace(dtype=torch.float32, device=torch.device("cuda", 0)))
    saved = [
        runner.describe(TASK, plan("quest"), loaded, {"name": "tiny"}),
        describe_recall(
            Recall(text=Text("lamp.txt", "A lamp."), lengths=(8,), budgets=(128,)), loaded, {"name": "tiny"}
        ),
    ]
    assert [described["environment"]["backend"] for described in saved] == ["triton", "triton"]


@pytest.mark.slow
def test_every_method_and_budget_runs_behind_one_prefill(
    tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(monkeypatch)
    rows = run(tiny, tmp_path, plan("full", "quest", "streaming_llm"), ignore)
    lengths = [len(sample.ids) for sample in TASK.samples(tiny)]
    assert counted.prefills == [(length, False) for length in lengths]
    runs = [("full", None), ("quest", 64), ("quest", 128), ("streaming_llm", 64), ("streaming_llm", 128)]
    assert [(row["method"], row["budget"]) for row in rows] == runs * 4
    assert [row["prompt_tokens"] for row in rows] == [length for length in lengths for _ in runs]
    assert rows[1]["lowered"] == {"sink_tokens": 16, "recent_tokens": 0}
    assert rows[1]["policy"]["config"]["token_budget"] == 64
    assert "lowered" not in rows[2]


@pytest.mark.slow
def test_a_resumed_run_does_only_what_is_missing(
    tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tiny, tmp_path / "whole", plan("full", "h2o"), ignore)

    def stop(share: float, what: str) -> None:
        if "passkey 3/4: h2o 64" in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tiny, tmp_path / "cut", plan("full", "h2o"), stop)
    counted = Counted(monkeypatch)
    rows = run(tiny, tmp_path / "cut", plan("full", "h2o"), ignore)
    lengths = [len(sample.ids) for sample in TASK.samples(tiny)]
    assert counted.prefills == [(length, True) for length in lengths[2:]]
    assert [{**row, "seconds": 0} for row in rows] == [{**row, "seconds": 0} for row in whole]
    run(tiny, tmp_path / "cut", plan("full", "h2o"), ignore)
    assert len(counted.prefills) == 2


def test_progress_rises_from_zero_to_one(tiny: LoadedModel, tmp_path: Path) -> None:
    shares: list[float] = []
    run(tiny, tmp_path, plan("full", "quest"), lambda share, what: shares.append(share))
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("methods", "budgets", "message"),
    [
        (("quset",), (64,), "expected some of full, quest, .*, got 'quset'"),
        ((), (64,), "methods: expected some of full, quest"),
        (("full", "full"), (64,), "expected each once, got full, full"),
        (("quest",), (64, 64), "expected each once, got 64, 64"),
        (("quest",), (), "budgets: expected at least one, got none"),
        (("quest",), (8,), "token_budget: expected at least 16 tokens"),
        (("full", "streaming_llm"), (4,), r"\[streaming_llm\] budget: expected at least 5 tokens \(an int\), got 4"),
    ],
)
def test_an_impossible_plan_is_refused_at_once(
    methods: tuple[str, ...], budgets: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(*methods, budgets=budgets)


def test_a_small_budget_gives_up_recent_pages_before_the_sink() -> None:
    forced = {}
    for entry in plan("quest", budgets=(16, 32, 64, 96, 128)).entries():
        assert isinstance(entry.policy, Quest)
        assert entry.policy.config.smallest_budget <= entry.budget
        forced[entry.budget] = entry.lowered
    none = {"sink_tokens": 0, "recent_tokens": 0}
    assert forced == {16: none, 32: none, 64: {"sink_tokens": 16, "recent_tokens": 0}, 96: {}, 128: {}}


def test_a_prompt_longer_than_the_models_context_is_refused_before_anything_runs(tiny: LoadedModel) -> None:
    with pytest.raises(ConfigError, match=r"context of 1,024 tokens, got 1,\d+ with .*--rope-factor 2"):
        runner.list_samples(Passkey(lengths=(1000,)), tiny)


def test_a_score_that_is_no_number_is_refused(
    tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Passkey, "score", lambda *arguments: {"score": float("nan")})
    with pytest.raises(ResultsError, match=r"expected a finite number, got nan \(full, budget None, sample 100-0\)"):
        run(tiny, tmp_path, plan("full"), ignore)
