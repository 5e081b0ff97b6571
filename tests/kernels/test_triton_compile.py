"""Every Triton kernel compiles for sm_80 and sm_90, spills no register and fits the shared memory, as it is tuned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from interpreter import has_triton

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "triton_resources.py"
KERNELS = {
    "write_tokens",
    "seal_pages",
    "score_pages",
    "sum_heads",
    "mean_shares",
    "choose_pages",
    "list_members",
    "attend_part",
    "merge_parts",
}


@pytest.mark.slow
@pytest.mark.skipif(not has_triton(), reason="triton isn't installed")
def test_every_kernel_compiles_without_spills_and_within_shared_memory() -> None:
    # A process of its own: in this one kernels are interpreted.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--quick", "--json", "-"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    for arch in (80, 90):
        assert {kernel["kernel"] for kernel in found if kernel["arch"] == arch} == KERNELS
    for kernel in found:
        assert kernel["fits"], kernel
        assert kernel["spilled"] == 0, kernel
        assert kernel["shared"] <= {80: 163, 90: 227}[kernel["arch"]] * 1024, kernel
