"""Ctrl-C at random moments: one line and exit 130, or a right answer, and never a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SIGNALS = 1000


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_signal_at_any_moment_ends_in_one_line_or_a_right_answer(
    tiny_model: str, document: Path, child_environment: dict[str, str]
) -> None:
    script = Path(__file__).parent / "interrupted_runs.py"
    done = subprocess.run(
        [sys.executable, str(script), tiny_model, str(document), str(SIGNALS), "0"],
        env=child_environment,
        capture_output=True,
        check=True,
        start_new_session=True,
    )
    found = json.loads(done.stdout)
    print(found["ends"])
    assert found["wrong"] == []
    assert sum(sum(ends.values()) for ends in found["ends"].values()) == SIGNALS
    assert all(ends.get("interrupted", 0) > 0 for ends in found["ends"].values())
