"""Linear layers and experts on several GPUs: timed under torchrun, or a simulation by the cost model of `scaled_mm.parallel.cost`.

Rooms: `cases`, `suite` (the predictions), `ways`, `timer` and `measured` (the measurement), `record`, `report`.
"""
