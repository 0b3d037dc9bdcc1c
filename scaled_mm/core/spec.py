"""`ProductSpec`: the description of a kind of product. Operators, fakes, plans, the CPU path and error messages are made from it."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable

import torch

from scaled_mm.core import checks
from scaled_mm.errors import BadTensorDtypeError


def lazily(module: str, name: str) -> Callable:
    """A function of a module that is imported at the first call, so that `import scaled_mm` stays quick."""

    def call(*arguments):
        return getattr(importlib.import_module(module), name)(*arguments)

    return call


@dataclasses.dataclass(frozen=True)
class Operand:
    """An input of a product. required: it may not be None."""

    name: str
    required: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class ProductSpec:
    """A kind of product. `scaled_mm/products/` has one file for each; CONTRIBUTING.md says how to add one.

    name: of its operators, `torch.ops.scaled_mm.<name>`, `<name>_out` and `<name>_calculate`.
    code: its scaledMMProduct_t.
    inputs: its operands besides out, in the order of the C interface (`csrc/problems/<kind>.cpp`).
    out_dtypes: the allowed dtypes of out.
    out_shape: (*inputs) -> the shape of out. Raises BadTensorShapeError if an input has a wrong number of dimensions.
    check_sizes: (*inputs) -> None. Raises BadTensorShapeError if sizes do not match. Uses `checks.check_size`, because sizes may be symbols.
    compute: (out, *inputs) -> None. Computes on a CPU; the core has validated the operands.
    cpu_kernel: () -> (name, reason) of the CPU's method.
    matrix_dimensions: the number of dimensions of the second input for which the extension allocates out as [rows of the first input, columns
        of the second]. The first input must have two. 0: the extension never allocates it.
    constant: the input that may be a constant weight (`prepare_weight`), which kernels may read early.
    describe_sizes: (out, *inputs as TensorDescs or None) -> the sizes for the repr of a descriptor.
    """

    name: str
    code: int
    inputs: tuple[Operand, ...]
    out_dtypes: tuple[torch.dtype, ...]
    out_shape: Callable[..., tuple[int, ...]]
    check_sizes: Callable[..., None]
    compute: Callable[..., None]
    cpu_kernel: Callable[[], tuple[str, str]]
    describe_sizes: Callable[..., str]
    matrix_dimensions: int = 2
    constant: str | None = None
    input_names: tuple[str, ...] = dataclasses.field(init=False)
    operand_names: tuple[str, ...] = dataclasses.field(init=False)
    """out, then the inputs."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_names", tuple(operand.name for operand in self.inputs))
        object.__setattr__(self, "operand_names", ("out", *self.input_names))

    def check_out_dtype(self, dtype: object) -> None:
        """BadTensorDtypeError unless dtype is one of out_dtypes."""
        if not isinstance(dtype, torch.dtype) or dtype not in self.out_dtypes:
            raise BadTensorDtypeError(f"out_dtype: expected {', '.join(map(str, self.out_dtypes))}, got {dtype!r}")

    def named(self, error: BaseException, tensors: tuple) -> BaseException:
        """The error, with torch's name of a dtype that the core does not know. tensors: out and the inputs, in order."""
        return checks.name_dtype(error, **dict(zip(self.operand_names, tensors)))
