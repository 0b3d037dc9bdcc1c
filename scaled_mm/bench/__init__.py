"""Benchmarks of INT8 GEMM: one grid of cases, every implementation on the same inputs in the same run.

Rooms: `shapes` (which products), `roofline` (what the hardware allows), `inputs` (random data, rotated weights),
`timing` (the only place that times), `peers` (our kernels and everybody else's behind one small interface), `run` and
`rows` (the loops over the grid), `environment` and `record` (what `bench.json` holds), `analysis`, `report` and `plots`
(pure functions of it), `block` (the same of products with block formats).

Nothing here is imported by `import scaled_mm`.
"""
