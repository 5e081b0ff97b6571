"""`harness`: a model for lm-evaluation-harness that prefills and decodes under a method, on local tasks."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from questkv import QuestCache, QuestConfig
from questkv.errors import ConfigError, MissingPackageError, UnsupportedError
from questkv.evaluate import harness
from questkv.evaluate.harness import Decoding, HarnessTasks, as_scored, model_class, run_harness
from questkv.evaluate.plan import Plan
from questkv.evaluate.results import Results
from questkv.models import LoadedModel
from questkv.policies import make_policy

needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm-evaluation-harness: pip install 'questkv[eval]'"
)
PROMPT = "The lamp stood in the window all night; nobody came. " * 6
# float32 logits of a few hundred tokens, attended page by page or at once.
TOLERANCE = 1e-4


class Request(NamedTuple):
    """What lm-evaluation-harness hands over."""

    args: tuple[Any, ...]


def decoding(loaded: LoadedModel, method: str = "full", budget: int | None = None, decoded: int = 7) -> Decoding:
    return Decoding(loaded, make_policy(method, budget), decoded)


def dense_logits(loaded: LoadedModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        cache = QuestCache(loaded.model.config, QuestConfig(token_budget=1.0))
        return loaded.model(torch.tensor([ids]), cache=cache, use_cache=True).logits[0].double()


def ids_of(loaded: LoadedModel, text: str) -> list[int]:
    return list(loaded.tokenizer(text)["input_ids"])


@pytest.mark.parametrize("prompt", ["T", "Th", "The la", PROMPT])
@pytest.mark.parametrize("rest", ["x", "no one came"])
def test_full_loglikelihood_is_that_of_one_dense_forward(tiny: LoadedModel, prompt: str, rest: str) -> None:
    before, after = ids_of(tiny, prompt), ids_of(tiny, rest)
    scores = dense_logits(tiny, before + after)[len(before) - 1 : -1].log_softmax(dim=-1)
    expected = sum(float(scores[i, token]) for i, token in enumerate(after))
    total, likeliest = decoding(tiny).loglikelihood(before, after)
    assert total == pytest.approx(expected, abs=TOLERANCE)
    assert likeliest == (scores.argmax(dim=-1).tolist() == after)


def test_the_likeliest_continuation_is_known_as_such(tiny: LoadedModel) -> None:
    before = ids_of(tiny, PROMPT)
    token = int(dense_logits(tiny, before)[-1].argmax())
    assert decoding(tiny).loglikelihood(before, [token])[1]
    assert not decoding(tiny).loglikelihood(before, [(token + 1) % 200])[1]


def test_a_small_budget_reads_less_and_says_something_else(tiny: LoadedModel) -> None:
    before, after = ids_of(tiny, PROMPT), ids_of(tiny, "no one came")
    full = decoding(tiny).loglikelihood(before, after)[0]
    sparse = decoding(tiny, "streaming_llm", 16).loglikelihood(before, after)[0]
    whole = decoding(tiny, "quest", 1024).loglikelihood(before, after)[0]
    assert whole == pytest.approx(full, abs=TOLERANCE)
    assert abs(sparse - full) > 100 * TOLERANCE


def test_generation_is_greedy_and_ends_before_the_stop(tiny: LoadedModel) -> None:
    ids = ids_of(tiny, PROMPT)
    text: list[int] = []
    for _ in range(12):
        text.append(int(dense_logits(tiny, ids + text)[-1].argmax()))
    expected = tiny.tokenizer.decode(text, skip_special_tokens=True)
    made = decoding(tiny)
    assert made.generate(ids, 12, []) == expected
    # random weights say bytes that aren't text, so the stop is taken from the decoded text
    stop = expected[4:6]
    assert made.generate(ids, 12, [stop, "never said"]) == expected[: expected.index(stop)]


def test_the_choices_of_one_question_share_a_prefill(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    made, prefilled = decoding(tiny), []
    real = harness.prefill_context
    monkeypatch.setattr(
        harness,
        "prefill_context",
        lambda model, ids, *a, **k: prefilled.append(ids.shape[1]) or real(model, ids, *a, **k),
    )
    before = ids_of(tiny, PROMPT)
    for choice in ("yes", "no", "perhaps"):
        made.loglikelihood(before, ids_of(tiny, choice))
    assert prefilled == [len(before) - 7]


def test_a_prompt_that_is_too_long_loses_its_beginning_and_is_counted(tiny: LoadedModel) -> None:
    made = decoding(tiny)
    ids = ids_of(tiny, "abcdefghij" * 150)
    after = ids_of(tiny, "no")
    assert made.loglikelihood(ids, after)[0] == pytest.approx(made.loglikelihood(ids[-1023:], after)[0], abs=TOLERANCE)
    assert (made.max_length, made.truncated) == (1024, 1)


def test_at_least_one_token_of_a_prompt_is_decoded(tiny: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="decoded: expected at least 1 token, got 0"):
        decoding(tiny, decoded=0)


def test_without_lm_eval_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    model_class.cache_clear()
    with pytest.raises(MissingPackageError, match=r"pip install 'questkv\[eval\]'"):
        model_class()


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two local tasks: a choice and a free answer."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    records = [{"text": f"{PROMPT} Was it {n}?", "choices": ["yes", "no"], "gold": n % 2} for n in range(3)]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    file = tmp_path / "records.jsonl"
    source = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {file}\ntest_split: test\n"
    (tmp_path / "choice.yaml").write_text(
        f"task: lamp_choice\n{source}output_type: multiple_choice\ndoc_to_text: '{{{{text}}}}'\n"
        "doc_to_choice: choices\ndoc_to_target: gold\nmetric_list:\n  - metric: acc\n",
        encoding="utf-8",
    )
    (tmp_path / "free.yaml").write_text(
        f"task: lamp_free\n{source}output_type: generate_until\ndoc_to_text: '{{{{text}}}}'\ndoc_to_target: 'yes'\n"
        "generation_kwargs:\n  until: ['.']\n  max_gen_toks: 4\n  do_sample: false\nmetric_list:\n"
        "  - metric: exact_match\n",
        encoding="utf-8",
    )
    return tmp_path


@pytest.mark.slow
@needs_lm_eval
def test_local_tasks_run_under_every_method_and_budget(tiny: LoadedModel, tasks: Path, tmp_path: Path) -> None:
    made = HarnessTasks(("lamp_choice", "lamp_free"), str(tasks), None, 7)
    made.check_known()
    plan = Plan(methods=("full", "quest"), budgets=(128,), quest=QuestConfig(token_budget=1.0))
    with Results.open(tmp_path / "out", {}, resume=False) as results:
        run_harness(made, tiny, plan, results, lambda share, what: None)
        rows = results.rows
        run_harness(made, tiny, plan, results, lambda share, what: pytest.fail("ran again"))
    assert [(row["sample"], row["method"], row["budget"]) for row in rows] == [
        (task, *run) for task in ("lamp_choice", "lamp_free") for run in (("full", None), ("quest", 128))
    ]
    full = decoding(tiny)
    right = 0
    for n in range(3):
        before = ids_of(tiny, f"{PROMPT} Was it {n}?")
        scores = [full.loglikelihood(before, ids_of(tiny, f" {choice}"))[0] for choice in ("yes", "no")]
        right += scores.index(max(scores)) == n % 2
    assert rows[0]["score"] == pytest.approx(right / 3)
    assert (rows[0]["metric"], rows[2]["metric"], rows[0]["dataset"]) == ("acc", "exact_match", "lamp_choice")


def test_tasks_know_whether_their_scores_are_better_higher() -> None:
    made = HarnessTasks(("a", "b"))
    high, low = {"sample": "a", "higher_is_better": True}, {"sample": "b", "higher_is_better": False}
    assert as_scored(made, [high, high]).higher_is_better
    lower = as_scored(made, [low])
    assert not lower.higher_is_better
    assert lower.settings() == made.settings()
    with pytest.raises(ConfigError, match="got both; run b apart"):
        as_scored(made, [high, low])


@needs_lm_eval
def test_rolling_loglikelihood_predicts_each_token_once(tiny: LoadedModel) -> None:
    made = model_class()(decoding(tiny))
    text = "The lamp stood."
    ids = [made.prefix_token_id, *ids_of(tiny, text)]
    scores = dense_logits(tiny, ids)[:-1].log_softmax(dim=-1)
    expected = sum(float(scores[i, token]) for i, token in enumerate(ids[1:]))
    assert made.loglikelihood_rolling([Request((text,))]) == [pytest.approx(expected, abs=TOLERANCE)]


@needs_lm_eval
def test_the_model_is_registered_and_refuses_to_sample(tiny: LoadedModel) -> None:
    from lm_eval.api.registry import get_model

    made = model_class()(decoding(tiny))
    assert get_model("questkv") is model_class()
    with pytest.raises(UnsupportedError, match="expected greedy generation, got sampling"):
        made.generate_until([Request(("a", {"do_sample": True, "until": ["."]}))])


@needs_lm_eval
def test_a_chat_is_put_in_the_models_form(tiny: LoadedModel) -> None:
    text = model_class()(decoding(tiny)).apply_chat_template([{"role": "user", "content": "Hello"}])
    assert text == "<s>user\nHello</s>\n<s>assistant\n"
