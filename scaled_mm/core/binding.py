"""ctypes binding of the C interface (`csrc/include/scaled_mm/scaled_mm.h`). Every status becomes a typed error here.

The library is loaded on first use, not at import; loading it touches no GPU.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scaled_mm.errors import InternalError, KernelNotBuiltError, ScaledMMError, Status, error_for
from scaled_mm.kernels.dtypes import C_DTYPES as DTYPES
from scaled_mm.kernels.dtypes import GGUF_MODES

if TYPE_CHECKING:
    import torch

    from scaled_mm.tables.schema import TileTable

ABI_VERSION = 14
_INT64_MAX = 2**63 - 1
MAX_DIMS = 3
DEVICE_CPU, DEVICE_CUDA = 0, 1
UNKNOWN_DTYPE = -1
TENSOR_CONSTANT, TENSOR_PACKED = 1, 2


class TensorDescC(ctypes.Structure):
    _fields_ = [
        ("dtype", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("shape", ctypes.c_int64 * MAX_DIMS),
        ("strides", ctypes.c_int64 * MAX_DIMS),
        ("alignment", ctypes.c_int64),
        ("flags", ctypes.c_int64),
    ]


class HandleInfoC(ctypes.Structure):
    _fields_ = [
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("compute_capability", ctypes.c_int32),
        ("multiprocessors", ctypes.c_int32),
        ("max_shared_memory", ctypes.c_int32),
        ("padding_", ctypes.c_int32),
        ("memory_bandwidth", ctypes.c_double),
        ("arch", ctypes.c_char * 16),
    ]


class _TimeModelC(ctypes.Structure):
    _fields_ = [
        ("unit_m", ctypes.c_int64),
        ("unit_n", ctypes.c_int64),
        ("unit_k", ctypes.c_int64),
        ("blocks", ctypes.c_int32),
        ("cluster", ctypes.c_int32),
        ("resident", ctypes.c_int32),
        ("least_steps", ctypes.c_int32),
        ("epilogue_overlaps", ctypes.c_int32),
        ("most_parts", ctypes.c_int32),
        ("start_us", ctypes.c_double),
        ("step_us", ctypes.c_double),
        ("tile_us", ctypes.c_double),
        ("memory", ctypes.c_double),
        ("wait_us", ctypes.c_double),
        ("l2", ctypes.c_double),
        ("sharing_us", ctypes.c_double),
        ("two_tiles_us", ctypes.c_double),
    ]


class _TableRowC(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("align_a", ctypes.c_int32),
        ("align_b", ctypes.c_int32),
        ("align_out", ctypes.c_int32),
        ("store_bytes", ctypes.c_int32),
        ("time", _TimeModelC),
        ("block_size", ctypes.c_int32),
        ("padding_", ctypes.c_int32),
    ]


class _TableBucketC(ctypes.Structure):
    _fields_ = [
        ("m_max", ctypes.c_int64),
        ("n_max", ctypes.c_int64),
        ("k_max", ctypes.c_int64),
        ("row", ctypes.c_int32),
        ("flags", ctypes.c_int32),
        ("m_min", ctypes.c_int64),
        ("n_min", ctypes.c_int64),
        ("k_min", ctypes.c_int64),
    ]


class _TableModeC(ctypes.Structure):
    _fields_ = [("m_max", ctypes.c_int64), ("mode", ctypes.c_int32), ("padding_", ctypes.c_int32)]


class _TableC(ctypes.Structure):
    _fields_ = [
        ("arch", ctypes.c_char_p),
        ("source", ctypes.c_char_p),
        ("rows", ctypes.POINTER(_TableRowC)),
        ("num_rows", ctypes.c_int64),
        ("buckets", ctypes.POINTER(_TableBucketC)),
        ("num_buckets", ctypes.c_int64),
        ("fallback_row", ctypes.c_int32),
        ("tuned", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("padding_", ctypes.c_int32),
        ("modes", ctypes.POINTER(_TableModeC)),
        ("num_modes", ctypes.c_int64),
    ]


class KernelChoiceC(ctypes.Structure):
    _fields_ = [
        ("row", ctypes.c_char_p),
        ("reason", ctypes.c_char_p),
        ("bucket", ctypes.c_int32),
        ("tuned", ctypes.c_int32),
        ("better", ctypes.c_char_p),
    ]


_PROVIDER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p)
_handle, _tensor = ctypes.c_void_p, ctypes.POINTER(TensorDescC)
_operands = ctypes.POINTER(_tensor)
_SIGNATURES = {
    "scaledMMCreateHandle": (ctypes.POINTER(_handle), ctypes.c_int, ctypes.c_int32, ctypes.c_char_p),
    "scaledMMDestroyHandle": (_handle,),
    "scaledMMGetHandleInfo": (_handle, ctypes.POINTER(HandleInfoC)),
    "scaledMMLoadKernels": (ctypes.c_char_p,),
    "scaledMMRegisterTable": (ctypes.POINTER(_TableC),),
    "scaledMMSetKernelProvider": (_PROVIDER, ctypes.c_void_p),
    "scaledMMSetLastError": (ctypes.c_int, ctypes.c_char_p),
    "scaledMMCreateDescriptor": (_handle, ctypes.POINTER(_handle), ctypes.c_int32, _operands, ctypes.c_int32, ctypes.c_int32, ctypes.c_char_p),
    "scaledMMCreateRowwiseDescriptor": (
        *(_handle, ctypes.POINTER(_handle), ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.c_double, _operands, ctypes.c_int32),
    ),
    "scaledMMCalculate": (
        *(_handle, ctypes.c_int32, ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int32, ctypes.c_void_p),
    ),
    "scaledMMGetWorkspaceSize": (_handle, ctypes.POINTER(ctypes.c_size_t)),
    "scaledMMGetKernel": (_handle, ctypes.POINTER(KernelChoiceC)),
    "scaledMMCheckTensors": (_handle, ctypes.c_int32, _operands, ctypes.c_int32),
    "scaledMMDestroyDescriptor": (_handle,),
}


@functools.cache
def library() -> ctypes.CDLL:
    """The C core, loaded once, with Python as its kernel provider. Its symbols are global: the torch operators use them.

    Raises KernelNotBuiltError if it cannot be built or loaded.
    """
    from scaled_mm.jit.library import core_library

    path = core_library()
    try:
        lib = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:  # such as a file system that is mounted noexec
        raise KernelNotBuiltError(
            f"{path}: expected a library that can be loaded: {error}; SCALED_MM_CACHE_DIR names another folder for it"
        ) from error
    for name, arguments in _SIGNATURES.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    lib.scaledMMGetLastErrorMessage.restype = ctypes.c_char_p
    lib.scaledMMGetOperandName.argtypes, lib.scaledMMGetOperandName.restype = (ctypes.c_int32, ctypes.c_int32), ctypes.c_char_p
    lib.scaledMMGetAbiVersion.restype = ctypes.c_int32
    if (version := lib.scaledMMGetAbiVersion()) != ABI_VERSION:
        raise InternalError(f"{path}: expected ABI version {ABI_VERSION}, got {version}")
    if status := lib.scaledMMSetKernelProvider(_provider, None):
        raise error_for(status, "the core refused the kernel provider")
    return lib


_interrupted = threading.local()


def failure(status: int, message: str | None = None) -> BaseException:
    """The exception for a status that a call on this thread returned: its typed error, or the interrupt that stopped the call.

    message: of the error; default: the core's last message.
    """
    interrupt = getattr(_interrupted, "error", None)
    if interrupt is not None:
        _interrupted.error = None
        return interrupt
    return error_for(status, library().scaledMMGetLastErrorMessage().decode(errors="replace") if message is None else message)


def call(name: str, *arguments) -> None:
    """Calls a function of the C interface. Raises the typed error of its status."""
    lib = library()
    status = getattr(lib, name)(*arguments)
    if status != Status.SUCCESS:
        raise failure(status)


# ---- providing tables and kernels ---------------------------------------------------------------------------------------


_tables: dict[str, TileTable] = {}  # by architecture, as they were last read: reading one takes 50 ms


def load_kernels(path: Path) -> None:
    """Loads a library of kernels into the core."""
    call("scaledMMLoadKernels", os.fsencode(path))


def _provide(arch: str, row: str | None, out_dtype: int, when: int = 0) -> None:
    from scaled_mm.jit import codegen, dispatch
    from scaled_mm.jit import library as build
    from scaled_mm.jit.provide import When, provide

    if row is None or when != When.BUILT or arch not in _tables:
        _tables[arch] = dispatch.callable_table(arch)
    table = _tables[arch]
    if row is None:
        register_table(table)
        if whole := build.arch_library(dispatch.machine_table(arch) if table.tuned else table):
            load_kernels(whole)
        return
    suffix = next((name for name, one in codegen.BUILT_FOR.items() if one.code == out_dtype), None)
    provide(table, (row, suffix), When(when), load_kernels)


def compile_fallbacks(arch: str) -> None:
    """Starts to compile the architecture's fallback in the background, so that a first product waits less."""
    from scaled_mm.jit.provide import start_fallbacks

    start_fallbacks(arch, load_kernels)


