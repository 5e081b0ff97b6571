"""What is kept beside a result."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

import questkv
from questkv import environment
from questkv.kernels import dispatch, native


def test_versions_and_the_backend_that_auto_means() -> None:
    found = environment.environment("auto")
    assert found["questkv"] == questkv.__version__
    assert found["torch"] == torch.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["threads"] == torch.get_num_threads()
    assert found["backend"] == ("native" if native.is_built() else "reference")


def test_auto_is_what_it_is_on_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_has_triton", lambda: True)
    found = environment.environment("auto", torch.device("cuda"))
    assert (found["backend"], found["instruction_set"]) == ("triton", None)
    assert environment.environment("reference", torch.device("cuda"))["backend"] == "reference"
    assert environment.environment("auto", torch.device("cpu")) == environment.environment("auto")


def test_the_reference_has_no_instruction_set() -> None:
    found = environment.environment("reference")
    assert (found["backend"], found["instruction_set"]) == ("reference", None)


def test_the_processor_is_read_off_what_linux_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = "processor\t: 0\nmodel name\t: A CPU: fast\nflags\t\t: sse2 avx2 fma\n\nprocessor\t: 1\nflags\t: other\n"
    (tmp_path / "cpuinfo").write_text(listed, encoding="utf-8")
    monkeypatch.setattr(environment, "_CPUINFO", tmp_path / "cpuinfo")
    assert environment.cpu_name() == "A CPU: fast"
    assert environment.cpu_flags() == {"sse2", "avx2", "fma"}
    (tmp_path / "cpuinfo").write_text("Features\t: asimd sve\n", encoding="utf-8")
    assert environment.cpu_flags() == {"asimd", "sve"}


def test_a_system_without_that_list_still_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_CPUINFO", tmp_path / "missing")
    assert environment.cpu_name()
    assert environment.cpu_flags() == set()


def test_cores_are_those_that_this_process_may_use() -> None:
    cores = environment.usable_cores()
    assert cores is not None
    assert 1 <= cores <= (os.cpu_count() or cores)
