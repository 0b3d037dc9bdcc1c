"""How the time of the dispatched row grows with M: no M should take longer than a larger one.

Rooms: `suite` (times one row a product), `report` (`cliffs.json`, `cliffs.md` and the plot).
"""
