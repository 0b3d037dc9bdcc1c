"""Makers of operands, shared by the rooms: `from operands.cases import Case` (pyproject.toml puts tests/ on the path)."""
