"""Products with GGUF weights next to llama.cpp's, and to bfloat16 ones.

Rooms: `cases` (which products), `inputs` (weights in blocks and packed), `peers` (our modes, and what a CPU would do without them), `suite`
(the check against float64), `llama` (llama.cpp's times, measured or recorded), `record` (what `bench_gguf.json` holds), `analysis`, `goals`, `plots`
and `report` (pure functions of it).
"""
