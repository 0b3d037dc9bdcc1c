"""Checks of a single tensor at every entry point before computing, and the notice to autograd afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from scaled_mm.errors import BadParamError, BadTensorDeviceError, BadTensorDtypeError, BadTensorShapeError, DeviceNotSupportedError

PLAIN = (torch.Tensor, torch.nn.Parameter)  # types of tensors that are not wrappers of others


def is_strided(tensor: torch.Tensor) -> bool:
    """Whether the tensor is memory with strides: not sparse, not nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def not_strided(name: str, tensor: torch.Tensor) -> BadParamError:
    got = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
    return BadParamError(f"{name}: expected a strided tensor, got {got}")


def check_strided(name: str, tensor: object) -> None:
    """BadParamError unless it is a strided tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise BadParamError(f"{name}: expected a tensor, got {'None' if tensor is None else type(tensor).__name__}")
    if not is_strided(tensor):
        raise not_strided(name, tensor)


def device(name: object) -> torch.device:
    """The torch.device of an argument `device`; BadParamError if it names none."""
    try:
        return torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise BadParamError(f"device: expected a device such as cuda:0 or cpu, got {name!r}") from error


def usable_device(wanted: torch.device) -> torch.device:
    """The device, with an index; DeviceNotSupportedError if this torch or this machine does not have it."""
    try:
        return torch.empty(0, device=wanted).device
    except (AssertionError, RuntimeError) as error:  # torch raises an AssertionError if it was built without CUDA
        reason = str(error).partition("\n")[0]
        raise DeviceNotSupportedError(f"device: expected one that torch {torch.__version__} can use here, got {wanted}: {reason}") from error


def check_out(out: torch.Tensor, name: str = "out") -> None:
    """BadParamError for an output to which torch would not write either: it requires a gradient, is an inference tensor outside of inference mode,
    or is lazily negated."""
    if not isinstance(out, torch.Tensor):
        return  # refused where dtype and shape are checked
    if out.requires_grad:
        raise BadParamError(f"{name}: expected a tensor that requires no gradient, got one that does")
    if torch.compiler.is_compiling():
        return  # the compiler has no inference tensors, and cannot trace the question
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise BadParamError(f"{name}: expected a tensor made outside of inference mode, got one made inside, which is not written outside of it")
    if out.is_neg():
        raise BadParamError(f"{name}: expected a tensor that is not lazily negated, got one whose is_neg() is true")


def mark_written(out: torch.Tensor) -> None:
    """Tells autograd that a tensor it may have saved has changed, which calls past torch's operators do not. It never saves inference tensors."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """BadTensorDeviceError unless the tensor is on the device; BadParamError unless it is strided."""
    if tensor.device != device:
        raise BadTensorDeviceError(f"{name}: expected a tensor on {device}, got one on {tensor.device}")
    check_strided(name, tensor)


def check_size(fits: bool | torch.SymBool, message: Callable[[], str]) -> None:
    """BadTensorShapeError unless sizes fit. The check of symbolic sizes that cannot be decided is deferred to the run."""
    torch._check_with(BadTensorShapeError, fits, message)


def is_plain_cpu(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a strided CPU tensor of torch's own types: only its dtype, shape and strides can be wrong."""
    return tensor.is_cpu and type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_nested


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.numel() == 0:
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the tensors share memory, or lie between each other's elements."""
    begin, end = _bytes_of(one)
    other_begin, other_end = _bytes_of(other)
    return begin < other_end and other_begin < end


def same_place(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the elements of tensors of one shape are the same memory. Strides of dimensions of size 1 mean nothing."""
    strides = zip(one.shape, one.stride(), other.stride(), strict=True)
    return one.data_ptr() == other.data_ptr() and all(size == 1 or stride == of_other for size, stride, of_other in strides)


def has_shape(tensor: torch.Tensor, *forms: Sequence[int]) -> bool:
    """Whether the tensor has one of the shapes. Sizes are compared one by one, the last one first, so that symbolic sizes get few guards."""
    shape = tensor.shape
    return any(len(shape) == len(form) and all(a == b for a, b in zip(shape[::-1], form[::-1], strict=True)) for form in forms)


def has_address(tensor: object) -> bool:
    """Whether it is a tensor whose address is that of its elements: also of a subclass that wraps no other tensor."""
    plain = isinstance(tensor, torch.Tensor) and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return plain and not tensor.is_meta and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def check_overlap(out: torch.Tensor, names: Sequence[str], inputs: Sequence[torch.Tensor | None]) -> None:
    """BadParamError if out aliases an input."""
    for name, tensor in zip(names, inputs):
        if tensor is not None and overlap(out, tensor):
            raise BadParamError(f"out: expected memory apart from every input, got an overlap with {name}")


# The C core's name of a dtype that its interface does not have.
_UNKNOWN_DTYPE = "an unknown dtype"


def name_dtype(error: BaseException, **arguments) -> BaseException:
    """The error, with torch's name in place of "an unknown dtype".

    arguments: tensors or TensorDescs by the name with which the message begins; None: absent.
    """
    text = str(error)
    if isinstance(error, NotImplementedError):  # torch's error for a layout that is not supported here
        for name, tensor in arguments.items():
            if isinstance(tensor, torch.Tensor) and not is_strided(tensor):
                return not_strided(name, tensor)
    if not isinstance(error, BadTensorDtypeError) or _UNKNOWN_DTYPE not in text:
        return error
    dtype = getattr(arguments.get(text.partition(":")[0]), "dtype", None)
    return error if dtype is None else BadTensorDtypeError(text.replace(_UNKNOWN_DTYPE, str(dtype).removeprefix("torch.")))
