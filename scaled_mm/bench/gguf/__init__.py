"""Benchmarks of products with llama.cpp's block formats, next to llama.cpp's own times.

Rooms: `cases` (which products), `inputs` (weights in blocks and packed), `peers` (our modes, and what a CPU would do
without them), `run` (the check against float64, and the grid), `llama` (llama.cpp's times, measured or recorded),
`record` (what `bench_block.json` holds), `analysis`, `report` and `plots`. Timing, environment, and all else that INT8's
benchmark has too are `scaled_mm.bench`'s.
"""
