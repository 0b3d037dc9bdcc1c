"""Benchmarks of INT8 products."""
