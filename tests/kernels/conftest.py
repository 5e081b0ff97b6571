"""One thread, and which backend `auto` stands for: tests that ask for `every_backend` run once on each of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from questkv.kernels import dispatch, native


def _backends() -> list[str]:
    """The reference, and the compiled kernels for every instruction set that this machine has, best first."""
    return ["reference", *(f"native-{isa}" for isa in (native.instruction_sets() if native.is_built() else ()))]


def _use(backend: str, patch: pytest.MonkeyPatch) -> None:
    """Make `auto` stand for one backend, the compiled one with one instruction set."""
    name, _, isa = backend.partition("-")
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


@pytest.fixture(scope="module", params=_backends()[1:])
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
