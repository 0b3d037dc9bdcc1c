"""Between torch's dispatcher and the core: the device of an operator, its CUDA implementation, and the errors that cross back."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from contextlib import suppress

import torch

from scaled_mm.core import binding, checks, fast
from scaled_mm.errors import BadParamError, DeviceNotSupportedError, NullPointerError, ScaledMMError

library = torch.library.Library("scaled_mm", "DEF")
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

_STATUS = re.compile(r"\[scaled_mm status (\d+)\] (.*)", re.DOTALL)  # written by csrc/torch/tensors.h: torch keeps only the text of an exception


def define(schema: str, implementation, fake, tags: Sequence[torch.Tag] = ()):
    """Registers `torch.ops.scaled_mm.<name>` and returns its overload.

    implementation: for every device, and for CUDA until `load_cuda_operators` has loaded csrc/torch. fake: shapes without data, for compilers.
    Autograd falls through, because nothing is differentiable. Without the fallthrough torch would mark the output as differentiable and only
    warn in backward.
    """
    name = schema.partition("(")[0]
    library.define(schema, tags=tags)
    library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"scaled_mm::{name}", fake, lib=library)
    return getattr(torch.ops.scaled_mm, name).default


def typed_error(error: Exception) -> BaseException:
    """The typed error inside an exception that crossed torch's dispatcher; a wrong argument type is a BadParamError."""
    if isinstance(error, ScaledMMError):
        return error
    text = str(error)
    if match := _STATUS.search(text):
        return binding.failure(int(match.group(1)), match.group(2).split("\nException raised from")[0])
    if "CUDA out of memory" in text and not isinstance(error, torch.OutOfMemoryError):
        return torch.OutOfMemoryError(text)  # its type before it crossed the stable ABI
    if re.match(r"scaled_mm::\w+\(\) (Expected|expected|is missing|takes|received)", text):
        return BadParamError(text.splitlines()[0])  # torch's own check of the schema names the argument
    return error


# ---- the CUDA implementations --------------------------------------------------------------------------------------------

_loading = threading.Lock()
_are_loaded = False


def _load(compiles_kernels: bool) -> None:
    from scaled_mm.jit import library

    if torch.version.cuda is None:
        raise DeviceNotSupportedError(f"device: expected a torch with CUDA, got torch {torch.__version__}")
    binding.library()  # the operators use its symbols
    if compiles_kernels:
        with suppress(Exception):  # a product on this device raises it again
            binding.compile_fallbacks(fast.arch_of(torch.cuda.current_device()))
    fast_path = threading.Thread(target=fast.build, name="scaled_mm fast path", daemon=True)
    with suppress(RuntimeError):  # no thread can be started, for instance at the end of the process: `fast.load` builds it
        fast_path.start()
    torch.ops.load_library(str(library.torch_library()))
    if fast_path.ident is not None:
        fast_path.join()
    fast.load()


def load_cuda_operators(compiles_kernels: bool = True) -> None:
    """Registers the CUDA implementations. The first time on a machine this compiles them, which takes seconds.

    compiles_kernels: kernels that a first product may need are compiled beside them. Needs a GPU for that, and no more than that fails without one.
    """
    global _are_loaded
    with _loading:
        if not _are_loaded:
            _load(compiles_kernels)
            _are_loaded = True


# ---- devices -------------------------------------------------------------------------------------------------------------


def common_device(required: dict[str, torch.Tensor], optional: dict[str, torch.Tensor | None]) -> torch.device:
    """The device of all tensors. NullPointerError for a required tensor that is None; BadTensorDeviceError names a tensor on another device."""
    for name, tensor in required.items():  # torch lets None through where a schema says Tensor
        if tensor is None:
            raise NullPointerError(f"{name}: expected a tensor, got None")
    device = next(iter(required.values())).device
    for name, tensor in (*required.items(), *optional.items()):
        if tensor is not None:
            checks.check_device(name, tensor, device)
    return device


def runs_on_cuda(required: dict[str, torch.Tensor], optional: dict[str, torch.Tensor | None]) -> bool:
    """True for CUDA, whose implementation is then loaded; False for the CPU; DeviceNotSupportedError for other devices."""
    device = common_device(required, optional)
    if device.type == "cuda":
        load_cuda_operators()
        return True
    if device.type != "cpu":
        raise DeviceNotSupportedError(f"{next(iter(required))}: expected a CUDA or CPU tensor, got one on {device}")
    return False


def trace_device(required: dict[str, torch.Tensor], optional: dict[str, torch.Tensor | None]) -> torch.device:
    """`common_device` of fake tensors. Loads the CUDA implementations, because the compiled graph will call the operator directly. Needs no GPU."""
    device = common_device(required, optional)
    if device.type == "cuda" and torch.version.cuda is not None:
        load_cuda_operators(compiles_kernels=False)
    return device
