"""`torch.ops.scaled_mm.rowwise_*`: quantizers as single operators for torch.compile.

A compiler that traced into a quantizer could change its divisions (Inductor's GPU division is not IEEE, torch 2.11). One changed bit of a
scale would change the bits of every product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

_library = torch.library.Library("scaled_mm", "FRAGMENT")


def operator(
    name: str,
    outputs: int,
    function: Callable,
    check: Callable[..., None],
    arguments: str = "str dim",
    fake: Callable | None = None,
    first: str = "x",
) -> torch._ops.OpOverload:
    """Registers `function(x, ...)` as an operator. It returns `outputs` new tensors and must consist of torch operators only.

    check(x, ...): raises the errors of the public function for direct calls of the operator. Eager calls of the public function bypass it.
    arguments: the schema of the arguments after x. fake: returns outputs without data, for a function that cannot be traced, or slowly.
    first: the name of x in the schema.
    """

    def checked(implementation: Callable) -> Callable:
        @functools.wraps(implementation)
        def run(x: torch.Tensor, *rest: str):
            check(x, *rest)
            return implementation(x, *rest)

        return run

    schema = ", ".join(filter(None, (f"Tensor {first}", arguments)))
    _library.define(f"{name}({schema}) -> ({', '.join(['Tensor'] * outputs)})", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, checked(function), "CompositeExplicitAutograd")
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
