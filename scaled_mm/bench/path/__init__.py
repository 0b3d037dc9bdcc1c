"""The path from a float activation to a float output, next to vLLM's and torch's: linear layers, and the row-wise operators between them.

Rooms: `cases` (what is timed), `linear` and `rows` (inputs, and the calls of every implementation), `operators` (one entry each), `peers`, `suite`,
`record`, `analysis` and `goals` (what the numbers say), `report`, `plots`.
"""
