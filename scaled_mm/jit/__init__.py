"""From table rows to loaded kernels: generated sources, nvcc, and a cache of what was built.

`toolchain` finds compilers and headers, `codegen` writes one translation unit per kernel, `compile` runs ninja,
`cache` keeps the results, `library` loads them into the C core.
"""
