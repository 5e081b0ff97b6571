"""``QUESTKV_ISA``, which chooses the compiled backend's instruction set, on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from typer.testing import Result

from questkv.kernels import native

Run = Callable[..., Result]
pytestmark = pytest.mark.skipif(not native.is_built(), reason="the compiled module isn't built")


def test_info_shows_the_one_in_use(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in native.instruction_sets():
        monkeypatch.setenv("QUESTKV_ISA", name)
        assert json.loads(run("info", "--json", "-").stdout)["backends"]["native"] == f"available ({name})"


@pytest.mark.parametrize("command", ["info", "ask"])
def test_an_unknown_one_is_one_line_that_names_the_others(
    command: str, run: Run, tiny_model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("QUESTKV_ISA", "sse9")
    native.load.cache_clear()
    document = tmp_path / "a.txt"  # type: ignore[operator]
    document.write_text("A lamp stood in the window. " * 20)
    arguments = {"info": [], "ask": [str(document), "What stood there?", "--model", tiny_model]}[command]
    result = run(command, *arguments)
    names = ", ".join(("", *_names()))[2:]
    assert result.exit_code == 2
    assert result.stderr == f"questkv: error: [native] QUESTKV_ISA: expected one of {names}, got 'sse9'\n"


def _names() -> tuple[str, ...]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("QUESTKV_ISA")
        return native.instruction_sets()
