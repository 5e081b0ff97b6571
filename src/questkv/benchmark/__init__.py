"""Benchmarks: our kernels and others', timed in turn in one run, after a check that their results agree."""
