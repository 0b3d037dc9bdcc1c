"""A plain Triton kernel that several suites compare with: `grouped` is the kernel, `tiles` its configurations and what it reads besides operands.

Only `grouped` imports Triton.
"""
