"""`scaled-mm bench parallel --simulate`: what the cost model says of linear layers and experts on several GPUs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from scaled_mm.cli import common
from scaled_mm.cli.bench import frame, shown

if TYPE_CHECKING:
    from rich.console import Console

    from scaled_mm.bench.parallel.record import ParallelDocument

HELP = "predict linear layers and experts on several GPUs by a cost model (--simulate), and write a report; measuring them is missing"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--simulate", action="store_true", help="predict; required, because measuring on several GPUs is missing")
    add("--gpu", default="NVIDIA H200", metavar="NAME", help="the driver's name of the GPU to simulate; default NVIDIA H200")
    add("--link", metavar="NAME", help="nvlink4, nvlink3, pcie5 or pcie4, between GPUs of a node; default that of the GPU")
    add("--ranks", default="2,4,8,16", metavar="R", help="numbers of GPUs, comma-separated; default 2,4,8,16")
    add("--gpus-per-node", type=common.integer(1), default=8, metavar="N", help="GPUs of a node; more ranks are on several; default 8")
    add("--m", default="1,16,64,256,2048,8192", metavar="M", help="tokens, comma-separated; default 1,16,64,256,2048,8192")
    add("--out", type=Path, metavar="DIR", help="report directory; default reports/<arch>/<gpu>/parallel_simulated")
    add("--json", action="store_true", help="print the document on stdout")
    add("--render", type=Path, metavar="DIR", help="only render the report of DIR/parallel.json again")


def run(args: argparse.Namespace) -> int:
    """0: done; 2: the arguments are invalid."""
    from scaled_mm.bench.parallel import report
    from scaled_mm.bench.parallel.record import ParallelDocument
    from scaled_mm.errors import ScaledMMError
    from scaled_mm.measure import plots

    console = common.console(stderr=args.json)
    if args.render is not None:
        return shown.render(args, report.render, ParallelDocument, console)
    try:
        document = simulate(args)
        out = common.writable_folder("--out", args.out or _folder(document))
        plots.preload()
    except (ValueError, ScaledMMError) as error:
        return frame.usage(args, str(error))
    path = document.save(out)
    shown.finish(document, path, report.render(out), args, console, lambda: _show(document, console))
    return frame.OK


def simulate(args: argparse.Namespace) -> ParallelDocument:
    """The document of the arguments. BadParamError or ValueError that names the option."""
    from datetime import datetime, timezone

    import torch

    from scaled_mm.bench.parallel import suite
    from scaled_mm.bench.parallel.record import ParallelDocument, Simulation
    from scaled_mm.errors import BadParamError
    from scaled_mm.measure.environment import read_environment
    from scaled_mm.measure.shapes import parse_ms
    from scaled_mm.parallel import cost

    if not args.simulate:
        raise BadParamError("--simulate: expected this option, got none: measuring on several GPUs is missing, the cost model can only predict")
    with frame.naming("--m"):
        ms = parse_ms(args.m)
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


def _folder(document: ParallelDocument) -> Path:
    from scaled_mm.parallel import cost
    from scaled_mm.tables.tuned import slug

    gpu = document.settings.gpu
    return Path("reports") / cost.GPU_LINKS[gpu][0] / slug(gpu) / "parallel_simulated"


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
