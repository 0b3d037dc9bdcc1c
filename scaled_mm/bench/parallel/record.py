"""What `parallel.json` holds. Times are microseconds, sizes bytes."""

from __future__ import annotations

from typing import ClassVar

from scaled_mm.measure.record import Document, Model

#: Ways with a static scale of the activation: way of the cost model by name.
STATIC = {"exact_static": "exact", "exact_int8_static": "exact_int8", "exact_all_reduce_static": "exact_all_reduce"}


class Simulation(Model):
    """What was simulated. link, network: names in `scaled_mm.parallel.cost`."""

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
    """A row-parallel layer of M tokens, [N, K] over all ranks. single_us: on one GPU. ways: those of the cost model and of STATIC."""

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
    """`environment` is the machine that ran the simulation. Implementations, clocks and cases are those of measurements: none."""

    FILES: ClassVar[tuple[str, ...]] = ("parallel.json",)

    settings: Simulation
    linear: list[LinearRecord]
    decoders: list[DecoderRecord]
    experts: list[ExpertsRecord]
