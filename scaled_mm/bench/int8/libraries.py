"""INT8 kernels of other libraries: vLLM's and SGLang's."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from pathlib import Path

import torch

from scaled_mm.bench.int8.inputs import OUT_DTYPE, Inputs
from scaled_mm.measure.environment import version_of
from scaled_mm.measure.peer import Peer, TensorCall

VLLM_LIB_VARIABLE = "SCALED_MM_VLLM_LIB"
SGL_LIB_VARIABLE = "SCALED_MM_SGL_LIB"


class LibraryPeer(Peer):
    """A peer whose kernels are in a torch extension: of an installed package, or at a path that the caller gives.

    operator: without it the peer cannot run; None: `has` tells of each.
    """

    int8 = True
    rival = True
    package: str
    namespace: str
    operator: str | None = None

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
        if reason is None and self.operator is not None and not self.has(self.operator):
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

    def has(self, operator: str) -> bool:
        """Whether an operator is registered, once `available` has loaded the library."""
        return hasattr(getattr(torch.ops, self.namespace), operator)

    def packet(self, operator: str):
        """The operator's overload; AttributeError without it."""
        return getattr(getattr(torch.ops, self.namespace), operator).default

    def version(self) -> str | None:
        return None if self._path else version_of(self.package)

    def library(self) -> str | None:
        if not self._path or not Path(self._path).is_file():
            return None
        content = Path(self._path).read_bytes()
        return f"{Path(self._path).name}, {len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()[:16]}"


class VllmLibrary(LibraryPeer):
    """Operators of vLLM's library."""

    name, package, namespace = "vllm", "vllm", "_C"

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


class Vllm(VllmLibrary):
    """vLLM's `cutlass_scaled_mm`."""

    label, operator = "vLLM cutlass_scaled_mm, INT8", "cutlass_scaled_mm"

    def prepare(self, inputs: Inputs) -> list[TensorCall]:
        operator, a, a_scale = self.packet(self.operator), inputs.a, inputs.a_scale

        def make(i: int) -> TensorCall:
            out, b, b_scale = inputs.out(i), inputs.b(i), inputs.b_scale(i)

            def call() -> torch.Tensor:
                operator(out, a, b, a_scale, b_scale, None)
                return out

            return call

        return inputs.calls(make)


class Sgl(LibraryPeer):
    """SGLang's `int8_scaled_mm`; it allocates its output."""

    name, label = "sgl", "SGLang int8_scaled_mm, INT8"
    package, namespace, operator = "sgl_kernel", "sgl_kernel", "int8_scaled_mm"

    def _load_package(self) -> str | None:
        if importlib.util.find_spec("sgl_kernel") is None:
            return f"sgl_kernel is not installed; --sgl-lib or {SGL_LIB_VARIABLE} names its common_ops library"
        importlib.import_module("sgl_kernel")
        return None

    def prepare(self, inputs: Inputs) -> list[TensorCall]:
        operator, a, a_scale = self.packet(self.operator), inputs.a, inputs.a_scale
        b = [inputs.b(i) for i in range(inputs.weights.sets)]
        b_scale = inputs.weights.scale
        return inputs.keeping(lambda i: operator(a, b[i], a_scale, b_scale[i], OUT_DTYPE, None))
