"""The short way to the core for CUDA tensors: past torch's dispatcher, which costs more host time than the launch itself.

Taken only for plain tensors while nothing intercepts operators (torch.compile, dispatch modes, function modes); everything
else, and every mistake, goes to the registered operators. docs/decisions/0003-host-overhead.md has the measurements.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sysconfig
import warnings
from typing import TYPE_CHECKING

import torch

from scaled_mm.core.checks import mark_written
from scaled_mm.errors import KernelNotBuiltError

if TYPE_CHECKING:
    from scaled_mm.core.spec import ProductSpec

# What torch's own generated code allocates with: a third of the host time of torch.empty. None: this torch has none.
_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_empty_strided_cuda = getattr(_guards, "_empty_strided_cuda", None)
# Looked up once: a name in torch._C costs as much as what it names. A torch that lacks one of them goes by its dispatcher.
_watchers = [getattr(torch._C, name, None) for name in ("_len_torch_dispatch_stack", "_is_torch_function_mode_enabled", "_is_tracing")]
_dispatch_modes, _function_mode, _tracing = _watchers
_BLIND = None in _watchers
increment_version = torch.autograd.graph.increment_version
module = None  # the extension, once CUDA has been used; None: take the operators
_handles: dict[int, tuple[object, int]] = {}  # device index -> (Handle, its address)


def load() -> None:
    """Build and load the extension; without Python's headers, or with a torch that has no exchange table, do nothing."""
    global module
    from scaled_mm.jit.library import python_library

    if _BLIND or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return  # nothing would say when to keep away, or the limited API that the extension is built against is not there
    try:
        path = python_library()
    except KernelNotBuiltError as error:
        _warn_that_calls_are_slow(error)
        return
    if path is None:
        return
    loader = importlib.machinery.ExtensionFileLoader("scaled_mm_fast", str(path))
    try:
        extension = importlib.util.module_from_spec(importlib.util.spec_from_loader("scaled_mm_fast", loader))
        loader.exec_module(extension)
    except ImportError as error:  # such as a file system that is mounted noexec
        _warn_that_calls_are_slow(error)
        return
    increment = getattr(torch._C, "_increment_version", increment_version)
    if extension.bind(torch.Tensor, torch.nn.Parameter, increment, torch.is_inference_mode_enabled, _workspace):
        module = extension


def _warn_that_calls_are_slow(error: Exception) -> None:
    warnings.warn(f"scaled_mm calls go through torch's dispatcher, several microseconds longer each: {error}", stacklevel=3)


def failed(status: int) -> BaseException:
    """What to raise for a status that the extension answered."""
    from scaled_mm.core import binding

    return binding.failure(status)


def intercepted() -> bool:
    """Whether something wants to see every operator (a dispatch mode, a function mode, torch.jit.trace), or nothing here could tell."""
    return _BLIND or _dispatch_modes() != 0 or _function_mode() or _tracing()


def _handle_address(device: int) -> int:
    found = _handles.get(device)
    if found is None:
        from scaled_mm.core.handle import Handle

        handle = Handle(f"cuda:{device}")
        found = _handles.setdefault(device, (handle, handle.address))
    return found[1]


def _workspace(size: int, device: int) -> torch.Tensor:
    """Bytes on the device; the extension calls it for kernels that need a workspace."""
    return torch.empty(size, dtype=torch.int8, device=f"cuda:{device}")


def run(spec: ProductSpec, inputs: tuple, out_dtype: torch.dtype, out: torch.Tensor | None, constant_b: bool):
    """Needs `module`. The product of inputs, in the order of the spec, planned, calculated and forgotten; NotImplemented: take the operator instead.

    The second input may be a constant weight: constant_b.
    """
    if torch.compiler.is_compiling() or intercepted():
        return NotImplemented
    try:
        device = inputs[0].get_device()
        if device < 0:
            return NotImplemented
        if out is not None:
            written = out
        else:
            shape = spec.out_shape(*inputs)
            if len(shape) == 2 and _empty_strided_cuda is not None and device == torch._C._cuda_getDevice():
                written = _empty_strided_cuda(shape, (max(shape[1], 1), 1), out_dtype)
            else:
                written = torch.empty(shape, dtype=out_dtype, device=f"cuda:{device}")
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, TypeError, RuntimeError):
        return NotImplemented  # the operator says what is wrong
    status = module.run(_handle_address(device), spec.code, device, constant_b, (written, *inputs))
    if status is None:
        if out is not None:
            mark_written(out)
        return written
    if status is NotImplemented:
        return NotImplemented
    raise failed(status)
