"""`torch.ops.scaled_mm.quantize_*`: what torch.compile sees of a quantizer.

A compiler that took the quantizer apart would divide as it likes (on a GPU torch's own rounds a quotient otherwise than IEEE does,
torch 2.11), and a bit of a scale is a bit of every product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

_library = torch.library.Library("scaled_mm", "FRAGMENT")


def operator(
    name: str, outputs: int, function: Callable, check: Callable[..., None], arguments: str = "str dim", fake: Callable | None = None
) -> torch._ops.OpOverload:
    """Registers `function(x, ...)`, which returns that many new tensors and is made of torch's operators alone.

    check(x, ...) raises what the public function does, for those who call the operator itself; eager calls of that function go past it.
    arguments: what follows x, as a schema spells it. fake: makes outputs without data, for a function that is better not traced.
    """

    def checked(implementation: Callable) -> Callable:
        @functools.wraps(implementation)
        def run(x: torch.Tensor, *rest: str):
            check(x, *rest)
            return implementation(x, *rest)

        return run

    _library.define(f"{name}(Tensor x, {arguments}) -> ({', '.join(['Tensor'] * outputs)})", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, checked(function), "CompositeExplicitAutograd")
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")  # nothing is differentiated
    torch.library.register_fake(f"scaled_mm::{name}", checked(fake or function), lib=_library)
    return getattr(torch.ops.scaled_mm, name).default
