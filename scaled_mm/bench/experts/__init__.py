"""The experts of mixtures: their grouped products alone, and the whole layer.

`cases` says what is timed, `inputs` makes the operands and the routing, `peers` are the implementations, `suite` checks and records.
"""
