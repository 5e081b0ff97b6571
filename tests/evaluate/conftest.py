"""The command line's tiny model, loaded for tasks."""

from __future__ import annotations

import pytest

from cli.conftest import save_tiny_model
from questkv import hf  # noqa: F401  registers the attention function
from questkv.models import LoadedModel, load_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A three-layer Llama with random weights in float32, one token a byte."""
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    return load_model(str(folder), dtype="float32", attention="questkv")
