"""A model so small that a command takes a moment: random weights, one token a byte."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from questkv.cli.app import app

TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
CONTEXT = 1024


def save_tiny_model(folder: Path, *, context: int = CONTEXT, template: str | None = TEMPLATE) -> Path:
    """Save a two-layer Llama and a byte tokenizer that ends no answer early."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=0,
        eos_token_id=1,
        dtype="float32",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.generation_config.suppress_tokens = [0, 1]
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of the tiny model, whose context is `CONTEXT` tokens."""
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session")
def roomy_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model with a context that a test can spend long in."""
    return str(save_tiny_model(tmp_path_factory.mktemp("roomy"), context=1_000_000))


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model without a chat template."""
    return str(save_tiny_model(tmp_path_factory.mktemp("base"), template=None))


@pytest.fixture
def document(tmp_path: Path) -> Path:
    """A text of 600 tokens for the tiny model."""
    path = tmp_path / "document.txt"
    path.write_text(("The lamp stood in the window all night. " * 20)[:600].strip(), encoding="utf-8")
    return path


@pytest.fixture
def run() -> Callable[..., Result]:
    """Run ``questkv`` in this process, with standard output and standard error kept apart."""
    runner = CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1"})

    def invoke(*arguments: str, stdin: str | bytes | None = None) -> Result:
        return runner.invoke(app, list(arguments), input=stdin)

    return invoke


@pytest.fixture
def stand_in_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that stands in for vLLM in the process that a benchmark starts."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found("json") if name == "vllm" else found(name))
    paths = (Path(__file__).parents[1] / "stand_in", Path(__file__).parents[2] / "src")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))


@pytest.fixture
def child_environment() -> dict[str, str]:
    """Environment for ``python -m questkv`` in another process."""
    source = str(Path(__file__).parents[2] / "src")
    return {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
