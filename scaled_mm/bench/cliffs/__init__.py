"""How the time of the dispatched row grows with M: no product should take longer than one with a larger M.

Rooms: `suite` (times one row a product), `report` (`cliffs.json`, `cliffs.md` and the plot).
"""
