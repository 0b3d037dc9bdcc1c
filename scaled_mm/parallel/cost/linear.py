"""The predicted time of a linear layer whose input is divided over the ranks, from its float input to the int8 input of the next layer on every rank.

A rank has K / ranks columns of the weight, or with the ways that gather N / ranks of its rows. The parts of a `Prediction`, in microseconds:

    maximum   a pass over the rank's part of x for the maximum of each row; exact ways but gather, unless static
    scales    an all-reduce of M floats; as above
    quantize  reads x, 2 bytes an element, writes int8; way gather: all of K
    input     ways gather and gather_int8: a bfloat16 or int8 all-gather of x
    product   [M, N, K / ranks], or [M, N / ranks, K], by the time model of kernels with the kernel config that the tile table chooses; its output
              has 4 bytes (ways that reduce int32) or 2
    reduce    int32 reduce-scatter, int32 all-reduce or bfloat16 all-reduce
    scale     int32 to bfloat16, two kernels and 14 bytes an element, as torch's operators do it; after an all-reduce of all rows, else of the rank's
    gather    bfloat16 or int8 all-gather, with a float32 scale a row in the same message or after it
    pack      exact_int8 with fewer than `collectives.APART` values: one kernel before and two after the gather, for int8 and scales in one message
    columns   ways that gather: copies of [ranks, M, K / ranks] to [M, K] and of [ranks, M, N / ranks] to [M, N]; none of one row
    norm      add the residual, normalize, quantize: all rows; with exact_int8 the rank's

us = sum of the parts - hidden. With `chunks` > 1 M is divided: a chunk is reduced while the next one is multiplied. `hidden` is `OVERLAP` times what
this saves at best.
Row-wise kernels take 2 us + bytes / (0.8 * bandwidth of memory), from reports/sm90/h200/rowwise (`scaled-mm bench path --shapes none`): 0.75 to 0.83
of the bandwidth at 4096 x 4096 and above, 1.2 to 2.6 us for one row of up to 8192.
Not in it: the host's time (a CUDA graph or a busy GPU hides it), memory traffic of a collective beside a product, ranks that arrive late.

Compared with two H200s (reports/sm90/h200-x2: torch 2.11, layers of Llama 3 8B and 70B, 1 to 2048 tokens), predicted over measured time, geometric
mean and range: one GPU 1.06 (0.97 to 1.22), bf16 0.96 (0.82 to 1.04), gather 0.92 (0.79 to 1.05), gather_int8 0.91 (0.79 to 1.06), the ways that
reduce int32 sums 0.83 (0.68 to 0.95), with 2 chunks 0.76 (0.66 to 0.90), with 4 chunks 0.85 (0.69 to 1.06). What the ways with int32 sums take more
grows with M * N, in a reduce-scatter as in an all-reduce. With a link of 250 GB/s in place of 360 bf16 would be at 1.00 and they at 0.86 to 0.88, and
what was published of eight H100s (`collectives`) would be missed, so no constant was changed for it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from scaled_mm.errors import BadParamError
from scaled_mm.kernels.gpu import GpuFacts
from scaled_mm.parallel.collectives import APART
from scaled_mm.parallel.cost.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, all_reduce_us, fastest
from scaled_mm.parallel.cost.links import Hosts, check_count, facts_of, hosts_of
from scaled_mm.parallel.overlap import chunk_slices
from scaled_mm.tables import TileTable, load_table

EXACT, EXACT_INT8, EXACT_ALL_REDUCE, BF16 = "exact", "exact_int8", "exact_all_reduce", "bf16"
GATHER, GATHER_INT8 = "gather", "gather_int8"

WAYS: dict[str, tuple[tuple[str, int], ...]] = {
    EXACT: ((REDUCE_SCATTER, 4), (ALL_GATHER, 2)),
    EXACT_INT8: ((REDUCE_SCATTER, 4), (ALL_GATHER, 1)),
    EXACT_ALL_REDUCE: ((ALL_REDUCE, 4),),
    GATHER: ((ALL_GATHER, 2),),
    GATHER_INT8: ((ALL_GATHER, 2),),
    BF16: ((ALL_REDUCE, 2),),
}
"""The collectives of the outputs of each way, with the bytes of an element. bf16: each rank quantizes its part by itself and rounds its product, as
engines do."""

INPUT_BYTES = {GATHER: 2, GATHER_INT8: 1}
"""Bytes of an element of the inputs, of the ways that gather these."""

OVERLAP = 0.0
"""The fraction of the best overlap that is reached, where one chunk is reduced while the next one is multiplied. 0: measured chunks hid nothing.

