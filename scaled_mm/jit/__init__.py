"""From kernel configs to loaded kernels: generated sources, nvcc, and a cache of built libraries.

`toolchain` finds compilers and headers, `codegen` writes one translation unit per kernel, `compile` runs ninja,
`cache` stores the libraries, `library` says what is built and under which key, `dispatch` selects the table of a machine.
"""
