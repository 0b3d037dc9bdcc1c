"""INT8 products next to vLLM's, SGLang's and torch's.

Rooms: `inputs` (random data, rotated weights), `peers` and `libraries` (implementations), `suite` (the check, host overhead), `record`
(what `bench.json` holds), `analysis`, `plots` and `report` (pure functions of it).
"""
