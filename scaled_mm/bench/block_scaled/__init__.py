"""Products with block scales, next to a plain Triton kernel and torch.

`inputs` makes the operands, `peers` are the implementations, `suite` checks and records.
"""
