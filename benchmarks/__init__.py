"""Benchmarks that can be repeated on any machine: `asyncmoe bench`. Their results are in `results/`; docs/measurements.md cites them."""
