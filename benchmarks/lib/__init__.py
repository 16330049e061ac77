"""Shared code of the benchmarks: clocks, trials, the jobs of each study, and its claims."""
