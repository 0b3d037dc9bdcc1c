"""The fast path to the core for CUDA tensors. It bypasses torch's dispatcher, which costs more host time than the launch itself.

It serves plain tensors while nothing intercepts operators (torch.compile, dispatch modes, function modes). All other calls, and invalid
arguments, take the registered operators. Measurements: docs/decisions/0003-host-overhead.md.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.util
import sysconfig
import warnings
from typing import TYPE_CHECKING

import torch

from scaled_mm.core.checks import mark_written
from scaled_mm.errors import KernelNotBuiltError, Status

if TYPE_CHECKING:
    from scaled_mm.core.spec import ProductSpec

# The allocator of torch's own generated code: a third of the host time of torch.empty. None: this torch has none.
_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_empty_strided_cuda = getattr(_guards, "_empty_strided_cuda", None)
_current_device = getattr(torch._C, "_cuda_getDevice", None)
# Looked up once, because the lookup in torch._C costs as much as the call. Without one of them, calls take the dispatcher.
_watchers = [getattr(torch._C, name, None) for name in ("_len_torch_dispatch_stack", "_is_torch_function_mode_enabled", "_is_tracing")]
_dispatch_modes, _function_mode, _tracing = _watchers
_BLIND = None in _watchers
_is_compiling = torch.compiler.is_compiling
increment_version = torch.autograd.graph.increment_version
module = None  # the extension, once CUDA has been used; None: calls take the operators
_handles: dict[int, tuple[object, int]] = {}  # device index -> (Handle, its address)


def _can_be_used() -> bool:
    """False where intercepted operators could not be detected, or without the limited API, against which the extension is built."""
    return not (_BLIND or sysconfig.get_config_var("Py_GIL_DISABLED"))


def build() -> None:
    """Builds the extension into the cache, where `load` finds it. Errors are left to `load`."""
    from scaled_mm.jit.library import python_library

    if _can_be_used():
        with contextlib.suppress(Exception):
            python_library()


def load() -> None:
    """Builds and loads the extension. Does nothing without Python's headers, or with a torch without the exchange table."""
    global module
    from scaled_mm.jit.library import python_library

    if not _can_be_used():
        return
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
    tensors = torch.Tensor, torch.nn.Parameter
    if extension.bind(*tensors, increment, torch.is_inference_mode_enabled, _workspace, _empty_strided_cuda, torch.int8, tuple(_watchers)):
        module = extension


def _warn_that_calls_are_slow(error: Exception) -> None:
    warnings.warn(f"scaled_mm calls go through torch's dispatcher, several microseconds longer each: {error}", stacklevel=3)


def failed(status: int) -> BaseException:
    """The exception for a status that the extension returned."""
    from scaled_mm.core import binding

    return binding.failure(status)


def raise_fault(status: object) -> None:
    """Raises what no other way of computing would mend: a CUDA error, or one of ours. Another status is that of operands, which the caller names."""
    if status in (Status.CUDA_ERROR, Status.INTERNAL_ERROR):
        raise failed(status)


def intercepted() -> bool:
    """Whether something intercepts operators (a dispatch mode, a function mode, torch.jit.trace), or this cannot be detected."""
    return _BLIND or _dispatch_modes() != 0 or _function_mode() or _tracing()


@functools.cache
def _load_operators() -> None:
    from scaled_mm.core import dispatcher

    dispatcher.load_cuda_operators()


def loaded():
    """The extension; None: calls take the operators. For calls on CUDA tensors: it is loaded with the CUDA operators."""
    if module is None:
        _load_operators()
    return module


def is_current(device: int) -> bool:
    """Whether it is the index of the current CUDA device, on which `empty` and the extension allocate."""
    return _current_device is not None and device >= 0 and device == _current_device()


def handle_address(device: int) -> int:
    """The scaledMMHandle_t of a device, created once."""
    found = _handles.get(device)
    if found is None:
        from scaled_mm.core.handle import Handle

        handle = Handle(f"cuda:{device}")
        found = _handles.setdefault(device, (handle, handle.address))
    return found[1]


def arch_of(device: int) -> str:
    """The architecture whose kernels the device runs."""
    handle_address(device)
    return _handles[device][0].arch


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: int) -> torch.Tensor:
    """A contiguous tensor on a CUDA device; on the current one at a third of the host time of torch.empty."""
    if _empty_strided_cuda is None or not is_current(device):
        return torch.empty(shape, dtype=dtype, device=f"cuda:{device}")
    if len(shape) == 2:
        return _empty_strided_cuda((shape[0], shape[1]), (max(shape[1], 1), 1), dtype)  # no torch.Size, which it refuses
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return _empty_strided_cuda(tuple(shape), tuple(reversed(strides)), dtype)


def _workspace(size: int, device: int) -> torch.Tensor:
    """A workspace of `size` bytes on the device. The extension calls it for kernels that need one."""
    return torch.empty(size, dtype=torch.int8, device=f"cuda:{device}")


def run(spec: ProductSpec, inputs: tuple, out_dtype: torch.dtype, out: torch.Tensor | None, constant_b: bool, option: int):
    """The product of inputs, in the order of the spec, by a temporary plan. NotImplemented: the caller must take the operator. Needs `module`.

    constant_b: the second input is a constant weight. option: of the C function that creates a plan.
    """
    if _is_compiling():
        return NotImplemented
    if _handles and out is None and spec.matrix_dimensions and _current_device is not None:
        try:
            device = _current_device()
        except RuntimeError:  # a forked process cannot ask CUDA, but CPU products must still run
            device = None
        if device in _handles:  # the first product on a device goes on below, which makes the handle
            made = module.multiply(_handles[device][1], spec.code, device, constant_b, out_dtype, spec.matrix_dimensions, option, inputs)
            if isinstance(made, int):
                raise failed(made)
            if made is not NotImplemented:
                return made
    if intercepted():
        return NotImplemented
    try:
        device = inputs[0].get_device()
        if device < 0:
            return NotImplemented
        if out is not None:
            written = out
        else:
            written = empty(spec.out_shape(*inputs), out_dtype, device)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, TypeError, RuntimeError):
        return NotImplemented  # the operator raises the error
    status = module.run(handle_address(device), spec.code, device, constant_b, option, (written, *inputs))
    if status is None:
        if out is not None:
            mark_written(out)
        return written
    if status is NotImplemented:
        return NotImplemented
    raise failed(status)