def _text(value: object) -> bytes:
    """Any value as bytes for the core's messages. A file name may contain bytes that are not text."""
    return str(value).encode(errors="backslashreplace").replace(b"\0", b"\\0")


@_PROVIDER
def _provider(arch: bytes, row: bytes | None, out_dtype: int, when: int, _user: int | None) -> int:
    # Called by the core. No exception may cross C, so it becomes a status and a message, which `call` raises again.
    try:
        _provide(arch.decode(), row.decode() if row else None, out_dtype, when)
    except ScaledMMError as error:
        return library().scaledMMSetLastError(error.status, _text(error))
    except BaseException as error:  # also an interrupt while a kernel compiles: `failure` raises it again
        if not isinstance(error, Exception):
            _interrupted.error = error
        return library().scaledMMSetLastError(Status.INTERNAL_ERROR, _text(f"{type(error).__name__}: {error}"))
    return Status.SUCCESS


def register_table(table: TileTable) -> None:
    """Gives the core a tile table with its sections. It replaces the architecture's previous one."""
    for kind, section in enumerate(table.by_kind):
        if section:
            _register(section, kind)


def _register(table: TileTable, kind: int) -> None:
    from scaled_mm.tables import FASTEST, configs_dir, time_fields

    models = [time_fields(table, row) for row in table.rows]
    rows = (_TableRowC * len(table.rows))(
        *(
            _TableRowC(row.name.encode(), *row.alignment, row.store_bytes, _TimeModelC(*model), row.block_size)
            for row, model in zip(table.rows, models)
        )
    )
    index = {FASTEST: -1} | {row.name: i for i, row in enumerate(table.rows)}
    buckets = (_TableBucketC * len(table.buckets))(
        *(
            _TableBucketC(*(_INT64_MAX if bound is None else bound for bound in (b.m, b.n, b.k)), index[b.kernel], b.flags, *b.least)
            for b in table.buckets
        )
    )
    modes = (_TableModeC * len(table.auto))(*(_TableModeC(_INT64_MAX if r.m is None else r.m, GGUF_MODES.index(r.mode)) for r in table.auto))

    # `desc.kernel.reason` shows the name of a shipped table, and the path of any other.
    path = Path(table.source)
    source = path.relative_to(configs_dir()) if path.is_relative_to(configs_dir()) else path
    call(
        "scaledMMRegisterTable",
        ctypes.byref(
            _TableC(
                table.arch.encode(),
                _text(source.as_posix()),
                rows,
                len(rows),
                buckets,
                len(buckets),
                index[table.fallback],
                table.tuned,
                kind,
                0,
                modes,
                len(modes),
            )
        ),
    )


