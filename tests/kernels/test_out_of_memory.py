"""Scratch memory that the system refuses in a thread of the compiled backend: an error for the caller, nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from questkv.kernels import native

_SCRIPT = """
import json, resource, sys
from unittest.mock import patch
import torch
from questkv import kernels
from questkv.kernels import Pages, PageSegment, Rows, Scoring, Softmax
from questkv.kernels.native import operators

PAGES, KV_HEADS, GROUP, DIM = 2_000_000, 2, 4, 8
torch.manual_seed(0)
torch.set_num_threads(2)
# A page may stand in a table more than once: that many pages of a sequence need no memory of their own.
keys, boxes = torch.randn(KV_HEADS, 64, 1, DIM), torch.randint(-127, 127, (KV_HEADS, 64, 2, DIM), dtype=torch.int8)
pages = Pages((PageSegment(keys, keys.clone(), boxes, torch.rand(KV_HEADS, 64), None),))
table, q = torch.randint(0, 64, (1, PAGES)), torch.randn(1, KV_HEADS * GROUP, DIM)
scoring = Scoring(0.5, "softmax_mean")

scores = torch.zeros(1, KV_HEADS, PAGES)

def estimate(count, backend="native"):
    if backend != "native" or count < PAGES:
        rows = Rows(table[:, :count], torch.tensor([count]))
        return kernels.estimate(q, pages, rows, 1.0, scoring, backend=backend)
    # Into scores that are there, so that no memory is asked for but in the threads.
    with patch.object(torch.Tensor, "new_empty", lambda *shape, **kind: scores):
        return operators.estimate(q, pages, Rows(table, torch.tensor([count])), 1.0, scoring).clone()

def decode(count, backend="native"):
    rows = Rows(table[:, :count], torch.tensor([count]), torch.tensor([8]))
    return kernels.decode(q, pages, rows, Softmax(1.0), scoring, backend=backend)

runs = {"estimate": estimate, "decode": decode}
before = {name: run(50) for name, run in runs.items()}
found = {name: [] for name in runs}
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
_, hard = resource.getrlimit(resource.RLIMIT_AS)
for name, run in runs.items():
    for _ in range(7):
        # Each of the two threads wants 56 MB or more.
        resource.setrlimit(resource.RLIMIT_AS, (used + 40 * 2**20, hard))
        try:
            run(PAGES)
            found[name].append("no error")
        except Exception as error:
            found[name].append(type(error).__name__)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        found[name].append(torch.equal(run(50), before[name]))
    whole = run(PAGES)
    torch.set_num_threads(1)
    found[name].append(torch.equal(whole, run(PAGES)))
    torch.set_num_threads(2)
    torch.testing.assert_close(run(50), run(50, "reference"))
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(not native.is_built(), reason="the compiled module isn't built")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the size of a process is read as Linux shows it")
def test_a_thread_without_memory_is_a_memory_error_and_the_next_call_is_right():
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    expected = ["MemoryError", True] * 7 + [True]
    assert json.loads(done.stdout) == {"estimate": expected, "decode": expected}
