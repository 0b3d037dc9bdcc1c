"""The predicted time of a collective: latency + bytes / bandwidth, the least over NCCL's algorithms and protocols, as NCCL chooses.

Formulas and constants: the tuning model of NCCL 2.27 (src/graph/tuning.cc: `baseLat`, `ncclTopoTuneModel`, `ncclTopoGetAlgoTime`), for one operation
and without NVLS, CollNet and PAT. With R ranks on L nodes:

    ring   steps = R - 1, of which L - 1 between nodes; all_reduce: twice as many
           us    = base + steps inside * step of the link + steps between * step of the network + bytes * steps / R / bus
           bus   = the link's bandwidth; between nodes the smaller of that and all NICs of a node together
                   LL: min(bus / 2, the link's limit of LL); LL128: 0.92 bus; Simple: bus
    tree   all_reduce only
           us    = base + 2 * ((R / L - 1) * step of the link + log2(L) * step of the network) + bytes * 2 / bus
           bus   = 0.92 of the ring's * 0.6; LL: / 3.8, limited; LL128: * 7/9 on one node, else * 15/16

NCCL corrects a tree's bandwidth by a table of 0.4 to 1 by size; 0.6 stands for all of it here. The bases were fitted by NCCL's authors to times of
its own test, which contain a launch.

Compared with what others published, none of it ours. NCCL logged 25.2148 us as its own prediction for an all-reduce of 128 B over 16 H100s on two
nodes (NCCL issue 1453); this model says 25.2109. 128 MiB and 1 GiB reduce-scattered by a ring over 8 H100s took 377 and 2689 us (NCCL issue 1047);
here 358 and 2642. 128 B to 512 B all-reduced over two H100s in a CUDA graph took 5.6 to 6.0 us (NCCL issue 1259); here 7.8.
"""

from __future__ import annotations

import math

from scaled_mm.errors import BadParamError
from scaled_mm.parallel.cost.links import PROTOCOLS, Hosts

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all_reduce", "reduce_scatter", "all_gather"
KINDS = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER)

_RING_BASE, _TREE_BASE = (6.6, 14.0, 8.4), (6.8, 14.0, 8.4)  # microseconds with each of PROTOCOLS
_NET_OVERHEAD = (1.0, 1.0, 3.0)  # of posting a step to the network, with each of PROTOCOLS; Intel CPUs
_PLATEAU = 1.4  # NCCL's factor of the latency of a ring all-reduce with Simple between nodes
_TREE_CORRECTION = 0.6
_LL_MESSAGE = 16 * 1024  # bytes to one peer up to which send and receive use LL: NCCL_P2P_LL_THRESHOLD


def fastest(kind: str, size: int, ranks: int, hosts: Hosts) -> tuple[float, str]:
    """(microseconds, "ring LL" or another algorithm and protocol) of a collective; (0.0, "none") with one rank or no bytes.

    kind: one of KINDS. size: bytes of the whole tensor: the input of a reduce-scatter or all-reduce, the output of an all-gather.
    BadParamError for an unknown kind, a negative size, or ranks that `Hosts.nodes` refuses.
    """
    if kind not in KINDS:
        raise BadParamError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    if size < 0:
        raise BadParamError(f"size: expected bytes >= 0, got {size!r}")
    nodes = hosts.nodes(ranks)
    if ranks == 1 or size == 0:
        return 0.0, "none"
    usable = [p for p, name in enumerate(PROTOCOLS) if name != "LL128" or hosts.link.ll128]
    found = [(_ring_us(kind, p, size, ranks, nodes, hosts), f"ring {PROTOCOLS[p]}") for p in usable]
    if kind == ALL_REDUCE:
        found += [(_tree_us(p, size, ranks, nodes, hosts), f"tree {PROTOCOLS[p]}") for p in usable]
    return min(found)


