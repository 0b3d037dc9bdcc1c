"""Adapters for other packages, one module each. Only modules that say so import their package."""
