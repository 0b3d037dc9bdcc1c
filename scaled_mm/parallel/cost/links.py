"""What connects GPUs: links inside a node, and the network between nodes.

Sources. Latencies, the limits of LL and the shares of LL128: the tuning model of NCCL 2.27 (src/graph/tuning.cc: `hwLat`, `llMaxBws`).
Bandwidths are those that large collectives reach, not nominal ones:
NVLink 4: 18 links of 20.6 GB/s in NCCL (src/graph/topo.h); 8 H100s reached 362 GB/s with ring reduce-scatter (NCCL issue 1047), 370 with NVLS off
(nccl-tests issue 309). NVLink 3: 12 links of 20 GB/s in topo.h. PCIe Gen5: 35 to 45 GB/s for 8 H100 PCIe, as a hoster publishes; Gen4: half of it,
an assumption. Network: 46 to 48 GB/s for a NIC of 400 Gb/s (nccl-tests issue 290). Channels: 24 in NCCL's logs of hosts with 8 H100s; 8 with PCIe,
an assumption. NVLink multicast (NVLS) is off: hosts are shared.
"""

from __future__ import annotations

import dataclasses

from scaled_mm.errors import BadParamError
from scaled_mm.kernels.arch import GPUS
from scaled_mm.kernels.gpu import GpuFacts, facts

PROTOCOLS = ("LL", "LL128", "Simple")


@dataclasses.dataclass(frozen=True)
class Link:
    """bandwidth: bytes per second that a GPU sends, and at the same time receives, in a large collective (NCCL's bus bandwidth).

    ll_bandwidth: the limit of protocol LL, in bytes per second; of a network between two nodes. ll_bandwidth_many_nodes: the same between more nodes.
    ring_us, tree_us: microseconds of a step with each of PROTOCOLS. ll128: whether NCCL uses LL128. channels: of NCCL, thread blocks of a large
    collective; each takes an SM from a kernel that runs beside it. The model takes as many for small ones.
    """

    name: str
    bandwidth: float
    ll_bandwidth: float
    ring_us: tuple[float, float, float]
    tree_us: tuple[float, float, float]
    ll128: bool = True
    channels: int = 24
    ll_bandwidth_many_nodes: float = 0.0

    def __hash__(self) -> int:
        return hash(self.name)  # equal links have equal names; hashing all fields would dominate a cached `best_chunks`


_NVLINK_US = {"ring_us": (0.6, 1.9, 3.4), "tree_us": (0.6, 1.25, 4.0)}
_PCIE_US = {"ring_us": (1.0, 2.5, 5.7), "tree_us": (1.0, 1.9, 4.0), "ll128": False, "channels": 8}

LINKS: dict[str, Link] = {
    "nvlink4": Link("nvlink4", 360e9, 141e9, **_NVLINK_US),
    "nvlink3": Link("nvlink3", 230e9, 87.7e9, **_NVLINK_US),
    "pcie5": Link("pcie5", 40e9, 141e9, **_PCIE_US),
    "pcie4": Link("pcie4", 20e9, 87.7e9, **_PCIE_US),
}
"""Inside a node, by name: an HGX host with NVSwitch of Hopper or Ampere; GPUs in PCIe slots."""

NETWORK = Link("400 Gb/s", 46e9, 39e9, (2.7, 4.0, 14.0), (5.0, 8.5, 14.0), ll_bandwidth_many_nodes=20.4e9)
"""One NIC of 400 Gb/s for each GPU. The limits of LL are those of a host with Intel CPUs."""

GPU_LINKS: dict[str, tuple[str, str]] = {
    "NVIDIA H200": ("sm90", "nvlink4"),
    "NVIDIA H100 80GB HBM3": ("sm90", "nvlink4"),
    "NVIDIA H100 PCIe": ("sm90", "pcie5"),
    "NVIDIA A100-SXM4-80GB": ("sm80", "nvlink3"),
    "NVIDIA A100 80GB PCIe": ("sm80", "pcie4"),
    "NVIDIA L40S": ("sm89", "pcie4"),
    "NVIDIA L4": ("sm89", "pcie4"),
}
"""(architecture of its tile table, name of its link) by the driver's name of a GPU."""


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Equal nodes: `gpus_per_node` GPUs with a link between any two, and a network between nodes. Raises BadParamError for a wrong argument."""

    link: Link
    gpus_per_node: int = 8
    network: Link = NETWORK

    def __post_init__(self):
        for name in ("link", "network"):
            if not isinstance(getattr(self, name), Link):
                raise BadParamError(f"{name}: expected a Link, got {getattr(self, name)!r}")
        check_count("gpus_per_node", self.gpus_per_node)

    def nodes(self, ranks: int) -> int:
        """The nodes that so many ranks fill. BadParamError unless they fit into one, or fill several."""
        check_count("ranks", ranks)
        if ranks > self.gpus_per_node and ranks % self.gpus_per_node:
            raise BadParamError(f"ranks: expected at most {self.gpus_per_node} (gpus_per_node) or a multiple of it, got {ranks}")
        return max(1, ranks // self.gpus_per_node)


def check_count(name: str, value: object, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadParamError(f"{name}: expected an integer >= {least}, got {value!r}")


def hosts_of(gpu: str, link: str | None = None, gpus_per_node: int = 8) -> Hosts:
    """The nodes of a GPU by the driver's name of it. link: a name of LINKS in place of that GPU's own. BadParamError for an unknown name."""
    if link is None:
        link = _known(gpu)[1]
    if link not in LINKS:
        raise BadParamError(f"link: expected one of {', '.join(LINKS)}, got {link!r}")
    return Hosts(LINKS[link], gpus_per_node)


def facts_of(gpu: str) -> GpuFacts:
    """The facts of a GPU by the driver's name of it. BadParamError for an unknown name."""
    return facts(gpu, _known(gpu)[0], GPUS[gpu].multiprocessors)


def _known(gpu: str) -> tuple[str, str]:
    if gpu not in GPU_LINKS:
        raise BadParamError(f"gpu: expected one of {', '.join(GPU_LINKS)}, got {gpu!r}")
    return GPU_LINKS[gpu]
