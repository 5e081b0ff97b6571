"""A GPU as a benchmark sees it: capturing what it does in a graph, and timing it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

Run = Callable[[], Any]


class Machine(Protocol):
    """What the checks and timings need of a device.

    Attributes:
        device: Where tensors lie.
        cache_bytes: Its last-level cache.
    """

    device: torch.device
    cache_bytes: int

    def free_bytes(self) -> int:
        """Bytes that can still be allocated."""
        ...

    def capture(self, run: Run) -> Run:
        """Call `run` once, then record another call of it; gives what replays that one over the same tensors."""
        ...

    def time(self, runs: Sequence[Run]) -> list[float]:
        """Call each once, in turn, and wait for all; milliseconds of the device each took."""
        ...

    def synchronize(self) -> None:
        """Wait for everything that was called; a kernel's failure is raised here."""
        ...

    def now(self) -> float:
        """Seconds on a clock of its own."""
        ...

    def describe(self) -> dict[str, Any]:
        """What it is, for saving beside results."""
        ...


class CudaMachine:
    """The current CUDA device."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._properties: Any = torch.cuda.get_device_properties(self.device)
        self.cache_bytes = int(self._properties.L2_cache_size)

    def free_bytes(self) -> int:
        """Bytes that the driver has left and that PyTorch holds unused."""
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def capture(self, run: Run) -> Run:
        """A CUDA graph; the first call, on a stream of its own, compiles and allocates what is kept."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = run()

        def replay() -> Any:
            graph.replay()
            return result

        return replay

    def time(self, runs: Sequence[Run]) -> list[float]:
        """By events around each; nothing waits between them, so the host's work hides behind the device's."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(runs) + 1)]
        events[0].record()
        for run, event in zip(runs, events[1:], strict=True):
            run()
            event.record()
        self.synchronize()
        return [before.elapsed_time(after) for before, after in itertools.pairwise(events)]

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

    def now(self) -> float:
        """Wall time."""
        return time.monotonic()

    def describe(self) -> dict[str, Any]:
        """Name, memory, cache, compute capability and CUDA's version."""
        return {
            "gpu": self._properties.name,
            "capability": f"{self._properties.major}.{self._properties.minor}",
            "memory_bytes": self._properties.total_memory,
            "cache_bytes": self.cache_bytes,
            "multiprocessors": self._properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "triton": _triton_version(),
        }


def _triton_version() -> str:
    import triton

    return str(triton.__version__)