def all_reduce_us(size: int, ranks: int, hosts: Hosts) -> float:
    """Microseconds of an all-reduce of `size` bytes. Sent by each rank: 2 * size * (ranks - 1) / ranks."""
    return fastest(ALL_REDUCE, size, ranks, hosts)[0]


def reduce_scatter_us(size: int, ranks: int, hosts: Hosts) -> float:
    """Microseconds of a reduce-scatter whose input has `size` bytes on each rank. Sent by each: size * (ranks - 1) / ranks."""
    return fastest(REDUCE_SCATTER, size, ranks, hosts)[0]


def all_gather_us(size: int, ranks: int, hosts: Hosts) -> float:
    """Microseconds of an all-gather whose output has `size` bytes. Sent by each rank: size * (ranks - 1) / ranks."""
    return fastest(ALL_GATHER, size, ranks, hosts)[0]


def all_to_all_us(size: int, ranks: int, hosts: Hosts) -> float:
    """Microseconds of an all-to-all in which each rank has `size` bytes for all ranks, itself included, in equal parts.

    NCCL's tuning model has no all-to-all. Assumed: grouped sends and receives, all at once; the base and one step of a ring; LL for messages up to
    16 KiB; what stays in the node and what leaves it travel at the same time, the latter through the GPU's own NIC.
    """
    nodes = hosts.nodes(ranks)
    if ranks == 1 or size == 0:
        return 0.0
    message = size / ranks
    protocol, share = (0, 0.5) if message <= _LL_MESSAGE else (2, 1.0)
    inside = min(ranks, hosts.gpus_per_node)
    step = (hosts.link if nodes == 1 else hosts.network).ring_us[protocol]
    seconds = max(message * (inside - 1) / hosts.link.bandwidth, message * (ranks - inside) / hosts.network.bandwidth)
    return _RING_BASE[protocol] + step + seconds / share * 1e6


def _bus(ranks: int, nodes: int, hosts: Hosts) -> float:
    if nodes == 1:
        return hosts.link.bandwidth
    between = hosts.network.bandwidth * hosts.gpus_per_node
    return between if hosts.gpus_per_node == 1 else min(hosts.link.bandwidth, between)


def _low_latency_limit(nodes: int, hosts: Hosts) -> float:
    return hosts.link.ll_bandwidth if nodes == 1 else hosts.network.ll_bandwidth if nodes == 2 else hosts.network.ll_bandwidth_many_nodes


def _ring_us(kind: str, p: int, size: int, ranks: int, nodes: int, hosts: Hosts) -> float:
    each = 2 if kind == ALL_REDUCE else 1
    steps, between = each * (ranks - 1), each * (nodes - 1)
    bus = _bus(ranks, nodes, hosts)
    bus = (min(bus / 2, _low_latency_limit(nodes, hosts)), 0.92 * bus, bus)[p]
    inside_us = hosts.link.ring_us[p] if nodes == 1 else max(hosts.link.ring_us[p], _NET_OVERHEAD[p])
    # NCCL takes the tree's latency where a node has one GPU
    between_us = (hosts.network.tree_us if hosts.gpus_per_node == 1 else hosts.network.ring_us)[p]
    latency = _RING_BASE[p] + (steps - between) * inside_us + between * between_us
    if nodes > 1 and kind == ALL_REDUCE and PROTOCOLS[p] == "Simple":
        latency *= _PLATEAU
    return latency + size * steps / ranks / bus * 1e6


def _tree_us(p: int, size: int, ranks: int, nodes: int, hosts: Hosts) -> float:
    bus = 0.92 * _bus(ranks, nodes, hosts)
    bus = (min(bus / 3.8, _low_latency_limit(nodes, hosts)), bus * (7 / 9 if nodes == 1 else 15 / 16), bus)[p]
    steps_us = (ranks // nodes - 1) * hosts.link.tree_us[p] + math.log2(nodes) * hosts.network.tree_us[p]
    return _TREE_BASE[p] + 2 * steps_us + size * 2 / (bus * _TREE_CORRECTION) * 1e6
