"""The compiled module: found or missing, refused or obeyed, and safe beside Python's memory and threads."""

from __future__ import annotations

import ast
import gc
import importlib.util
import inspect
import math
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from kernels.calls import decode, dense
from kernels.cases import Case, Shape, build_case, case_arguments
from questkv.errors import ConfigError, MissingPackageError
from questkv.kernels import Pages, PageSegment, available_backends, linear, native, seal
from questkv.kernels.native import module, operators

pytestmark = pytest.mark.skipif(not native.is_built(), reason="the compiled module isn't built")


@pytest.fixture
def not_built(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installation without the compiled module."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.endswith("._native") else find(name))
    module.load.cache_clear()
    yield
    module.load.cache_clear()


def test_without_the_module_asking_for_native_says_how_to_install_it(not_built):
    case = build_case(0, Shape(), [7])
    with pytest.raises(MissingPackageError, match=r"^\[native\] backend: expected .*, got .*: pip install "):
        dense(*case.args, scale=1.0, backend="native")


def test_without_the_module_auto_is_the_reference(not_built):
    assert "native" not in available_backends()
    case = build_case(0, Shape(), [7])
    assert torch.equal(dense(*case.args, scale=1.0), dense(*case.args, scale=1.0, backend="reference"))


def test_with_the_module_auto_is_native(monkeypatch):
    assert available_backends()[0] == "native"
    case = build_case(0, Shape(), [7])
    called = []
    monkeypatch.setattr(native, "dense", lambda q, *rest: called.append(q) or q)
    dense(*case.args, scale=1.0)
    assert len(called) == 1


@pytest.mark.parametrize("name", ["sse9", "AVX2", "plain "])
def test_an_unknown_instruction_set_is_refused_with_the_names_there_are(name, monkeypatch):
    monkeypatch.setenv("QUESTKV_ISA", name)
    case = build_case(0, Shape(), [7])
    with pytest.raises(ValueError, match=r"^\[native\] QUESTKV_ISA: expected one of .*plain, got ") as caught:
        dense(*case.args, scale=1.0, backend="native")
    assert str(caught.value).endswith(f"got {name!r}")
    with pytest.raises(ValueError, match=r"^\[native\] QUESTKV_ISA: expected one of .*plain, got "):
        module.load().seal(name, operators._layer(case.pages), torch.tensor([0]), None, 1)


def test_an_unknown_instruction_set_is_said_when_the_module_is_loaded(monkeypatch):
    monkeypatch.setenv("QUESTKV_ISA", "sse9")
    module.load.cache_clear()
    with pytest.raises(ConfigError, match=r"^\[native\] QUESTKV_ISA: expected one of .*plain, got 'sse9'$"):
        module.load()
    monkeypatch.setenv("QUESTKV_ISA", "plain")
    assert module.load() is module.load()


@pytest.mark.parametrize("whose", ["libgomp", "own", "auto"])
def test_whose_threads_they_are_changes_no_bit(whose, monkeypatch):
    case, few = build_case(0, Shape(page_size=3), [140, 331]), torch.tensor([5, 40])
    x, weight = torch.randn(2, 96), torch.randn(600, 96)
    expected = decode(*case.args, few, scale=1.0, backend="native"), linear(x, weight, backend="native")
    monkeypatch.setenv("QUESTKV_THREADS", whose)
    module.load.cache_clear()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(50):
            assert torch.equal(decode(*case.args, few, scale=1.0, backend="native"), expected[0])
            for _ in range(3):
                assert torch.equal(linear(x, weight, backend="native"), expected[1])
    finally:
        torch.set_num_threads(threads)
        module.load().use_threads("auto")


def test_an_unknown_choice_of_threads_is_refused_with_the_choices(monkeypatch):
    monkeypatch.setenv("QUESTKV_THREADS", "mine")
    module.load.cache_clear()
    with pytest.raises(
        ConfigError, match=r"^\[native\] QUESTKV_THREADS: expected one of auto, libgomp, own, got 'mine'$"
    ):
        module.load()


def test_every_instruction_set_can_be_forced(monkeypatch):
    assert native.instruction_sets()[-1] == "plain"
    for name in native.instruction_sets():
        monkeypatch.setenv("QUESTKV_ISA", name)
        assert native.instruction_set() == name
    monkeypatch.setenv("QUESTKV_ISA", "")
    assert native.instruction_set() == native.instruction_sets()[0]


def test_another_device_is_refused():
    keys = torch.zeros(2, 4, 3, 8, device="meta")
    pages = Pages((PageSegment(keys, keys.clone(), torch.zeros(2, 4, 2, 8, device="meta"), None),))
    with pytest.raises(ValueError, match=r"^\[kernels\] backend: expected tensors on the CPU for 'native', got meta"):
        seal(pages, torch.zeros(1, dtype=torch.int64, device="meta"), backend="native")


@given(arguments=case_arguments())
def test_boxes_are_the_references_bit_for_bit(arguments):
    names = ("boxes", "scales") if arguments["shape"].box_dtype == "int8" else ("boxes",)
    expected = build_case(**arguments)
    size = expected.shape.page_size
    full = {p for table, n in zip(expected.tables, expected.lengths.tolist(), strict=True) for p in table[: n // size]}
    page_ids = torch.tensor(sorted(full), dtype=torch.int64)
    seal(expected.pages, page_ids, backend="reference")
    with pytest.MonkeyPatch.context() as patch:
        for isa in native.instruction_sets():
            patch.setenv("QUESTKV_ISA", isa)
            case = build_case(**arguments)
            seal(case.pages, page_ids, backend="native")
            for ours, theirs in zip(case.pages.segments, expected.pages.segments, strict=True):
                for name in names:
                    torch.testing.assert_close(
                        getattr(ours, name), getattr(theirs, name), rtol=0, atol=0, equal_nan=True
                    )


def test_pages_read_may_be_a_strided_view():
    case = build_case(0, Shape(page_size=3), [40, 31])
    wide = torch.full((2, 3), -9)
    decode(*case.args, torch.tensor([5, 40]), scale=1.0, pages_read=wide[:, 1], backend="native")
    expected = torch.zeros(2, dtype=torch.int64)
    decode(*case.args, torch.tensor([5, 40]), scale=1.0, pages_read=expected, backend="reference")
    assert wide.tolist() == [[-9, n, -9] for n in expected.tolist()]


def test_tensors_that_require_grad_are_read_like_others():
    case = build_case(0, Shape(page_size=3), [40, 31])
    expected = dense(*case.args, scale=1.0, backend="native")
    with torch.no_grad():
        out = dense(case.q.clone().requires_grad_(), *case.args[1:], scale=1.0, backend="native")
    assert torch.equal(out, expected)


# ------------------------------------------------------------------------------------------- memory, threads, stubs


def _arrays(pages: int = 40) -> dict[str, Any]:
    """Raw arguments of `attend` over everything: Hkv 2, G 2, D 16, S 16, one full row."""
    tokens, bounds = (2, pages, 16, 16), (2, pages, 2, 16)
    random = np.random.default_rng(0)
    return {
        "keys": random.standard_normal(tokens, dtype=np.float32),
        "values": random.standard_normal(tokens, dtype=np.float32),
        "boxes": np.zeros(bounds, dtype=np.int8),
        "scales": np.ones(bounds[:2], dtype=np.float32),
        "q": random.standard_normal((1, 4, 16), dtype=np.float32),
        "table": np.arange(pages, dtype=np.int64)[None],
        "lengths": np.array([pages * 16]),
        "out": np.full((1, 4, 16), math.nan, dtype=np.float32),
    }


def _layer_of(a: dict[str, Any]) -> Any:
    return module.load().LayerPages([a["keys"]], [a["values"]], [a["boxes"]], [a["scales"]], [None])


def _attend(layer: Any, a: dict[str, Any]) -> None:
    compiled, isa = module.load(), native.instruction_sets()[0]
    rows, softmax = compiled.Rows(a["table"], a["lengths"], None), compiled.Softmax(1.0, 0.0, None)
    compiled.attend(isa, layer, a["q"], rows, None, softmax, a["out"], 1)


def test_a_layer_keeps_its_tensors_alive_and_lets_them_go_with_itself():
    arrays = _arrays()
    layer = _layer_of(arrays)
    _attend(layer, arrays)
    expected = arrays["out"].copy()
    held = [weakref.ref(arrays.pop(name)) for name in ("keys", "values", "boxes", "scales")]
    gc.collect()
    assert all(ref() is not None for ref in held)
    arrays["out"].fill(math.nan)
    _attend(layer, arrays)
    assert np.array_equal(arrays["out"], expected)
    del layer
    gc.collect()
    assert all(ref() is None for ref in held)


def test_the_view_of_a_layer_is_made_once_and_dies_with_its_pages():
    case: Case | None = build_case(0, Shape(), [7])
    assert case is not None
    dense(*case.args, scale=1.0, backend="native")
    layer = operators._layers[case.pages]
    dense(*case.args, scale=1.0, backend="native")
    assert operators._layers[case.pages] is layer
    del layer
    gc.collect()
    before, case = len(operators._layers), None
    gc.collect()
    assert len(operators._layers) < before


def test_other_threads_run_while_the_core_works():
    """A thread switches only where the GIL is given up: the interval is longer than the test."""
    arrays = _arrays(pages=400)
    layer = _layer_of(arrays)
    steps, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            steps[0] += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    thread = threading.Thread(target=count)
    thread.start()
    try:
        before = steps[0]
        for _ in range(100):
            sum(range(1000))
        assert steps[0] == before  # nothing but the calls below lets the other thread run
        for _ in range(10000):
            _attend(layer, arrays)
            if steps[0] > before + 10:
                break
        assert steps[0] > before + 10
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join()


def test_the_stub_names_what_the_module_has_and_what_the_operators_pass():
    compiled = module.load()
    assert compiled.__file__ is not None
    tree = ast.parse((Path(compiled.__file__).parent / "_native.pyi").read_text())
    arguments = {node.name: [a.arg for a in node.args.args] for node in tree.body if isinstance(node, ast.FunctionDef)}
    for made in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        (init,) = [node for node in made.body if isinstance(node, ast.FunctionDef)]
        arguments[made.name] = [a.arg for a in init.args.args[1:]]
    assert set(arguments) == {name for name in vars(compiled) if not name.startswith("_")}
    assert {name: len(passed) for name, passed in _calls(operators).items()} == {
        name: len(taken) for name, taken in arguments.items() if name not in ("instruction_sets", "use_threads")
    }
    for name in ("append", "seal", "estimate", "select", "attend", "decode"):
        assert arguments[name][0] == "isa"
        assert arguments[name][-1] == "threads"


def _calls(source: ModuleType) -> dict[str, list[ast.expr]]:
    """Arguments of every `load().name(...)` in a module."""
    calls = {}
    for node in ast.walk(ast.parse(inspect.getsource(source))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "load":
                calls[node.func.attr] = node.args
    return calls
