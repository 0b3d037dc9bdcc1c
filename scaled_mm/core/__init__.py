"""Shared by all kinds of product: the C binding, checks, operators and plans."""
