"""How a row-parallel product is summed, by which collectives and in how many chunks, and how an input is gathered. The cost model chooses; the bits
do not depend on it."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.distributed as dist

from scaled_mm.errors import BadParamError
from scaled_mm.parallel import cost
from scaled_mm.parallel.ranks import Facts, Ranks

VIA = ("all_reduce", "reduce_scatter")
GATHER_INPUT = ("float", "int8")


class Choice(NamedTuple):
    """via: "all_reduce": int32 sums go to all ranks; "reduce_scatter": to the rank of a row, which scales them; chunks: of rows."""

    via: str
    chunks: int


def check(via: object, chunks: object, allow_none: bool = False) -> None:
    """BadParamError unless via is one of `VIA` and chunks a positive integer. allow_none: None is valid too, and `choose` replaces it."""
    if not (via is None and allow_none) and (not isinstance(via, str) or via not in VIA):
        raise BadParamError(f"via: expected {'None, ' if allow_none else ''}{' or '.join(map(repr, VIA))}, got {via!r}")
    if not (chunks is None and allow_none) and (isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1):
        raise BadParamError(f"chunks: expected {'None or ' if allow_none else ''}a positive integer, got {chunks!r}")


def check_gather(gather_input: object, allow_none: bool = False) -> None:
    """BadParamError unless gather_input is one of `GATHER_INPUT`. allow_none: None is valid too, and `choose_gather` replaces it."""
    if not (gather_input is None and allow_none) and (not isinstance(gather_input, str) or gather_input not in GATHER_INPUT):
        expected = f"{'None, ' if allow_none else ''}{' or '.join(map(repr, GATHER_INPUT))}"
        raise BadParamError(f"gather_input: expected {expected}, got {gather_input!r}")


def gpu_of(device: torch.device, ranks: Ranks) -> str:
    """The driver's name of a GPU if the cost model knows it and its collectives run beside kernels, as NCCL's do; otherwise "".

    All ranks must have the same name before they `choose` by it: ranks that choose differently would wait for each other."""
    if device.type != "cuda" or "cuda:nccl" not in dist.get_backend_config(ranks.group):
        return ""
    name = torch.cuda.get_device_name(device)
    return name if name in cost.GPU_LINKS else ""


def common_gpu(found: list[Facts]) -> str:
    """The "gpu" of all ranks' facts; "" if they differ."""
    names = {facts["gpu"] for facts in found}
    return names.pop() if len(names) == 1 else ""


def choose(m: int, n: int, k: int, size: int, gpu_name: str, *, all_rows: bool, static: bool, via: str | None, chunks: int | None) -> Choice:
    """What was given, and for None what is predicted to be fastest.

    k: of all ranks together. size: number of ranks. gpu_name: see `gpu_of`; without one, an all-reduce of all rows at once. all_rows: whether all
    ranks get all rows; otherwise sums are always scattered. static: whether no scales are reduced.
    """
    vias = (VIA[1],) if not all_rows else VIA if via is None else (via,)
    if (len(vias) == 1 and chunks is not None) or not gpu_name or size == 1 or torch.compiler.is_compiling():
        return Choice(vias[0], chunks or 1)
    return _fastest(_rounded(m), n, k, size, gpu_name, static, vias, chunks)


def choose_gather(m: int, n: int, k: int, size: int, gpu_name: str, *, static: bool, gather_input: str | None) -> str:
    """What was given, and for None the one of `GATHER_INPUT` that is predicted to be fastest for an input of 16 bits; "int8" without a GPU's name.
    n, k: of all ranks together. The others: see `choose`."""
    if gather_input is not None or not gpu_name or size == 1 or torch.compiler.is_compiling():
        return gather_input or "int8"
    return _fastest_gather(_rounded(m), n, k, size, gpu_name, static)


@functools.lru_cache(maxsize=4096)
def _fastest_gather(m: int, n: int, k: int, size: int, gpu_name: str, static: bool) -> str:
    hosts = cost.hosts_of(gpu_name)
    if not (m and n and k) or (size > hosts.gpus_per_node and size % hosts.gpus_per_node):
        return "int8"
    options = dict(gpu=gpu_name, hosts=hosts, static=static)
    us = {name: cost.predict(m, n, k, size, way=way, **options).us for name, way in (("float", "gather"), ("int8", "gather_int8"))}
    return min(us, key=us.get)


def _rounded(m: int) -> int:
    """m, rounded up to four significant bits, so that few values are predicted."""
    unit = 1 << max(0, m.bit_length() - 4)
    return -(-m // unit) * unit


@functools.lru_cache(maxsize=4096)
def _fastest(m: int, n: int, k: int, size: int, gpu_name: str, static: bool, vias: tuple[str, ...], chunks: int | None) -> Choice:
    hosts = cost.hosts_of(gpu_name)
    if not (m and n and k) or (size > hosts.gpus_per_node and size % hosts.gpus_per_node):
        return Choice(vias[0], chunks or 1)
    found = []
    for via in vias:
        way = "exact" if via == "reduce_scatter" else "exact_all_reduce"
        options = dict(gpu=gpu_name, hosts=hosts, way=way, static=static)
        count = chunks or cost.best_chunks(m, n, k, size, **options)
        found.append((cost.predict(m, n, k, size, chunks=count, **options).us, Choice(via, count)))
    return min(found)[1]
