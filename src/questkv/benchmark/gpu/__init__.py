"""On a machine with a GPU: every Triton kernel against float64, then its speed beside others (`benchmarks/gpu.py`)."""
