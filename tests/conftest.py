"""Fixtures shared by all tests: the real model, and hypothesis without time limits."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from interpreter import ask_for_interpreter
from questkv.models import LoadedModel, load_model

ask_for_interpreter()

# No test depends on a time: shared machines are slow at random.
settings.register_profile(
    "questkv", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("questkv")

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would the commands that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def smollm2() -> Iterator[LoadedModel]:
    """The embedded SmolLM2-135M-Instruct in float32; tests set the attention they need and put it back."""
    return load_model("smollm2-135m", dtype="float32")
