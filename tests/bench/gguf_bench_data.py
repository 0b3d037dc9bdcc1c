"""Synthetic GGUF documents, a product with a fault, and a stand-in for llama.cpp's test-backend-ops."""

from __future__ import annotations

from pathlib import Path

from bench_data import environment, measured

from scaled_mm.bench.gguf.peers import OURS_W4A8, OursGguf, every_peer
from scaled_mm.bench.gguf.record import GgufCaseRecord, GgufDocument, LlamaSource
from scaled_mm.measure.peer import OURS
from scaled_mm.measure.record import Implementation, Result, Settings

# As `test-backend-ops perf -o MUL_MAT` prints them (github.com/ggml-org/llama.cpp/pull/10991 and 14903, issues/11559), with its colours.
PERF_LINES = """\
Testing 2 devices

Backend 1/2: CUDA0
  Device description: NVIDIA H200
  Device memory: 143156 MB (142538 MB free)

  MUL_MAT(type_a=f16,type_b=f32,m=4096,n=1,k=14336,bs=[1,1],nr=[1,1],per=[0,1,2,3]):                    4260 runs -   251.12 us/run - 117.44 MFLOP/run - \x1b[1;34m467.67 GFLOPS\x1b[0m
  MUL_MAT(type_a=bf16,type_b=f32,m=4096,n=1,k=14336,bs=[1,1],nr=[1,1],per=[0,1,2,3]): not supported
  MUL_MAT(type_a=q4_0,type_b=f32,m=4096,n=1,k=14336,bs=[1,1],nr=[1,1],per=[0,1,2,3]):                  22152 runs -    45.22 us/run - 117.44 MFLOP/run - \x1b[1;34m  2.60 TFLOPS\x1b[0m
  MUL_MAT(type_a=q8_0,type_b=f32,m=4096,n=4,k=14336,bs=[1,1],nr=[1,1],per=[0,1,2,3],v=0):              18318 runs -    55.05 us/run - 469.76 MFLOP/run - \x1b[1;34m  8.53 TFLOPS\x1b[0m
  MUL_MAT(type_a=q5_0,type_b=f32,m=4096,n=5,k=14336,bs=[1,1],nr=[1,1],per=[0,1,2,3],k_v=0,o=1):        22152 runs -    56.45 us/run - 587.20 MFLOP/run - \x1b[1;34m 10.40 TFLOPS\x1b[0m
  MUL_MAT(type_a=q4_0,type_b=f32,m=16,n=1,k=256,bs=[10,1],nr=[1,1]):                  8192 runs -    12.52 us/run -       18 kB/run -    4.33 GB/s
  MUL_MAT(type_a=q4_0,type_b=f32,m=16,n=16,k=256,bs=[1,1],nr=[2,1]):                  8192 runs -    12.69 us/run -     3850 kB/run -  289.35 GB/s
  MUL_MAT(type_a=q4_1,type_b=f32,m=16,n=1,k=256,bs=[1,1],nr=[1,1]):                  8192 runs -     4.03 us/run -       18 kB/run -    4.33 GB/s
  MUL_MAT(type_a=q4_1,type_b=f16,m=16,n=1,k=256,bs=[1,1],nr=[1,1]):                  8192 runs -     3.03 us/run -       18 kB/run -    4.33 GB/s
  MUL_MAT(type_a=q8_0,type_b=f32,m=4096,n=8,k=14336,bs=[1,1],nr=[1,1],per=[0,1,2,3],k_v=64,o=1):        9318 runs -    95.05 us/run - 469.76 MFLOP/run - 8.53 TFLOPS
  MUL_MAT(type_a=q8_0,type_b=f32,m=4096,n=8,k=14336,bs=[1,1],nr=[1,1],per=[0,1,2,3],k_v=0,o=2):        9318 runs -    96.05 us/run - 469.76 MFLOP/run - 8.53 TFLOPS
  MUL_MAT_ID(type_a=q4_0,type_b=f32,n_mats=8,n_used=2,b=0,m=4096,n=1,k=14336):        3408 runs -   300.00 us/run - 234.88 MFLOP/run - 1.00 TFLOPS
  MUL_MAT(type_a=q4_0,type_b=f32,m=4096,n=1,k=14336,bs=[1,1],nr=[1,1],per=[0,1,2,3]):                    852 runs -  9999.00 us/run - 117.44 MFLOP/run - 7.17 GFLOPS
  Backend CUDA0: OK
Backend 2/2: CPU
  Skipping CPU backend
2/2 backends passed
OK
"""  # noqa: E501

PERF_US = {
    ("q4_0", 4096, 14336, 1): 45.22,
    ("q8_0", 4096, 14336, 4): 55.05,
    ("q5_0", 4096, 14336, 5): 56.45,
    ("q4_1", 16, 256, 1): 4.03,
}


def write_program(path: Path, text: str = PERF_LINES, status: int = 0) -> Path:
    """A program that prints `text`, ends with `status`, and notes its arguments in `<path>.arguments`."""
    (path.parent / "printed.txt").write_text(text)
    path.write_text(f'#!/bin/sh\necho "$@" > "$0.arguments"\ncat "$(dirname "$0")/printed.txt"\nexit {status}\n')
    path.chmod(0o755)
    return path


def case_of(
    M: int, us: float, *, fmt: str = "q4_0", kernel: str = "row_a", error: float | None = 3e-7, llama_us: float | None = None, **more: Result
) -> GgufCaseRecord:
    """4096x4096 of 4.5-bit blocks; ours takes `us`, in mode w4a8 a tenth longer."""
    results = {
        "ours": measured(us, error=error, kernel=kernel, reason="GGUF w4a16 bucket 0"),
        "ours_w4a8": measured(us * 1.1, error=error, kernel=kernel),
    } | more
    return GgufCaseRecord(
        fmt=fmt,
        shape="4096x4096",
        M=M,
        N=4096,
        K=4096,
        weight_bytes=4096 * 128 * 18,
        rotation=20,
        outputs=20,
        cold=True,
        llama_us=llama_us,
        results=results,
    )


def gguf_document(
    cases: list[GgufCaseRecord],
    unavailable: str | None = None,
    status: str = "recorded",
    results: tuple[str, ...] = (OURS, OURS_W4A8),
    bounds: dict[str, float] | None = None,
) -> GgufDocument:
    """bounds: None as in a document of an earlier version."""
    return GgufDocument(
        created="2026-01-01T00:00:00+00:00",
        command="scaled-mm bench gguf --seed 7",
        settings=Settings(budget_ms=60, rounds=4, check=True, seed=7, kernel=None),
        environment=environment(),
        implementations=[
            Implementation(
                name=peer.name,
                label=peer.label,
                int8=False,
                rival=False,
                version=None,
                library=None,
                unavailable=unavailable if peer.name == "ours_w4a8" else None,
            )
            for peer in every_peer()
            if peer.name in results
        ],
        llama=LlamaSource(status=status, told="where llama.cpp's times come from"),
        bounds=bounds or {},
        cases=cases,
    )


class Broken(OursGguf):
    """Ours, with a fault once it was called so often: "value", "nan" or "raise"."""

    def __init__(self, fault: str, after: int):
        super().__init__(OURS, "broken", "float16", "auto")
        self._fault, self._left = fault, after

    def prepare(self, inputs):
        def make(call):
            def faulty():
                out = call()
                self._left -= 1
                if self._left < 0:
                    if self._fault == "raise":
                        raise RuntimeError("the launch failed")
                    out[-1, -1] = float("nan") if self._fault == "nan" else out[-1, -1] + 1
                return out

            return faulty

        return [make(call) for call in super().prepare(inputs)]
