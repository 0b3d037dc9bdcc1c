"""Times of every row of a tile table."""
