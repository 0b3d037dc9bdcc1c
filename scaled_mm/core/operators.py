"""`torch.ops.scaled_mm`: schemas, fake implementations, and the CPU backend's registration.

CUDA implementations come from csrc/torch, through the stable ABI, and are loaded on first use with CUDA tensors: until
then the implementation below serves every device and loads them.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensor

from scaled_mm.core import binding, checks, fast
from scaled_mm.errors import (
    BadParamError,
    BadTensorDeviceError,
    BadTensorDtypeError,
    BadTensorShapeError,
    DeviceNotSupportedError,
    InternalError,
    NullPointerError,
    ScaledMMError,
)

if TYPE_CHECKING:
    from scaled_mm.core.descriptor import Descriptor

_library = torch.library.Library("scaled_mm", "DEF")
_library.define(
    "scaled_mm(Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor? bias, Tensor? a_zero_point, "
    "Tensor? b_zero_point, ScalarType out_dtype, Tensor? a_row_sums=None, Tensor? b_column_sums=None, bool constant_b=False) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
_library.define(
    "scaled_mm_out(Tensor(a!) out, Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor? bias, "
    "Tensor? a_zero_point, Tensor? b_zero_point, Tensor? a_row_sums=None, Tensor? b_column_sums=None, bool constant_b=False) -> ()",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
_library.define(
    "calculate(int descriptor, Tensor(a!) out, Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor? bias, "
    "Tensor? a_zero_point, Tensor? b_zero_point, Tensor? workspace, int stream, Tensor? a_row_sums=None, "
    "Tensor? b_column_sums=None) -> ()"
)

scaled_mm = torch.ops.scaled_mm.scaled_mm.default
scaled_mm_out = torch.ops.scaled_mm.scaled_mm_out.default
calculate = torch.ops.scaled_mm.calculate.default

# The tensors of a product besides its output, in the order of the C interface.
INPUTS = ("a", "b", "a_scale", "b_scale", "bias", "a_zero_point", "b_zero_point", "a_row_sums", "b_column_sums")

# ---- errors -------------------------------------------------------------------------------------------------------------

_MARK = re.compile(r"\[scaled_mm status (\d+)\] (.*)", re.DOTALL)


def typed_error(error: Exception) -> BaseException:
    """The typed error inside an exception that crossed torch's dispatcher; a wrong argument type is a BadParamError."""
    if isinstance(error, ScaledMMError):
        return error
    text = str(error)
    if match := _MARK.search(text):
        return binding.failure(int(match.group(1)), match.group(2).split("\nException raised from")[0])
    if "CUDA out of memory" in text and not isinstance(error, torch.OutOfMemoryError):
        return torch.OutOfMemoryError(text)  # what it was before it crossed the stable ABI
    if re.match(r"scaled_mm::\w+\(\) (Expected|expected|is missing|takes|received)", text):
        return BadParamError(text.splitlines()[0])  # torch's own check of the schema names the argument
    return error


# What the C core calls a dtype that its interface has no number for.
_UNKNOWN_DTYPE = "an unknown dtype"


def name_dtype(error: BaseException, **arguments) -> BaseException:
    """The error, with torch's name of a dtype that the core does not know.

    arguments: tensors or TensorDescs by the name that the message begins with; None for an absent one.
    """
    text = str(error)
    if isinstance(error, NotImplementedError):  # torch has no such operator for a layout that nothing here takes
        for name, tensor in arguments.items():
            if isinstance(tensor, torch.Tensor) and not checks.is_strided(tensor):
                return checks.not_strided(name, tensor)
    if not isinstance(error, BadTensorDtypeError) or _UNKNOWN_DTYPE not in text:
        return error
    dtype = getattr(arguments.get(text.partition(":")[0]), "dtype", None)
    return error if dtype is None else BadTensorDtypeError(text.replace(_UNKNOWN_DTYPE, str(dtype).removeprefix("torch.")))


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """BadTensorDeviceError unless the tensor is a strided one on the device."""
    if tensor.device != device:
        raise BadTensorDeviceError(f"{name}: expected a tensor on {device}, got one on {tensor.device}")
    checks.check_strided(name, tensor)


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.numel() == 0:
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def check_overlap(tensors, names: Sequence[str] = INPUTS) -> None:
    """BadParamError if the first tensor, the output, shares memory with one of the others (None is skipped)."""
    out_begin, out_end = _bytes_of(tensors[0])
    for name, tensor in zip(names, tensors[1:]):
        if tensor is not None:
            begin, end = _bytes_of(tensor)
            if begin < out_end and out_begin < end:
                raise BadParamError(f"out: expected memory apart from every input, got an overlap with {name}")


