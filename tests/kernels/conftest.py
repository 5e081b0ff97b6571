"""One thread, and which backend `auto` stands for: tests that ask for `every_backend` run once on each of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from interpreter import has_triton, patch_once
from questkv.kernels import dispatch, native

# Examples of a property where Triton is interpreted: a call takes as long there as a thousand of the reference.
_FEW_EXAMPLES = 2


def _backends() -> list[str]:
    """The reference, the compiled kernels for every instruction set that this machine has, best first, and Triton."""
    compiled = [f"native-{isa}" for isa in (native.instruction_sets() if native.is_built() else ())]
    return ["reference", *compiled, *(["triton"] if has_triton() else [])]


def _use(backend: str, patch: pytest.MonkeyPatch) -> None:
    """Make `auto` stand for one backend, the compiled one with one instruction set."""
    name, _, isa = backend.partition("-")
    if name == "triton":
        patch_once()
    patch.setattr(dispatch, "automatic", lambda device: name)
    patch.setenv("QUESTKV_ISA", isa)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The shapes are tiny, and machines that run tests are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=_backends())
def every_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Its name; `auto` is this backend while the test runs."""
    with pytest.MonkeyPatch.context() as patch:
        _use(request.param, patch)
        yield request.param


@pytest.fixture(scope="module", params=[name for name in _backends() if name != "triton"])
def every_fast_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """`every_backend` without Triton, for what would take minutes interpreted, and what it has not (`linear`)."""
    with pytest.MonkeyPatch.context() as patch:
        _use(request.param, patch)
        yield request.param


@pytest.fixture
def triton_backend() -> Iterator[None]:
    """`auto` is Triton's kernels, interpreted where there is no GPU."""
    if not has_triton():
        pytest.skip("triton isn't installed")
    with pytest.MonkeyPatch.context() as patch:
        _use("triton", patch)
        yield


@pytest.fixture(autouse=True)
def _few_interpreted_examples(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis has no way to give one parameter of a test fewer examples than another."""
    kept = "_hypothesis_internal_use_settings"
    if hasattr(request.function, kept) and "[triton" in request.node.name:
        few = settings(getattr(request.function, kept), max_examples=_FEW_EXAMPLES)
        monkeypatch.setattr(request.function, kept, few)


@pytest.fixture(scope="module", params=[name for name in _backends() if name.startswith("native")])
def every_native(request: pytest.FixtureRequest) -> Iterator[str]:
    """The same without the reference."""
    with pytest.MonkeyPatch.context() as patch:
        _use(request.param, patch)
        yield request.param


@pytest.fixture(scope="module")
def reference_backend() -> Iterator[None]:
    """`auto` is the reference."""
    with pytest.MonkeyPatch.context() as patch:
        _use("reference", patch)
        yield
