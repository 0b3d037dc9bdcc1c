"""Operator schemas in flashinfer-bench's format: definitions with a PyTorch reference, solutions, workloads and traces.

    collection = schema.load()                        # this package's schemas, or schema.load("folder")
    definition = collection.definition("gemm_q4_0_w4a16_n4096_k4096")
    run = schema.build_reference(definition)          # a function of the definition's inputs
    inputs = schema.draw(definition, workload)        # tensors and scalars, in order; always the same numbers
    traces = schema.evaluate(definition, solutions, workload, device)

schemas/README.md explains the layers; docs/decisions/0014-schemas.md gives the reasons for the format.
"""

from scaled_mm.schema.collection import Collection, load, read, schemas_dir
from scaled_mm.schema.inputs import blob_tensors, draw, elements
from scaled_mm.schema.model import Definition, SchemaError, Solution, Trace, Workload
from scaled_mm.schema.runner import build_reference, build_solution, check_reference, check_solution, evaluate

__all__ = [
    "Collection",
    "Definition",
    "SchemaError",
    "Solution",
    "Trace",
    "Workload",
    "blob_tensors",
    "build_reference",
    "build_solution",
    "check_reference",
    "check_solution",
    "draw",
    "elements",
    "evaluate",
    "load",
    "read",
    "schemas_dir",
]