# ---- autograd ---------------------------------------------------------------------------------------------------------

# Nothing here is differentiated. Without these lines torch would mark an output as if it were, and only warn at backward.
for _name in ("scaled_mm", "scaled_mm_out", "calculate"):
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")

# ---- loading the CUDA implementations -----------------------------------------------------------------------------------

_loading = threading.Lock()


@functools.cache
def _load_once() -> None:
    from scaled_mm.core import binding
    from scaled_mm.jit.library import torch_library

    if torch.version.cuda is None:
        raise DeviceNotSupportedError(f"device: expected a torch with CUDA, got torch {torch.__version__}")
    binding.library()  # the operators link to its symbols
    torch.ops.load_library(str(torch_library()))
    fast.load()


def load_cuda_operators() -> None:
    """Register the CUDA implementations, compiling them first if nobody has (seconds, once per machine)."""
    with _loading:
        _load_once()


# ---- implementations for every other device, and for CUDA until it is loaded ----------------------------------------------


_NAMES = (*INPUTS, "out", "workspace")


def _common_device(*tensors: torch.Tensor | None, names: Sequence[str] = _NAMES, required: int = 2) -> torch.device:
    """The device of all tensors, given in the order of `names`; BadTensorDeviceError names the one that is elsewhere."""
    for name, tensor in zip(names[:required], tensors):  # torch lets None through where a schema says Tensor
        if tensor is None:
            raise NullPointerError(f"{name}: expected a tensor, got None")
    device = tensors[0].device
    for name, tensor in zip(names, tensors):
        if tensor is not None:
            check_device(name, tensor, device)
    return device


def _runs_on_cuda(*tensors: torch.Tensor | None, names: Sequence[str] = _NAMES, required: int = 2) -> bool:
    """Whether to hand over to the CUDA implementation, now loaded; False for the CPU, a typed error for the rest."""
    device = _common_device(*tensors, names=names, required=required)
    if device.type == "cuda":
        load_cuda_operators()
        return True
    if device.type != "cpu":
        raise DeviceNotSupportedError(f"a: expected a CUDA or CPU tensor, got one on {device}")
    return False


@functools.cache
def _cpu_handle():
    from scaled_mm.core.descriptor import Handle

    return Handle("cpu")


def _run_on_cpu(out, *inputs: torch.Tensor | None) -> None:
    tensors = (out, *inputs)
    try:
        plan = _cpu_plan(*[None if t is None else (t.shape, t.dtype, t.stride()) for t in tensors])
    except BadTensorDtypeError as error:
        raise name_dtype(error, **dict(zip(("out", *INPUTS), tensors))) from None
    plan.calculate(*tensors[:6], a_zero_point=inputs[5], b_zero_point=inputs[6], a_row_sums=inputs[7], b_column_sums=inputs[8])


@functools.lru_cache(maxsize=256)
def _cpu_plan(*described: tuple | None) -> Descriptor:
    """By shape, dtype and strides of each tensor. Kept: on a CPU planning takes longer than a small product."""
    from scaled_mm.core.descriptor import TensorDesc, create_descriptor

    return create_descriptor(_cpu_handle(), **{name: d and TensorDesc(*d) for name, d in zip(("out", *INPUTS), described)})


