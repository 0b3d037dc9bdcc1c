"""Architectures, output dtypes, kernel configs and kernel families.

`arch` and `dtypes` import nothing heavy. `config` imports pydantic; `registry` knows all families. Nothing here imports torch, because
setup.py builds kernels without it. A new family is a module of this room and a line in `registry`.
"""
