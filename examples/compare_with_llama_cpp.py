"""Times GGUF products beside llama.cpp's, one line each: the measurements of `scaled-mm bench gguf` without a report.

    python examples/compare_with_llama_cpp.py [--llama build/bin/test-backend-ops] [--shapes 4096x14336] [--m 1,2,3,4,5,8,512]

The default shapes are those of `test-backend-ops perf -o MUL_MAT`. Without --llama, the example uses the times recorded in this repository if
the GPU model is the same. On a CPU pass smaller shapes; the default takes some minutes. `scaled-mm bench gguf` adds a report, plots and more
libraries. Times are in microseconds.
Exit status 1 if a product fails or is wrong, 2 if nothing could be timed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import scaled_mm as sm
from scaled_mm.bench.analysis import us_of
from scaled_mm.bench.gguf import analysis, llama
from scaled_mm.bench.gguf.cases import parse_cases, parse_formats
from scaled_mm.bench.gguf.peers import OURS_W4A8, every_peer
from scaled_mm.bench.gguf.suite import GgufSuite
from scaled_mm.bench.report import noise
from scaled_mm.cli import common
from scaled_mm.measure.environment import read_environment
from scaled_mm.measure.peer import OURS
from scaled_mm.measure.run import Options, run_grid
from scaled_mm.measure.shapes import parse_ms


def run(args: argparse.Namespace) -> int:
    device = common.device_of(args.device)
    cases = parse_cases(parse_formats(args.formats), args.shapes, args.m)
    environment = read_environment(device)
    times = llama.recorded(environment.gpu) if args.llama is None else llama.measure(args.llama, device)
    peers = [peer for peer in every_peer() if peer.name in (OURS, OURS_W4A8)]
    print(times.source.told)
    print("format weight tokens   ours, us  ours_w4a8  llama.cpp  llama.cpp / ours  right")
    bounds, right, measured = {peer.name: peer.bound for peer in peers}, True, []
    for records in run_grid(GgufSuite(times), cases, peers, device, Options(budget_ms=args.budget_ms)):
        measured += records
        for case in records:
            us = [us_of(case, name) for name in (OURS, OURS_W4A8)] + [case.llama_us, analysis.llama_ratio(case, OURS)]
            shown = ["-" if value is None else f"{value:.2f}" for value in us]
            check = analysis.check_of(case, bounds)
            right = right and check == "yes"
            print(f"{case.fmt} {case.shape} {case.M:6d} {shown[0]:>10} {shown[1]:>10} {shown[2]:>10} {shown[3]:>17}  {check}", flush=True)
    print(*noise(measured, environment.arch), sep="\n")
    return 0 if right else 1


def tokens(text: str) -> tuple[int, ...]:
    try:
        return parse_ms(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama", type=Path, help="llama.cpp's test-backend-ops")
    parser.add_argument("--formats", default="q4_0,q8_0")
    parser.add_argument("--shapes", default="4096x14336", help="rows of the weight x K, comma-separated")
    parser.add_argument("--m", type=tokens, default="1,2,3,4,5,8,512", help="tokens")
    parser.add_argument("--budget-ms", type=common.number("a number above 0", lambda value: value > 0), default=60.0)
    parser.add_argument("--device", help="cuda:0, cpu, ...; default the first GPU, or the CPU when there is none")
    args = parser.parse_args(argv)
    try:
        return run(args)
    except (sm.ScaledMMError, OSError) as error:  # one line: an argument is invalid, or something is missing
        print(f"compare_with_llama_cpp.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
