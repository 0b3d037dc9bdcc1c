"""What every kind of product shares: the C binding, checks, operators and plans."""
