"""Synthetic documents and CPU stand-ins for the tests of the benchmark room."""

from __future__ import annotations

import torch

from scaled_mm.bench.int8.inputs import Inputs, epilogue
from scaled_mm.bench.int8.record import Int8CaseRecord, Int8Document, Int8Settings
from scaled_mm.bench.overhead import OverheadRecord
from scaled_mm.measure.peer import OURS, Peer
from scaled_mm.measure.record import Clocks, Environment, Implementation, Result
from scaled_mm.measure.roofline import roof_us, traffic_bytes
from scaled_mm.measure.shapes import Case

GPU = "NVIDIA H200"
CPU = torch.device("cpu")
SMALL = Case("64x32", 5, 64, 32)


def environment(gpu: str = GPU) -> Environment:
    return Environment(
        device="cuda:0",
        gpu=gpu,
        arch="sm90",
        cpu="a CPU",
        platform="Linux",
        python="3.12.0",
        torch="2.11.0",
        cuda="13.0",
        driver="580.1",
        cutlass="4.2.0.0",
        scaled_mm="0.1.0",
        git_commit="0123abc",
        git_dirty=True,
        multiprocessors=132,
        memory_bytes=150_000_000_000,
        cache_bytes=60 << 20,
        sm_max_mhz=1980.0,
        power_limit_w=700.0,
        nvidia_smi="read",
    )


def measured(us: float, **facts: object) -> Result:
    return Result(us=us, samples=[us, us * 1.01], calls_per_graph=24, method="cuda_graph_l2_cold", spread=0.01, **facts)


def case_record(shape: str, M: int, N: int, K: int, gpu: str = GPU, **results: Result) -> Int8CaseRecord:
    return Int8CaseRecord(
        shape=shape,
        M=M,
        N=N,
        K=K,
        traffic_bytes=traffic_bytes(M, N, K),
        roof_us=roof_us(M, N, K, gpu),
        rotation=12,
        outputs=12,
        cold=True,
        check="checked",
        results=results,
    )


def document(cases: list[Int8CaseRecord], gpu: str = GPU, sgl_unavailable: str | None = None) -> Int8Document:
    def implementation(name: str, rival: bool = False, unavailable: str | None = None) -> Implementation:
        return Implementation(
            name=name,
            label=f"label of {name}",
            int8=True,
            rival=rival,
            version="1",
            library=None,
            unavailable=unavailable,
        )

    return Int8Document(
        created="2026-01-01T00:00:00+00:00",
        command="scaled-mm bench --seed 7",
        settings=Int8Settings(budget_ms=60, rounds=2, check=True, check_limit_gmac=8192, seed=7, kernel=None),
        environment=environment(gpu),
        clocks=[Clocks(when="before", sm_mhz=1980, mem_mhz=3201, power_w=120.5, temperature_c=None)],
        implementations=[
            implementation("bf16"),
            implementation(OURS),
            implementation("vllm", rival=True),
            implementation("sgl", rival=True, unavailable=sgl_unavailable),
        ],
        cases=cases,
        overhead=[
            OverheadRecord(name="ours: desc.calculate", us=2.5, samples=[2.5], calls=200),
            OverheadRecord(name="vllm", failed="RuntimeError: no kernel"),
        ],
    )


class StandIn(Peer):
    """Our operator's arithmetic in torch operations on a CPU, with a fault to order: "raise", "bits" or None.

    fault_after: the number of calls from which on the fault shows.
    """

    devices = ("cpu",)
    int8 = True

    def __init__(self, name: str = OURS, fault: str | None = None, fault_after: int = 0):
        self.name = name
        self.label = f"stand-in {name}"
        self.released = 0
        self._fault = fault
        self._left = fault_after

    def prepare(self, inputs: Inputs):
        def make(i: int):
            def call() -> torch.Tensor:
                faulty = self._left <= 0
                self._left -= 1
                if faulty and self._fault == "raise":
                    raise RuntimeError("the launch failed\nsecond line")
                out = inputs.out(i).copy_(epilogue(inputs.a.int() @ inputs.b(i).int(), inputs, i))
                if faulty and self._fault == "bits":
                    out[-1, -1] += 1
                return out

            return call

        return inputs.calls(make)

    def details(self, inputs: Inputs) -> dict[str, str]:
        return {"kernel": f"row of {self.name}", "reason": "bucket 0"}

    def release(self) -> None:
        self.released += 1
