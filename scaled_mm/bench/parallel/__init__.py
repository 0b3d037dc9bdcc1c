"""Linear layers and experts on several GPUs. So far a simulation: what the cost model of `scaled_mm.parallel.cost` says.

Rooms: `cases` (what is predicted), `suite` (the predictions), `record`, `report`.
"""
