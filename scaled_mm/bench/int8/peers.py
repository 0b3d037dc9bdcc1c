"""Every implementation behind one small interface: ours, torch's, vLLM's, SGLang's.

A peer says why it cannot run (`available`), turns a case's inputs into callables (`prepare`) and brings its output to
the product that all are compared by (`finish`). What it raises on a case belongs to the record of that case.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import torch

from scaled_mm.bench.int8.inputs import OUT_DTYPE, Inputs

TensorCall = Callable[[], torch.Tensor]

VLLM_LIB_VARIABLE = "SCALED_MM_VLLM_LIB"
SGL_LIB_VARIABLE = "SCALED_MM_SGL_LIB"

OURS = "ours"
OURS_WITH_TENSORS = "ours_tensor"
#: Other libraries' INT8 kernels with the same fused epilogue: the speed-up is over the better of these.
RIVALS = ("vllm", "sgl")


class Peer:
    """One implementation. `devices`: where it exists. `int8`: whether it reads the INT8 inputs themselves."""

    name: str
    label: str
    devices: tuple[str, ...] = ("cuda",)
    int8 = False

    def available(self, device: torch.device) -> str | None:
        """None when it can run on `device`, else the reason why not."""
        return None

    def prepare(self, inputs: Inputs) -> list[TensorCall]:
        """One zero-argument callable per weight set; each enqueues one product and returns its raw output tensor.

        Compiling, allocating and validating happen here, not in the callables.
        """
        raise NotImplementedError

    def finish(self, output: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """The scaled bfloat16 product [M, N] of set 0 from what its callable returned."""
        return output

    def overhead_calls(self, inputs: Inputs) -> dict[str, TensorCall]:
        """Label -> callable, for the host overhead of one call."""
        return {self.name: self.prepare(inputs)[0]}

    def details(self, inputs: Inputs) -> dict[str, str]:
        """What a reader of this case's result must know: `note`, `kernel`, `reason`."""
        return {}

    def release(self) -> None:
        """Frees what `prepare` made beyond the callables."""

    def version(self) -> str | None:
        """The version of the library behind it; None when it cannot be told."""
        return torch.__version__

    def library(self) -> str | None:
        """Name, size and digest of a library that was loaded from a given path."""
        return None


@functools.cache
def our_handle(device: torch.device):
    """The `scaled_mm.Handle` of a device, made once for all rows and cases."""
    from scaled_mm import Handle

    return Handle(str(device))


class Ours(Peer):
    """scaled_mm through a descriptor: one descriptor and one workspace a case, created before timing, and prepared weights.

    kernel: None for the tile table's choice, or the name of a row to force; then `name` is that row's.
    """

    label = "scaled_mm (this project), weights of sm.prepare_weight"
    devices: tuple[str, ...] = ("cuda", "cpu")
    int8 = True

    def __init__(self, kernel: str | None = None, name: str = OURS):
        self.name = name
        self._kernel = kernel
        self._descriptor = None

    def available(self, device: torch.device) -> str | None:
        from scaled_mm.errors import ScaledMMError

        try:
            our_handle(device)
        except ScaledMMError as error:
            return f"{type(error).__name__}: {error}"
        return None

    def weight(self, b: torch.Tensor):
        """What a call gets as b; on a CPU a prepared weight is nothing but sums that nobody reads here."""
        from scaled_mm import prepare_weight

        return prepare_weight(b) if b.is_cuda else b

    def prepare(self, inputs: Inputs) -> list[TensorCall]:
        from scaled_mm import create_descriptor

        self.release()
        a, a_scale = inputs.a, inputs.a_scale
        self._descriptor = descriptor = create_descriptor(
            our_handle(inputs.device),
            out=inputs.out(0),
            a=a,
            b=self.weight(inputs.b(0)),
            a_scale=a_scale,
            b_scale=inputs.b_scale(0),
            kernel=self._kernel,
        )
        workspace = None
        if descriptor.workspace_size:
            workspace = torch.empty(descriptor.workspace_size, dtype=torch.uint8, device=inputs.device)

        def make(i: int) -> TensorCall:
            out, b, b_scale = inputs.out(i), self.weight(inputs.b(i)), inputs.b_scale(i)

            def call() -> torch.Tensor:
                descriptor.calculate(out, a, b, a_scale, b_scale, workspace=workspace)
                return out

            return call

        return inputs.calls(make)

    def overhead_calls(self, inputs: Inputs) -> dict[str, TensorCall]:
        from scaled_mm import scaled_mm

        out, a, b = inputs.out(0), inputs.a, self.weight(inputs.b(0))
        a_scale, b_scale = inputs.a_scale, inputs.b_scale(0)
        return {
            f"{self.name}: desc.calculate": self.prepare(inputs)[0],
            f"{self.name}: scaled_mm(out=)": lambda: scaled_mm(a, b, a_scale, b_scale, out_dtype=OUT_DTYPE, out=out),
            f"{self.name}: scaled_mm": lambda: scaled_mm(a, b, a_scale, b_scale, out_dtype=OUT_DTYPE),
        }

    def details(self, inputs: Inputs) -> dict[str, str]:
        choice = self._descriptor.kernel
        return {"kernel": str(choice.row), "reason": str(choice.reason)}

    def release(self) -> None:
        if self._descriptor is not None:
            self._descriptor.destroy()
            self._descriptor = None

    def version(self) -> str | None:
        return _version("scaled_mm")  # None in a checkout that is not installed: the environment has the commit


