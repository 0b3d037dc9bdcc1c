"""cuBLASLt's INT8 product, called directly: `torch._int_mm` gives it no workspace, which excludes its faster kernels.

The numbers of enumerations and the size of the heuristic's result are those of cublasLt.h and library_types.h of CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from scaled_mm.bench.int8.inputs import Inputs, epilogue
from scaled_mm.measure.peer import Peer, TensorCall

WORKSPACE_BYTES = 32 << 20  # what cuBLAS itself takes on Hopper
_COMPUTE_32I, _R_8I, _R_32I = 72, 3, 10
_DESC_TRANSA, _OP_T, _PREF_MAX_WORKSPACE_BYTES = 3, 1, 1


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class CublasLt(Peer):
    """`cublasLtMatmul`, int32 out, no epilogue, the first kernel of its heuristic with a workspace of 32 MB."""

    name, label = "cublaslt", "cublasLtMatmul, int32 out, no epilogue, 32 MB of workspace"
    int8 = True

    def __init__(self) -> None:
        self._library: ctypes.CDLL | None = None
        self._handle = ctypes.c_void_p()
        self._created: list[tuple[str, ctypes.c_void_p]] = []  # what `release` destroys

    def available(self, device: torch.device) -> str | None:
        if self._library is None:
            name = f"libcublasLt.so.{str(torch.version.cuda).split('.')[0]}"  # torch has loaded it, so no path is needed
            try:
                self._library = ctypes.CDLL(name)
            except OSError as error:
                return str(error)
            self._call("Create", ctypes.byref(self._handle))
        return None

    def prepare(self, inputs: Inputs) -> list[TensorCall]:
        # cuBLASLt is column-major: out [M, N] is its N x M matrix W^T a.
        M, N, K = inputs.case.M, inputs.case.N, inputs.case.K
        outs = inputs.make_outputs(M, torch.int32)
        operation = self._made("MatmulDesc", _COMPUTE_32I, _R_32I)
        self._set("MatmulDescSetAttribute", operation, _DESC_TRANSA, ctypes.c_int32(_OP_T))
        weight, a, out = (self._layout(dtype, *sizes) for dtype, *sizes in ((_R_8I, K, N, K), (_R_8I, K, M, K), (_R_32I, N, M, N)))
        preference = self._made("MatmulPreference")
        self._set("MatmulPreferenceSetAttribute", preference, _PREF_MAX_WORKSPACE_BYTES, ctypes.c_uint64(WORKSPACE_BYTES))
        found, count = _Heuristic(), ctypes.c_int()
        self._call("MatmulAlgoGetHeuristic", self._handle, operation, weight, a, out, out, preference, 1, ctypes.byref(found), ctypes.byref(count))
        if count.value == 0 or found.state != 0:
            raise RuntimeError(f"cublasLtMatmulAlgoGetHeuristic found no INT8 kernel for M = {M}, N = {N}, K = {K}")
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.device)
        one, zero = ctypes.c_int32(1), ctypes.c_int32(0)

        def bind(i: int) -> TensorCall:
            b, result = inputs.b(i), outs[inputs.slot(i)]

            def call() -> torch.Tensor:
                operands = (_pointer(b), weight, _pointer(inputs.a), a, ctypes.byref(zero), _pointer(result), out, _pointer(result), out)
                tail = (ctypes.byref(found.algorithm), _pointer(workspace), ctypes.c_size_t(WORKSPACE_BYTES))
                stream = ctypes.c_void_p(torch.cuda.current_stream(inputs.device).cuda_stream)
                self._call("Matmul", self._handle, operation, ctypes.byref(one), *operands, *tail, stream)
                return result

            return call

        return inputs.calls(bind)

    def finish(self, output: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        return epilogue(output, inputs, 0)

    def release(self) -> None:
        while self._created:
            kind, made = self._created.pop()
            self._call(f"{kind}Destroy", made)

    def _call(self, name: str, *arguments: Any) -> None:
        """cublasLt<name>. RuntimeError unless the status is success."""
        if status := getattr(self._library, f"cublasLt{name}")(*arguments):
            raise RuntimeError(f"cublasLt{name}: status {status}")

    def _made(self, kind: str, *arguments: Any) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._call(f"{kind}Create", ctypes.byref(made), *arguments)
        self._created.append((kind, made))
        return made

    def _set(self, name: str, of: ctypes.c_void_p, attribute: int, value: Any) -> None:
        self._call(name, of, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))

    def _layout(self, dtype: int, rows: int, columns: int, stride: int) -> ctypes.c_void_p:
        return self._made("MatrixLayout", dtype, ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(stride))


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
