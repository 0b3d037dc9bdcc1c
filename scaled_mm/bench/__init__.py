"""Benchmarks: one grid of cases, every implementation on the same inputs in the same run.

Suites, each with its inputs, peers, check, record and report: `int8` (next to vLLM, SGLang and torch), `gguf` (next to llama.cpp), `rows` (the rows
of a tile table, also on random products), `cliffs` (the dispatched row by M), `path` (layers from float to float), `block_scaled` and `experts`
(next to Triton and torch). What they share: `ours` (our kernels as a peer), `triton` (a plain kernel to compare with), `rows_check`, `analysis`,
`goals`, `plots` and `report` (pure functions of a document), `recorded` (times of other libraries in `data/`). Timing, the loop over the grid and
records are `scaled_mm.measure`'s.

Nothing here is imported by `import scaled_mm`.
"""
