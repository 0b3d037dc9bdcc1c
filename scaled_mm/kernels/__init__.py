"""What a kernel is: architectures, output dtypes, the configuration of one kernel, and the kernel families.

`arch` and `dtypes` import nothing heavy. `config` imports pydantic; `registry` knows all families. No torch anywhere:
setup.py builds kernels where there is none. A new family is a module of this room, and its line in `registry`.
"""
