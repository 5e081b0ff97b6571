"""Optional packages stay optional, and importing the package costs nothing and changes nothing."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import questkv

OPTIONAL = ("triton", "gguf", "matplotlib", "vllm", "torchao", "lm_eval")
SOURCE = Path(questkv.__file__).parents[1]
# `__main__` runs the command line when it is imported.
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(questkv.__path__, "questkv.")
    if not module.name.endswith("__main__")
)


def _run(code: str) -> str:
    """Output of a fresh interpreter that finds questkv where these tests do."""
    start = f"import sys\nsys.path.insert(0, {str(SOURCE)!r})\n"
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_module_is_imported_without_the_optional_packages():
    assert {"questkv.config", "questkv.kernels.reference.select", "questkv.hf.cache"} <= set(MODULES)
    # None in sys.modules makes the import fail, whether the package is there or not.
    output = _run(
        f"for name in {OPTIONAL!r}: sys.modules[name] = None\n"
        "import importlib\n"
        f"for name in {MODULES!r}: print(importlib.import_module(name).__name__)\n"
    )
    assert output.split() == MODULES


def test_blocking_does_block():
    output = _run("sys.modules['gguf'] = None\ntry:\n    import gguf\nexcept ImportError:\n    print('blocked')\n")
    assert output.strip() == "blocked"


@pytest.mark.parametrize("statement", ["import questkv", "from questkv import QuestConfig; QuestConfig()"])
def test_importing_the_package_loads_neither_torch_nor_transformers(statement):
    heavy = ("torch", "transformers", "numpy", "yaml", "typer", "rich")
    assert _run(f"{statement}\nprint([name for name in {heavy!r} if name in sys.modules])").strip() == "[]"


def test_importing_the_operators_does_not_load_transformers():
    code = "import questkv.kernels\nprint([name for name in ('transformers', 'triton') if name in sys.modules])"
    assert _run(code).strip() in ("[]", "['triton']")  # torch itself may load triton where it is installed


@pytest.mark.slow
def test_importing_every_module_leaves_torchs_settings_alone():
    state = "(torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), torch.initial_seed())"
    code = (
        f"import importlib, torch, transformers\nbefore = {state}\n"
        f"for name in {MODULES!r}: importlib.import_module(name)\n"
        f"print({state} == before)"
    )
    assert _run(code).strip() == "True"


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'quest'"):
        questkv.quest  # noqa: B018
    assert set(questkv.__all__) == {"QuestCache", "QuestConfig", "__version__", "attach"}
    assert questkv.QuestCache.__name__ == "QuestCache"
    assert callable(questkv.attach)
