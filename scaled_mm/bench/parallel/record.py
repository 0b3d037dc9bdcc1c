"""What `parallel.json` holds. Times are microseconds, sizes bytes."""

from __future__ import annotations

from typing import ClassVar

from scaled_mm.measure.record import Document, Model

#: Ways with a static scale of the activation: way of the cost model by name.
STATIC = {f"{way}_static": way for way in ("exact", "exact_int8", "exact_all_reduce", "gather", "gather_int8")}


class MeasuredWay(Model):
    """One way, timed. name: of the cost model, "one_gpu", "torch_async" (torch's product and reduce-scatter in one operator, in bfloat16), or of
    experts "bf16" (each rank's weighted sums, all-reduced), "replicated" and "all_to_all".

    us: the median of `samples`, each the mean of `calls` calls on the slowest rank; graph: in a CUDA graph. bit_equal: with one GPU, on all ranks;
    null where it is not expected. predicted_us: by the cost model, null where it has no constants."""

    name: str
    static: bool
    chunks: int
    us: float
    samples: list[float]
    calls: int
    graph: bool
    bit_equal: bool | None
    predicted_us: float | None = None


class MeasuredRecord(Model):
    """A layer that was timed. shape: of a linear layer, [N, K] over all ranks, or "experts of" a model, then N is H and K is I."""

    shape: str
    M: int
    N: int
    K: int
    ranks: int
    ways: list[MeasuredWay]


class Simulation(Model):
    """What was simulated, or measured. link, network: names in `scaled_mm.parallel.cost`; of a measurement the backend of torch.distributed, and
    what it was told of the network."""

    simulated: bool = True
    gpu: str
    link: str
    network: str
    gpus_per_node: int


class WayRecord(Model):
    """One way. us: with the best number of chunks; plain_us: without chunks. parts: of `us`; their sum less `hidden`, what overlap saves, is `us`.
    sent: bytes that a rank sends."""

    us: float
    plain_us: float
    chunks: int
    hidden: float
    sent: float
    parts: dict[str, float]


class LinearRecord(Model):
    """A layer of M tokens whose input is divided along K, [N, K] over all ranks. single_us: on one GPU. ways: those of the cost model and of STATIC;
    reports of before the ways gather and gather_int8 lack these."""

    shape: str
    M: int
    N: int
    K: int
    ranks: int
    single_us: float
    ways: dict[str, WayRecord]


class DecoderRecord(Model):
    """The four linear layers of a decoder layer, without attention and activation. us: by way."""

    model: str
    M: int
    ranks: int
    single_us: float
    us: dict[str, float]


class ExpertsRecord(Model):
    """What travels for a layer of experts with M tokens of all ranks: parts by way, in microseconds."""

    model: str
    M: int
    ranks: int
    all_to_all: dict[str, float]
    replicated: dict[str, float]


class ParallelDocument(Document):
    """linear, decoders, experts: of a simulation; measured: of a measurement, with the others empty. `environment` is the machine that ran it.
    Implementations, clocks and cases are empty."""

    FILES: ClassVar[tuple[str, ...]] = ("parallel.json",)

    settings: Simulation
    linear: list[LinearRecord] = []
    decoders: list[DecoderRecord] = []
    experts: list[ExpertsRecord] = []
    measured: list[MeasuredRecord] = []