On two H200s 2 chunks took 1.05 to 1.47 times as long as one, and 4 chunks 1.14 to 1.81 times (256 and 2048 tokens, ways exact and exact_int8).
"""

CHUNKS = (1, 2, 3, 4, 6, 8)
"""What `best_chunks` chooses from."""

_ROWWISE_START_US, _ROWWISE_SHARE = 2.0, 0.8


@dataclasses.dataclass(frozen=True)
class Prediction:
    """parts: microseconds by name; see the module. hidden: what overlap saves of their sum."""

    parts: dict[str, float]
    hidden: float = 0.0

    @property
    def us(self) -> float:
        return sum(self.parts.values()) - self.hidden


def predict(
    m: int,
    n: int,
    k: int,
    ranks: int,
    *,
    gpu: str | GpuFacts = "NVIDIA H200",
    hosts: Hosts | None = None,
    way: str = EXACT,
    static: bool = False,
    chunks: int = 1,
) -> Prediction:
    """The predicted time of a linear layer with M tokens, an input divided along K, and a weight [N, K] over all ranks.

    gpu: the driver's name of a GPU in GPU_LINKS, or its facts; then `hosts` is required. hosts: default nodes of eight with the GPU's own link.
    way: one of WAYS. static: the scale of x is given. chunks: parts of M; fewer if a rank has fewer rows; 1 with ways that gather the input. With one
    rank nothing is sent.
    Raises BadParamError that names the argument.
    """
    gpu, hosts = _checked(m, n, k, ranks, gpu, hosts, way)
    check_count("chunks", chunks)
    if way in INPUT_BYTES and chunks != 1:
        raise BadParamError(f"chunks: expected 1 with way={way!r}, got {chunks!r}")
    exact, alone, part = way != BF16, ranks == 1, -(-k // ranks)
    parts = {"quantize": rowwise_us(3 * m * (k if way == GATHER else part), gpu)}
    if exact and not static and not alone and way != GATHER:
        parts["maximum"] = rowwise_us(2 * m * part, gpu)
        parts["scales"] = all_reduce_us(4 * m, ranks, hosts)
    if alone:
        return Prediction({**parts, "product": product_us(m, n, part, gpu), "norm": rowwise_us(7 * m * n, gpu)})
    if way in INPUT_BYTES:
        sent = {"input": m * ranks * part * INPUT_BYTES[way], "gather": m * ranks * -(-n // ranks) * 2}
        parts |= {name: fastest(ALL_GATHER, size, ranks, hosts)[0] for name, size in sent.items()}
        if m > 1:
            parts["columns"] = sum(rowwise_us(2 * size, gpu) for size in sent.values())
        return Prediction({**parts, "product": product_us(m, -(-n // ranks), k, gpu), "norm": rowwise_us(7 * m * n, gpu)})
    (kind, _), *gather = WAYS[way]
    beside = dataclasses.replace(gpu, multiprocessors=max(1, gpu.multiprocessors - hosts.link.channels))
    # The first chunk has all SMs, the others run beside a collective.
    of_chunks = enumerate(real for _, real in chunk_rows(m, ranks, chunks))
    products = [product_us(real, n, part, beside if index else gpu, 4 if exact else 2) for index, real in of_chunks]
    travels = _travels(m, n, ranks, chunks, hosts, way)
    parts |= {"product": sum(products), "reduce": sum(travels)}
    own = -(-m // ranks)
    if exact:
        rows = own if kind == REDUCE_SCATTER else m
        parts["scale"] = rowwise_us(8 * rows * n, gpu) + rowwise_us(6 * rows * n, gpu)
    parts["norm"] = rowwise_us(7 * (own if way == EXACT_INT8 else m) * n, gpu)  # out and the residual in, the residual and int8 out
    apart = way == EXACT_INT8 and m * n >= APART
    for kind, width in gather:
        sizes = [ranks * own * (n * width + (4 if way == EXACT_INT8 and not apart else 0))] + [4 * ranks * own] * apart
        parts["gather"] = sum(fastest(kind, size, ranks, hosts)[0] for size in sizes)
    if way == EXACT_INT8 and not apart:
        parts["pack"] = rowwise_us(2 * own * n, gpu) + rowwise_us(2 * m * n, gpu) + rowwise_us(8 * m, gpu)
    return Prediction(parts, OVERLAP * (sum(products) + sum(travels) - makespan(products, travels)))


@functools.lru_cache(maxsize=65536)
def best_chunks(
    m: int,
    n: int,
    k: int,
    ranks: int,
    *,
    gpu: str | GpuFacts = "NVIDIA H200",
    hosts: Hosts | None = None,
    way: str = EXACT,
    static: bool = False,
) -> int:
    """The number of chunks, one of CHUNKS, with the least predicted time; 1 if overlap does not pay, as measured (`OVERLAP`). The arguments: see
    `predict`.

    A repeated call takes about a microsecond. The first for these arguments takes up to 5 ms where overlap may pay, because a kernel config is
    chosen for each size of chunk; a caller with many M may round M up.
    """
    options = dict(gpu=gpu, hosts=hosts, way=way, static=static)
    best, least = 1, predict(m, n, k, ranks, **options)
    if ranks == 1 or OVERLAP == 0 or way in INPUT_BYTES:  # a chunk more adds latency
        return 1
    _, hosts = _checked(m, n, k, ranks, gpu, hosts, way)
    limit = least.parts["product"] + least.parts["reduce"]
    for chunks in CHUNKS[1:]:
        if sum(_travels(m, n, ranks, chunks, hosts, way)) >= limit:  # the link alone takes longer: no need to choose kernel configs
            continue
        found = predict(m, n, k, ranks, chunks=chunks, **options)
        if found.us < least.us:
            best, least = chunks, found
    return best


def sent_bytes(m: int, n: int, ranks: int, *, way: str = EXACT, static: bool = False, k: int | None = None) -> float:
    """Bytes that a rank sends for a linear layer of M tokens and N outputs: (ranks - 1) / ranks of 4 to 8 bytes an output, and the scales.

    k: of all ranks together; needed with ways that gather the input, of 2 + 2 K / N or 2 + K / N bytes an output. M counts in whole multiples of the
    ranks where rows are scattered or gathered. BadParamError that names the argument.
    """
    for name, value in (("m", m), ("n", n), ("ranks", ranks)):
        check_count(name, value)
    _check_way(way)
    found = 0.0 if way in (BF16, GATHER) or static else 2 * 4 * m
    if way in INPUT_BYTES:
        check_count("k", k)
        return (found + m * (INPUT_BYTES[way] * k + 2 * n)) * (ranks - 1) / ranks
    padded = -(-m // ranks) * ranks
    for kind, width in WAYS[way]:
        found += 2 * width * m * n if kind == ALL_REDUCE else width * padded * n
    if way == EXACT_INT8:
        found += 4 * padded
    return found * (ranks - 1) / ranks


def chunk_rows(m: int, ranks: int, chunks: int) -> list[tuple[int, int]]:
    """(rows of each rank, rows of all ranks without padding) of each chunk of M rows: at most `chunks`, equal but for one row of each rank."""
    found, left = [], m
    for part in chunk_slices(-(-m // ranks), chunks):
        each = part.stop - part.start
        found.append((each, min(left, each * ranks)))
        left -= found[-1][1]
    return found


def _travels(m: int, n: int, ranks: int, chunks: int, hosts: Hosts, way: str) -> list[float]:
    """Microseconds of the reduction of each chunk. A reduce-scatter needs the same number of rows for each rank, so it is padded."""
    kind, width = WAYS[way][0]
    rows = [ranks * each if kind == REDUCE_SCATTER else real for each, real in chunk_rows(m, ranks, chunks)]
    return [fastest(kind, count * n * width, ranks, hosts)[0] for count in rows]


def makespan(products: Sequence[float], travels: Sequence[float]) -> float:
    """The time until all chunks have travelled: each is multiplied, one after the other, then travels once the link is free."""
    multiplied = travelled = 0.0
    for product, travel in zip(products, travels, strict=True):
        multiplied += product
        travelled = max(travelled, multiplied) + travel
    return travelled


def rowwise_us(size: int, gpu: GpuFacts) -> float:
    """Microseconds of a row-wise kernel that reads and writes `size` bytes."""
    return _ROWWISE_START_US + size / (_ROWWISE_SHARE * gpu.bandwidth) * 1e6


@functools.lru_cache(maxsize=65536)
def product_us(m: int, n: int, k: int, gpu: GpuFacts, out_bytes: int = 2) -> float:
    """Microseconds of an int8 product [M, N, K] with a prepared weight, by the kernel config that the architecture's tile table chooses.

    The time model is fitted to outputs of 2 bytes; more add their memory traffic. 0 if there is nothing to compute.
    """
    if not (m and n and k):
        return 0.0
    table = _table(gpu.arch)
    row = table.select(m, n, k, constant_b=True, gpu=gpu).row
    parts = table.time_model(row).parts(m, n, k, gpu)
    moved = m * k + n * k + 2 * m * n
    us = parts._replace(memory=parts.memory * (moved + (out_bytes - 2) * m * n) / moved).us
    if not math.isfinite(us):
        raise BadParamError(f"gpu: expected the bandwidth of its memory, got {gpu.bandwidth!r}")
    return us


@functools.cache
def _table(arch: str) -> TileTable:
    return load_table(arch)


def _checked(m: int, n: int, k: int, ranks: int, gpu: str | GpuFacts, hosts: Hosts | None, way: str) -> tuple[GpuFacts, Hosts]:
    for name, value in (("m", m), ("n", n), ("k", k), ("ranks", ranks)):
        check_count(name, value)
    _check_way(way)
    if hosts is None:
        if isinstance(gpu, GpuFacts):
            raise BadParamError("hosts: expected Hosts beside a GPU's facts, got None")
        hosts = hosts_of(gpu)
    hosts.nodes(ranks)
    return gpu if isinstance(gpu, GpuFacts) else facts_of(gpu), hosts


def _check_way(way: str) -> None:
    if way not in WAYS:
        raise BadParamError(f"way: expected one of {', '.join(WAYS)}, got {way!r}")
