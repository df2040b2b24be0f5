"""Benchmarks: one module per claim, each with `--json`."""
