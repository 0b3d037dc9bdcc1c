"""`scaled-mm bench parallel`: linear layers and experts on several GPUs, timed under torchrun, or predicted by the cost model (--simulate)."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from scaled_mm.cli import common
from scaled_mm.cli.bench import frame, shown

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from scaled_mm.bench.parallel.record import ParallelDocument
    from scaled_mm.parallel.ranks import Ranks

HELP = (
    "time row-parallel linear layers and experts on several GPUs (under torchrun), or predict them by a cost model (--simulate), and write a report"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--simulate", action="store_true", help="predict; without it the command runs under torchrun, one process a GPU, and measures")
    layers = "8B_o, 8B_down, 70B_o, 70B_down or tiny, comma-separated, or none; default on GPUs all but tiny, on CPUs tiny"
    experts = "mixtral, qwen3, deepseek or tiny, comma-separated, or none; default on GPUs qwen3,deepseek, on CPUs tiny"
    add("--shapes", metavar="NAMES", help=f"measured layers: {layers}")
    add("--experts", metavar="NAMES", help=f"measured experts: {experts}")
    add("--seed", type=common.seed, default=0, help="seed of the measured inputs; default 0")
    add("--gpu", default="NVIDIA H200", metavar="NAME", help="the driver's name of the GPU to simulate; default NVIDIA H200")
    add("--link", metavar="NAME", help="simulated: nvlink4, nvlink3, pcie5 or pcie4, between GPUs of a node; default that of the GPU")
    add("--ranks", default="2,4,8,16", metavar="R", help="simulated numbers of GPUs, comma-separated; default 2,4,8,16")
    add("--gpus-per-node", type=common.integer(1), default=8, metavar="N", help="simulated GPUs of a node; more ranks are on several; default 8")
    add("--tokens", metavar="T", help="comma-separated; default 1,16,64,256,2048, on CPUs 1,16, simulated also 8192")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="report directory; default reports/<arch>/<gpu>-x<ranks>, simulated reports/<arch>/<gpu>/parallel_simulated",
    )
    add("--json", action="store_true", help="print the document on stdout")
    add("--render", type=Path, metavar="DIR", help="only render the report of DIR/parallel.json again")


def run(args: argparse.Namespace) -> int:
    """0: done; 1: bits differ from those of one GPU; 2: the arguments are invalid."""
    from scaled_mm.bench.parallel import report
    from scaled_mm.bench.parallel.record import ParallelDocument
    from scaled_mm.errors import ScaledMMError
    from scaled_mm.measure import plots

    console = common.console(stderr=args.json)
    if args.render is not None:
        return shown.render(args, report.render, ParallelDocument, console)
    try:
        plots.preload()
        if not args.simulate:
            return _measure(args, console)
        document = simulate(args)
        out = common.writable_folder("--out", args.out or _folder(document.settings.gpu) / "parallel_simulated")
    except (ValueError, ScaledMMError) as error:
        return frame.usage(args, str(error))
    path = document.save(out)
    shown.finish(document, path, report.render(out), args, console, lambda: _show(document, console))
    return frame.OK


def _measure(args: argparse.Namespace, console: Console) -> int:
    import torch
    import torch.distributed as dist

    from scaled_mm.errors import BadParamError
    from scaled_mm.parallel.ranks import Ranks

    if "WORLD_SIZE" not in os.environ:
        raise BadParamError("--simulate: expected this option, or to run under torchrun: torchrun --nproc-per-node N -m scaled_mm bench parallel")
    cases = _cases(args)  # refused before the ranks meet
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # hosts may be shared
    dist.init_process_group()
    status = _on_ranks(args, cases, Ranks.of(None), device, console)
    dist.destroy_process_group()  # not after an error: it would wait for collectives that other ranks do not join
    return status


def _on_ranks(args: argparse.Namespace, cases: tuple, ranks: Ranks, device: torch.device, console: Console) -> int:
    from datetime import datetime, timezone

    import torch.distributed as dist

    from scaled_mm.bench.parallel import measured, report
    from scaled_mm.bench.parallel.record import ParallelDocument, Simulation
    from scaled_mm.measure.environment import read_environment
    from scaled_mm.tables.tuned import slug

    shapes, models, ms = cases
    environment = read_environment(device)
    out = args.out or Path("reports") / environment.arch / f"{slug(environment.gpu)}-x{ranks.size}"
    ranks.gather_facts(lambda: {"out": common.writable_folder("--out", out)} if ranks.rank == 0 else {})
    progress = lambda what: console.print(f"{what} ...", highlight=False) if ranks.rank == 0 else None  # noqa: E731
    backend = f"{dist.get_backend_config()}, NCCL_NVLS_ENABLE={os.environ.get('NCCL_NVLS_ENABLE', 'not set')}"
    settings = Simulation(simulated=False, gpu=environment.gpu, link=backend, network="one node", gpus_per_node=ranks.size)
    document = ParallelDocument(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=f"torchrun --nproc-per-node {ranks.size} -m scaled_mm {frame.command_line(args, args.parser).removeprefix('scaled-mm ')}",
        settings=settings,
        environment=environment,
        implementations=[],
    )
    for found in (measured.linear(shapes, ms, ranks, device, args.seed, progress), measured.experts(models, ms, ranks, device, args.seed, progress)):
        for layer in found:
            document.measured.append(layer)
            if ranks.rank == 0:
                path = document.save(out)
    if ranks.rank or not document.measured:
        return frame.OK
    shown.finish(document, path, report.render(out), args, console, lambda: _show_measured(document, console))
    wrong = [(layer, way) for layer in document.measured for way in layer.ways if way.bit_equal is False]
    for layer, way in wrong[:1]:
        console.print(f"[red]other bits than one GPU:[/red] {layer.shape}, {layer.M} tokens, {way.name}; see {path}", highlight=False)
    return frame.FAILED if wrong else frame.OK


def _cases(args: argparse.Namespace) -> tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]]:
    """(layers, models of experts, numbers of tokens) of the options, by default small ones on CPUs. ValueError for an unknown name."""
    import torch

    from scaled_mm.bench.experts.cases import MODELS
    from scaled_mm.bench.parallel.cases import LINEAR, MEASURED_EXPERTS, MEASURED_M, TINY
    from scaled_mm.measure.shapes import parse_ms

    def names(option: str, text: str | None, default: str, known: dict) -> tuple[str, ...]:
        words = [word.strip() for word in (default if text is None else text).split(",") if word.strip()]
        if words == ["none"]:
            return ()
        for word in words:
            if word not in known:
                raise ValueError(f"{option}: expected none or some of {', '.join(known)}, got {word!r}")
        return tuple(dict.fromkeys(words))

    with frame.naming("--tokens"):
        ms = tuple(parse_ms(args.tokens)) if args.tokens is not None else MEASURED_M if torch.cuda.is_available() else (1, 16)
    layers, experts = (",".join(LINEAR), MEASURED_EXPERTS) if torch.cuda.is_available() else ("tiny", "tiny")
    return names("--shapes", args.shapes, layers, LINEAR | TINY), names("--experts", args.experts, experts, MODELS), ms


def simulate(args: argparse.Namespace) -> ParallelDocument:
    """The document of the arguments. BadParamError or ValueError that names the option."""
    from datetime import datetime, timezone

    import torch

    from scaled_mm.bench.parallel import suite
    from scaled_mm.bench.parallel.cases import M
    from scaled_mm.bench.parallel.record import ParallelDocument, Simulation
    from scaled_mm.errors import BadParamError
    from scaled_mm.measure.environment import read_environment
    from scaled_mm.measure.shapes import parse_ms
    from scaled_mm.parallel import cost

    for option in ("shapes", "experts"):
        if getattr(args, option) is not None:
            raise BadParamError(f"--{option}: expected none with --simulate, got {getattr(args, option)}")
    with frame.naming("--tokens"):
        ms = M if args.tokens is None else parse_ms(args.tokens)
    with frame.naming("--ranks"):
        ranks = _ranks(args.ranks)
    if args.gpu not in cost.GPU_LINKS:
        raise BadParamError(f"--gpu: expected one of {', '.join(cost.GPU_LINKS)}, got {args.gpu!r}")
    if args.link is not None and args.link not in cost.LINKS:
        raise BadParamError(f"--link: expected one of {', '.join(cost.LINKS)}, got {args.link!r}")
    hosts = cost.hosts_of(args.gpu, args.link, args.gpus_per_node)
    with frame.naming("--ranks"):
        for size in ranks:
            hosts.nodes(size)
    layers = suite.linear(ms, ranks, args.gpu, hosts)
    return ParallelDocument(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=frame.command_line(args, args.parser),
        settings=Simulation(gpu=args.gpu, link=hosts.link.name, network=hosts.network.name, gpus_per_node=hosts.gpus_per_node),
        environment=read_environment(torch.device("cpu")),
        implementations=[],
        linear=layers,
        decoders=suite.decoders(layers, args.gpu),
        experts=suite.experts(ms, ranks, hosts),
    )


def _ranks(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if not word.isdigit() or not 2 <= int(word) <= 4096:
            raise ValueError(f"expected integers from 2 to 4096, got {word!r}")
    if not words:
        raise ValueError("expected at least one number of GPUs, got an empty list")
    return tuple(dict.fromkeys(map(int, words)))


def _folder(gpu: str) -> Path:
    from scaled_mm.parallel import cost
    from scaled_mm.tables.tuned import slug

    return Path("reports") / cost.GPU_LINKS[gpu][0] / slug(gpu)


def _show_measured(document: ParallelDocument, console: Console) -> None:
    from scaled_mm.bench.parallel.report import MEASURED_HEADER, measured_rows

    title = f"{document.settings.gpu}, {document.settings.gpus_per_node} ranks: microseconds"
    table = shown.table(title, ("layer", *MEASURED_HEADER), left=("layer", "way"))
    for layer in document.measured:
        for row in measured_rows(layer):
            table.add_row(layer.shape, *row)
    console.print(table)


def _show(document: ParallelDocument, console: Console) -> None:
    from scaled_mm.bench.parallel.report import BF16, EXACT, WAYS

    table = shown.table(
        f"{document.settings.gpu}, simulated: microseconds of a row-parallel layer",
        ("layer", "ranks", "M", "one GPU", *WAYS, "exact over bf16", "chunks"),
        left=("layer",),
    )
    for one in document.linear:
        exact = one.ways[EXACT]
        times = (f"{one.ways[way].us:.1f}" for way in WAYS)
        ratio = f"{exact.us / one.ways[BF16].us:.2f}"
        table.add_row(one.shape, str(one.ranks), str(one.M), f"{one.single_us:.1f}", *times, ratio, str(exact.chunks))
    console.print(table)
    console.print("Nothing was measured: these are predictions of a cost model.", highlight=False)