class OursWithTensors(Ours):
    """The same with ordinary tensors as weights: a kernel waits for the preceding one before it reads them."""

    label = "scaled_mm (this project), weights as ordinary tensors"
    devices = ("cuda",)

    def __init__(self):
        super().__init__(None, OURS_WITH_TENSORS)

    def weight(self, b: torch.Tensor):
        return b


class Bf16(Peer):
    """`torch.mm` of the dequantized matrices."""

    name, label, devices = "bf16", "torch.mm, bfloat16", ("cuda", "cpu")

    def prepare(self, inputs: Inputs) -> list[TensorCall]:
        a, weights = inputs.a_bf16, inputs.weights.bf16
        return inputs.calls(lambda i: _bind_out(torch.mm, a, weights[i].t(), out=inputs.out(i)))


class Fp32(Peer):
    """`torch.mm` in float32: what a CPU without bfloat16 units would run."""

    name, label, devices = "fp32", "torch.mm, float32", ("cpu",)

    def prepare(self, inputs: Inputs) -> list[TensorCall]:
        a, weights = inputs.a_fp32, inputs.weights.fp32
        outs = inputs.make_outputs(inputs.case.M, torch.float32)
        return inputs.calls(lambda i: _bind_out(torch.mm, a, weights[i].t(), out=outs[inputs.slot(i)]))

    def finish(self, output: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        return output.to(OUT_DTYPE)


class IntMM(Peer):
    """`torch._int_mm`: raw int32 accumulators, no epilogue; on CUDA it refuses M <= 16, so a is padded with rows."""

    name, label = "intmm", "torch._int_mm, int32 out, no epilogue"
    int8 = True

    MIN_M = 17  # torch's own limit on CUDA
    PADDED_M = 32

    def rows(self, M: int) -> int:
        """Rows that are multiplied in place of M."""
        return M if M >= self.MIN_M else self.PADDED_M

    def prepare(self, inputs: Inputs) -> list[TensorCall]:
        rows = self.rows(inputs.case.M)
        a = inputs.a
        if rows != inputs.case.M:
            a = a.repeat(-(-rows // inputs.case.M), 1)[:rows].contiguous()
        outs = inputs.make_outputs(rows, torch.int32)
        return inputs.calls(lambda i: _bind_out(torch._int_mm, a, inputs.b(i), out=outs[inputs.slot(i)]))

    def finish(self, output: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        return epilogue(output[: inputs.case.M], inputs, 0)

    def details(self, inputs: Inputs) -> dict[str, str]:
        rows = self.rows(inputs.case.M)
        return {} if rows == inputs.case.M else {"note": f"M padded to {rows}: torch._int_mm refuses M <= 16 on CUDA"}


class IntMMEpilogue(Peer):
    """`torch._int_mm` and the scales in separate operations: INT8 on a CPU without this project."""

    name, label, devices = "intmm_epilogue", "torch._int_mm, then the scales", ("cpu",)
    int8 = True

    def prepare(self, inputs: Inputs) -> list[TensorCall]:
        return inputs.keeping(lambda i: epilogue(torch._int_mm(inputs.a, inputs.b(i)), inputs, i))

    def details(self, inputs: Inputs) -> dict[str, str]:
        from scaled_mm.cpu.integer_product import int_mm_is_exact

        return {} if int_mm_is_exact() else {"note": "torch._int_mm saturates on this CPU: its results are not exact"}


class Fp8Row(Peer):
    """`torch._scaled_mm`: float8_e4m3fn operands, one scale per row of a and per column of b."""

    name, label = "fp8row", "torch._scaled_mm, float8_e4m3fn, row-wise"

    def available(self, device: torch.device) -> str | None:
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            return f"FP8 needs compute capability 8.9, this GPU has {capability[0]}.{capability[1]}"
        return None

    def prepare(self, inputs: Inputs) -> list[TensorCall]:
        a, a_scale, weights = inputs.a_fp8, inputs.a_fp8_scale, inputs.weights
        return inputs.calls(
            lambda i: _bind_out(
                torch._scaled_mm,
                a,
                weights.fp8[i].t(),
                scale_a=a_scale,
                scale_b=weights.fp8_scale[i],
                out_dtype=OUT_DTYPE,
                use_fast_accum=True,
                out=inputs.out(i),
            )
        )


class _LibraryPeer(Peer):
    """A peer whose kernels are in a torch extension: of an installed package, or at a path that the caller gives."""

    int8 = True
    package: str
    namespace: str
    operator: str

    def __init__(self, path: str | None = None):
        self._path = path
        self._loaded = False

    def available(self, device: torch.device) -> str | None:
        if self._loaded:
            return None
        try:
            reason = self._load_path(self._path) if self._path else self._load_package()
        except (ImportError, OSError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        if reason is None and not hasattr(getattr(torch.ops, self.namespace), self.operator):
            reason = f"torch.ops.{self.namespace} has no {self.operator} after loading"
        self._loaded = reason is None
        return reason

    def _load_path(self, path: str) -> str | None:
        if not Path(path).is_file():
            return f"no such file: {path}"
        torch.ops.load_library(path)
        return None

    def _load_package(self) -> str | None:
        raise NotImplementedError

    def _packet(self):
        return getattr(getattr(torch.ops, self.namespace), self.operator).default

    def version(self) -> str | None:
        return None if self._path else _version(self.package)

    def library(self) -> str | None:
        if not self._path or not Path(self._path).is_file():
            return None
        content = Path(self._path).read_bytes()
        return f"{Path(self._path).name}, {len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()[:16]}"


class Vllm(_LibraryPeer):
    """vLLM's `cutlass_scaled_mm`."""

    name, label = "vllm", "vLLM cutlass_scaled_mm, INT8"
    package, namespace, operator = "vllm", "_C", "cutlass_scaled_mm"

    def _load_package(self) -> str | None:
        # The extension alone, not `import vllm`: that starts loggers, plugins and a platform probe.
        spec = importlib.util.find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            return f"vllm is not installed; --vllm-lib or {VLLM_LIB_VARIABLE} names its _C_stable_libtorch library"
        folder = Path(next(iter(spec.submodule_search_locations)))
        libraries = sorted(folder.glob("_C_stable_libtorch*.so")) or sorted(folder.glob("_C.*so"))
        if not libraries:
            return f"vllm is installed without _C_stable_libtorch*.so or _C.*so in {folder.name}"
        torch.ops.load_library(str(libraries[0]))
        return None

    def prepare(self, inputs: Inputs) -> list[TensorCall]:
        operator, a, a_scale = self._packet(), inputs.a, inputs.a_scale

        def make(i: int) -> TensorCall:
            out, b, b_scale = inputs.out(i), inputs.b(i), inputs.b_scale(i)

            def call() -> torch.Tensor:
                operator(out, a, b, a_scale, b_scale, None)
                return out

            return call

        return inputs.calls(make)


class Sgl(_LibraryPeer):
    """SGLang's `int8_scaled_mm`; it allocates its output."""

    name, label = "sgl", "SGLang int8_scaled_mm, INT8"
    package, namespace, operator = "sgl_kernel", "sgl_kernel", "int8_scaled_mm"

    def _load_package(self) -> str | None:
        if importlib.util.find_spec("sgl_kernel") is None:
            return f"sgl_kernel is not installed; --sgl-lib or {SGL_LIB_VARIABLE} names its common_ops library"
        importlib.import_module("sgl_kernel")
        return None

    def prepare(self, inputs: Inputs) -> list[TensorCall]:
        operator, a, a_scale = self._packet(), inputs.a, inputs.a_scale
        b = [inputs.b(i) for i in range(inputs.weights.sets)]
        b_scale = inputs.weights.scale
        return inputs.keeping(lambda i: operator(a, b[i], a_scale, b_scale[i], OUT_DTYPE, None))


def every_peer(vllm_lib: str | None = None, sgl_lib: str | None = None) -> list[Peer]:
    """All peers but ours, which has one column besides; a library path falls back to its environment variable."""
    return [
        OursWithTensors(),
        Bf16(),
        Fp32(),
        IntMM(),
        IntMMEpilogue(),
        Fp8Row(),
        Vllm(vllm_lib or os.environ.get(VLLM_LIB_VARIABLE) or None),
        Sgl(sgl_lib or os.environ.get(SGL_LIB_VARIABLE) or None),
    ]


def select(text: str, device: torch.device, peers: list[Peer]) -> list[Peer]:
    """`all`, `none` or a comma list of names -> the peers of this kind of device, in their own order.

    Raises ValueError for a name that is unknown or belongs to another kind of device.
    """
    here = [peer for peer in peers if device.type in peer.devices]
    if text in ("all", "none"):
        return here if text == "all" else []
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in {peer.name for peer in here}:
            known = ", ".join(peer.name for peer in here)
            raise ValueError(f"unknown peer {name!r} on {device.type}: expected all, none, or some of {known}")
    return [peer for peer in here if peer.name in names]


def epilogue(accumulator: torch.Tensor, inputs: Inputs, i: int) -> torch.Tensor:
    """int32 [M, N] -> bfloat16 [M, N]: cast((f32(acc) * b_scale) * a_scale), DESIGN's formula without a bias."""
    return accumulator.to(torch.float32).mul_(inputs.b_scale(i)).mul_(inputs.a_scale).to(OUT_DTYPE)


def _bind_out(function: Callable, *args: torch.Tensor, out: torch.Tensor, **kwargs: object) -> TensorCall:
    return lambda: function(*args, out=out, **kwargs)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
