"""One definition with its two solutions and its workloads; the files are made from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from scaled_mm.schema.inputs import blob_path
from scaled_mm.schema.model import Definition, Solution, Trace
from scaled_mm.schema.vocabulary import LOGICAL_DTYPES, OP_TYPES

OURS, PLAIN = "scaled_mm", "pytorch"
"""The authors of the solutions: this package, and plain PyTorch operations."""

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192), (8192, 28672))
"""(N, K) of layers of Llama-shaped 8B and 70B models."""

TOKENS = (1, 16, 512)


@dataclasses.dataclass(frozen=True)
class Entry:
    """name, op_type, description: of the definition.

    axes: size by name, None if a workload binds it. tensors: (dtype or GGUF format, axes), or (dtype, None) for a scalar.
    reference, ours, plain: texts that define `run(inputs...)`. plain None: the reference is also the plain PyTorch solution.
    compare: "bits" or "norm=<bound>". workloads: sizes of the var axes. scalars: values of scalar inputs. files: further inputs, besides
    tensors in GGUF formats, that come from files instead of random numbers.
    """

    name: str
    op_type: str
    description: str
    axes: Mapping[str, int | None]
    inputs: Mapping[str, tuple[str, Sequence[str] | None]]
    outputs: Mapping[str, tuple[str, Sequence[str]]]
    reference: str
    ours: str
    compare: str
    workloads: Sequence[Mapping[str, int]]
    plain: str | None = None
    note: str = "the package's own kernels"
    tags: Sequence[str] = ()
    constraints: Sequence[str] = ()
    scalars: Mapping[str, float] = dataclasses.field(default_factory=dict)
    files: Sequence[str] = ()

    def definition(self) -> Definition:
        logical = {name: fmt for name, (fmt, _) in {**self.inputs, **self.outputs}.items() if fmt in LOGICAL_DTYPES}
        axes = dict(self.axes)
        for fmt in logical.values():
            axes[_bytes_axis(fmt)] = LOGICAL_DTYPES[fmt].block_bytes
        extra = {"constraints": list(self.constraints)} if self.constraints else {}
        return Definition(
            name=self.name,
            op_type=self.op_type,
            description=self.description,
            tags=[
                f"group:{OP_TYPES[self.op_type].group}",
                *(f"quantization:{fmt}" for fmt in dict.fromkeys(logical.values())),
                *(f"logical:{name}={fmt}" for name, fmt in logical.items()),
                f"compare:{self.compare}",
                *self.tags,
            ],
            axes={name: {"type": "var"} if size is None else {"type": "const", "value": size} for name, size in axes.items()},
            inputs={name: _tensor(*tensor) for name, tensor in self.inputs.items()},
            outputs={name: _tensor(*tensor) for name, tensor in self.outputs.items()},
            reference=self.reference,
            **extra,
        )

    def solutions(self) -> list[Solution]:
        plain = self.reference if self.plain is None else self.plain
        note = "the definition's own operations" if self.plain is None else "plain PyTorch operations"
        return [self._solution(OURS, self.ours, self.note), self._solution(PLAIN, plain, note)]

    def traces(self) -> list[Trace]:
        """The workloads, as the lines of a workload file."""
        return [Trace(definition=self.name, workload=self._workload(axes)) for axes in self.workloads]

    def _solution(self, author: str, text: str, description: str) -> Solution:
        spec = {
            "language": "python",
            "target_hardware": ["cpu", "cuda"],
            "entry_point": "main.py::run",
            "dependencies": ["torch", "scaled_mm"] if "import scaled_mm" in text else ["torch"],
            "destination_passing_style": False,
        }
        sources = [{"path": "main.py", "content": text}]
        return Solution(name=f"{author}_{self.name}", definition=self.name, author=author, description=description, spec=spec, sources=sources)

    def _workload(self, axes: Mapping[str, int]) -> dict:
        uuid = "_".join([self.name, *(f"{name.lower()}{size}" for name, size in axes.items())])
        path = blob_path(self.op_type, self.name, uuid)

        def source(name: str) -> dict:
            fmt, shape = self.inputs[name]
            if shape is None:
                return {"type": "scalar", "value": self.scalars[name]}
            if fmt in LOGICAL_DTYPES or name in self.files:
                return {"type": "safetensors", "path": path, "tensor_key": name}
            return {"type": "random"}

        return {"axes": dict(axes), "inputs": {name: source(name) for name in self.inputs}, "uuid": uuid}


def _bytes_axis(fmt: str) -> str:
    return f"{fmt.upper()}_BYTES"


def _tensor(dtype: str, shape: Sequence[str] | None) -> dict:
    if dtype in LOGICAL_DTYPES:
        return {"shape": [*shape, _bytes_axis(dtype)], "dtype": "int8", "description": f"blocks of 32 values in {dtype.upper()}"}
    return {"shape": None if shape is None else list(shape), "dtype": dtype}