# ---- descriptors ----------------------------------------------------------------------------------------------------------


def operands(descs: Sequence[TensorDescC | None]) -> tuple[object, int]:
    """(array, count) of a product's operands for the C functions; None: absent."""
    return (_tensor * len(descs))(*(desc if desc is None else ctypes.pointer(desc) for desc in descs)), len(descs)


@functools.cache
def operand_names(product: int) -> tuple[str, ...]:
    """The names of the operands of a kind of product, in the order of the C interface."""
    lib, names = library(), []
    while (name := lib.scaledMMGetOperandName(product, len(names))) is not None:
        names.append(name.decode())
    return tuple(names)


# ---- tensors ------------------------------------------------------------------------------------------------------------


@functools.cache
def _dtype_codes() -> dict[torch.dtype | str, int]:
    import torch

    return {getattr(torch, name, name): code for name, code in DTYPES.items()}  # a GGUF format has its name as key


def tensor_desc(dtype: torch.dtype | str, shape: tuple[int, ...], strides: tuple[int, ...], alignment: int, flags: int) -> TensorDescC:
    """A C tensor descriptor. More than MAX_DIMS dimensions and unknown dtypes are passed on; the core refuses them."""
    kept = min(len(shape), MAX_DIMS)
    desc = TensorDescC(_dtype_codes().get(dtype, UNKNOWN_DTYPE), len(shape), alignment=alignment, flags=flags)
    desc.shape[:kept] = shape[:kept]
    desc.strides[:kept] = strides[:kept]
    return desc