def _are_plain_cpu(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether nothing stands against a product of these on a CPU but what their sizes say; the first two are required."""
    for tensor in tensors:
        if tensor is not None and not (tensor.is_cpu and type(tensor) in checks.PLAIN and tensor.layout is torch.strided and not tensor.is_nested):
            return False
    return tensors[0] is not None and tensors[1] is not None


def product_shape(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    """Of the output: (M, N), or (B, M, N) if a or b has a batch; BadTensorShapeError for operands of other dimensions."""
    for name, tensor, shape in (("a", a, "M, K"), ("b", b, "K, N")):
        if tensor.dim() not in (2, 3):
            got = f"{tensor.dim()}: {list(tensor.shape)}"
            raise BadTensorShapeError(f"{name}: expected 2 dimensions [{shape}] or 3 [B, {shape}], got {got}")
    matrix = (a.shape[-2], b.shape[-1])
    if a.dim() == b.dim() == 2:
        return matrix
    shares_a = a.dim() == 2 or (b.dim() == 3 and a.shape[0] == 1)
    return ((b if shares_a else a).shape[0], *matrix)


def _scaled_mm_any(a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, out_dtype, a_row_sums=None, b_column_sums=None, constant_b=False):
    inputs = (a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums)
    if not _are_plain_cpu(inputs) and _runs_on_cuda(*inputs):
        return scaled_mm(a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, out_dtype, a_row_sums, b_column_sums, constant_b)
    out = torch.empty(product_shape(a, b), dtype=out_dtype, device="cpu")
    _run_on_cpu(out, *inputs)
    return out


def _scaled_mm_out_any(out, a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums=None, b_column_sums=None, constant_b=False):
    inputs = (a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums)
    if not _are_plain_cpu((*inputs, out)) and _runs_on_cuda(*inputs, out):
        return scaled_mm_out(out, *inputs, constant_b)
    return _run_on_cpu(out, *inputs)


def _calculate_any(descriptor, out, a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, workspace, stream, a_row_sums=None, b_column_sums=None):
    _common_device(a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums, out, workspace)
    raise InternalError("calculate: torch.ops.scaled_mm.calculate takes CUDA tensors; use Descriptor.calculate")


_library.impl("scaled_mm", _scaled_mm_any, "CompositeExplicitAutograd")
_library.impl("scaled_mm_out", _scaled_mm_out_any, "CompositeExplicitAutograd")
_library.impl("calculate", _calculate_any, "CompositeExplicitAutograd")


# ---- fake implementations: shapes without data, for torch.compile -----------------------------------------------------------


def check_size(fits: bool | torch.SymBool, message: Callable[[], str]) -> None:
    """BadTensorShapeError unless sizes fit; what cannot be known of symbols is left to the run."""
    torch._check_with(BadTensorShapeError, fits, message)


def check_meta(create: Callable, out: torch.Tensor, inputs: dict[str, torch.Tensor | None]) -> None:
    """The core's validation of a product of tensors on the meta device, by `create`, which makes a descriptor of such products.

    Not while a compiler traces: its sizes may be symbols, and what is wrong has its typed error when the graph runs, as Dynamo hides those
    that are raised here.
    """
    if out.device.type != "meta" or isinstance(out, FakeTensor):
        return
    from scaled_mm.core.descriptor import TensorDesc

    tensors = {"out": out, **inputs}
    described = {name: t if t is None else TensorDesc(t.shape, t.dtype, t.stride()) for name, t in tensors.items()}
    try:
        create(_cpu_handle(), **described).destroy()
    except BadTensorDtypeError as error:
        raise name_dtype(error, **tensors) from None


def _check_meta(out, *inputs) -> None:
    from scaled_mm.core.descriptor import create_descriptor

    check_meta(create_descriptor, out, dict(zip(INPUTS, inputs)))


def _check_fake(a, b, *others) -> tuple[int, ...]:
    if _common_device(a, b, *others).type == "cuda" and torch.version.cuda is not None:
        load_cuda_operators()  # traced now, run later: the graph calls the operator without passing through here
    shape = product_shape(a, b)
    check_size(a.shape[-1] == b.shape[-2], lambda: f"b: expected [K, N] with K = {a.shape[-1]} as in a [M, K], got {list(b.shape)}")
    if b.dim() == 3:
        fits = b.shape[0] == 1 or b.shape[0] == shape[0]
        check_size(fits, lambda: f"b: expected [B, K, N] with B = {shape[0]} as in a [B, M, K], or 1, got {list(b.shape)}")
    return shape


@torch.library.register_fake("scaled_mm::scaled_mm")
def _scaled_mm_fake(a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, out_dtype, a_row_sums=None, b_column_sums=None, constant_b=False):
    inputs = (a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums)
    out = a.new_empty(_check_fake(*inputs), dtype=out_dtype)
    _check_meta(out, *inputs)
    return out


@torch.library.register_fake("scaled_mm::scaled_mm_out")
def _scaled_mm_out_fake(out, a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums=None, b_column_sums=None, constant_b=False):
    inputs = (a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums)
    _check_fake(*inputs, out)
    _check_meta(out, *inputs)


@torch.library.register_fake("scaled_mm::calculate")
def _calculate_fake(
    descriptor, out, a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, workspace, stream, a_row_sums=None, b_column_sums=None
):
    _check_fake(a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums, out, workspace)
