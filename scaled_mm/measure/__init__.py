"""How times are taken and written down: what benchmarks, the autotuner and `verify` share.

Nothing here is imported by `import scaled_mm`.
"""
