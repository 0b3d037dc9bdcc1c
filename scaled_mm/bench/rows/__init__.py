"""Times of every row of a tile table on the same INT8 products.

Rooms: `suite` (rows are compared with each other), `report` (`rows.json` and `rows.md`), `choice` (`random.json` and `random.md`: the choice of the
table on random products).
"""
