"""vLLM in a process of its own: what it is asked, and that decoding and reading with it say what transformers says.

vLLM itself is optional and large. Where it isn't installed, `stand_in/vllm.py` takes its place in the other process.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf.tiny_models import VOCABULARY, build, tokens
from questkv.benchmark.decode import check_direction
from questkv.benchmark.vllm_engine import Vllm
from questkv.errors import ModelError

ROOM = 260
STAND_IN, SOURCE = Path(__file__).parents[1] / "stand_in", Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama", "sdpa", head_dim=32).requires_grad_(False)


@pytest.fixture(scope="module")
def path() -> str:
    """PYTHONPATH of the other process."""
    if importlib.util.find_spec("vllm") is not None:
        return str(SOURCE)
    return f"{STAND_IN}{os.pathsep}{SOURCE}"


@pytest.fixture(scope="module")
def engine(model: Any, path: str) -> Iterator[Vllm]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        made = Vllm(model, tokens=ROOM, threads=1)
    yield made
    made.close()


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """The model's own next tokens, each from all before it."""
    made: list[int] = []
    for _ in range(count):
        made.append(int(model(torch.tensor([ids + made]), use_cache=False).logits[0, -1].argmax()))
    return made


@pytest.mark.slow
def test_steps_are_checked_then_decoded_behind_the_context(engine: Vllm, model: Any) -> None:
    ids = tokens(1, 200, seed=3)[0].tolist()
    for context in (120, 190):  # the second one's first tokens are in the prefix cache
        engine.fill(ids[:context])
        engine.prepare()
        expected = model(torch.tensor([ids[: context + 1]])).logits[0, -1]
        check_direction("vllm", engine.step(ids[context]), expected)
        steps = [engine.step(token) for token in ids[context + 1 : context + 6]]
        assert all(list(step.shape) == [VOCABULARY] for step in steps)
        assert [int(step.argmax()) for step in steps] == greedy(model, ids[: context + 2], 5)


@pytest.mark.slow
def test_a_prompt_is_read_anew_and_all_logits_are_given_once(engine: Vllm, model: Any) -> None:
    ids = tokens(1, 230, seed=4)[0].tolist()
    expected = model(torch.tensor([ids])).logits[0, -1]
    check_direction("vllm", engine.read(ids), expected)
    assert engine.read(ids).nonzero().tolist() == [[int(expected.argmax())]]
    # as many as fit, with the token that is chosen
    longest = tokens(1, ROOM - 1, seed=5)[0].tolist()
    check_direction("vllm", engine.read(longest), model(torch.tensor([longest])).logits[0, -1])


@pytest.mark.slow
def test_a_process_that_is_killed_is_an_error_and_can_be_closed(
    model: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", path)
    engine = Vllm(model, tokens=ROOM, threads=1)
    engine._process.kill()
    engine._process.wait()
    with pytest.raises(ModelError, match=r"\[bench\] vllm: expected an answer, its process ended"):
        engine.fill([1] * 50_000)  # more than a pipe holds
    engine.close()


@pytest.mark.slow
def test_a_process_that_ends_says_why_and_leaves_nothing(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").write_text("raise ValueError('this processor is too old')\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{SOURCE}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(ModelError, match=r"\[bench\] vllm: .* ended: ValueError: this processor is too old"):
        Vllm(model, tokens=ROOM, threads=1)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("questkv-vllm-")] == []
