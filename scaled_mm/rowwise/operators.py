"""`torch.ops.scaled_mm.*`: the row-wise operators as single operators for torch.compile.

A compiler that traced into one could change its divisions (Inductor's GPU division is not IEEE, torch 2.11), contract a product and a sum, or
leave out the rounding of an operand to 16 bits. One changed bit of a scale would change the bits of every product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from scaled_mm.rowwise import kernels

_library = torch.library.Library("scaled_mm", "FRAGMENT")


def operator(
    name: str,
    outputs: int,
    function: Callable,
    check: Callable[..., None],
    arguments: str = "str dim",
    fake: Callable | None = None,
    first: str = "x",
    kernel: Callable | None = None,
) -> torch._ops.OpOverload:
    """Registers `function(x, ...)` as an operator. It returns `outputs` new tensors. If it launches kernels itself, it needs `fake`.

    check(x, ...): raises the errors of the public function for direct calls of the operator. Eager calls of the public function bypass it.
    arguments: the schema of the arguments after x. fake: returns outputs without data, for a function that cannot be traced, or slowly.
    first: the name of x in the schema. kernel(x, ...): the results of a CUDA kernel, or None where torch operations must serve.
    """

    def checked(implementation: Callable) -> Callable:
        @functools.wraps(implementation)
        def run(x: torch.Tensor, *rest: str):
            check(x, *rest)
            return implementation(x, *rest)

        return run

    @functools.wraps(function)
    def compute(x: torch.Tensor, *rest):
        served = kernel(x, *rest) if kernel is not None and kernels.serve(x) else None
        return function(x, *rest) if served is None else served

    schema = ", ".join(filter(None, (f"Tensor {first}", arguments)))
    _library.define(f"{name}({schema}) -> ({', '.join(['Tensor'] * outputs)})", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, checked(compute), "CompositeExplicitAutograd")
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")  # there are no gradients
    torch.library.register_fake(f"scaled_mm::{name}", checked(fake or function), lib=_library)
    return getattr(torch.ops.scaled_mm, name).default


def composite(name: str, outputs: int, function: Callable, *registration, **options) -> Callable:
    """`function`, which a compiler calls as the operator `name`. The public function has checked the arguments. Options: see `operator`."""
    registered = operator(name, outputs, function, *registration, **options)

    @functools.wraps(function)
    def call(*arguments):
        return registered(*arguments) if torch.compiler.is_compiling() else function(*arguments)

    return call
