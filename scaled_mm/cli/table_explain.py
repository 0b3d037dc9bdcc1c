"""`scaled-mm table explain M N K [--format q4_0]`: which kernel config serves an INT8 product or one with a GGUF format, and why."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from scaled_mm.cli import common
from scaled_mm.errors import BadParamError
from scaled_mm.gguf_formats import WEIGHT_FORMATS
from scaled_mm.kernels.arch import ARCHES

if TYPE_CHECKING:
    from scaled_mm.kernels.config import KernelConfig
    from scaled_mm.kernels.gpu import GpuFacts
    from scaled_mm.tables import TileTable

_GPUS = ", ".join(f"{arch.typical.multiprocessors} for {arch.name}, {arch.typical.label}" for arch in ARCHES.values() if arch.typical)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    axes = (
        ("M", "tokens"),
        ("N", "output features: columns of b, rows of a GGUF weight"),
        ("K", "inner dimension"),
    )
    for axis, what in axes:
        parser.add_argument(axis, type=common.integer(0, common.LARGEST_SIZE), help=what)
    parser.add_argument("--sms", type=common.integer(1), metavar="N", help=f"SMs to count waves and to predict times for (default: {_GPUS})")
    parser.add_argument("--format", choices=WEIGHT_FORMATS, help="a product with a weight in this GGUF format instead of an INT8 product")


def run(args: argparse.Namespace, table: TileTable) -> int:
    """0; 1 if no kernel takes the product."""
    return _explain(args, table) if args.format is None else _explain_block(args, table)


def row_dict(table: TileTable, name: str) -> dict[str, Any]:
    """A kernel config for JSON, with its resources."""
    from scaled_mm.kernels.registry import config_cost

    row = table.row(name)
    cost = config_cost(row, table.arch)
    align_a, align_b, align_out = row.alignment
    return {
        **row.model_dump(mode="json"),
        "alignment_bytes": {"a": align_a, "b": align_b, "out": align_out},
        "store_bytes": row.store_bytes,
        "estimate": {
            "stages": cost.stages,
            "stage_bytes": cost.stage_bytes,
            "epilogue_bytes": cost.epilogue_bytes,
            "shared_memory_bytes": cost.shared_memory,
            "accumulator_registers": cost.accumulators,
        },
    }


def _explain(args: argparse.Namespace, table: TileTable) -> int:
    from scaled_mm.errors import K_BOUNDS
    from scaled_mm.tables.select import contiguous_misfits, contiguous_row, output_tiles, refusal

    M, N, K = args.M, args.N, args.K
    if (reason := refusal(M, N, K)) is not None:
        return _refused(args, table, reason)
    gpu = _gpu(table, args.sms)
    selection = table.select(M, N, K, gpu=gpu)
    constant = table.select(M, N, K, constant_b=True, gpu=gpu)
    fastest = [(row, table.time_model(row).parts(M, N, K, gpu, constant_b=False)) for row in _three_fastest(table, M, N, K, gpu)]
    row = selection.row
    misfits = contiguous_misfits(row, M, N, K)
    tiles = output_tiles(row, M, N)
    blocks = tiles * row.split_k
    sms = gpu.multiprocessors
    if args.json:
        common.print_json(
            {
                "M": M,
                "N": N,
                "K": K,
                "arch": table.arch,
                "source": table.source,
                "tuned": table.tuned,
                "gpu": table.gpu,
                "kernel": row.name,
                "bucket": selection.bucket_index,
                "reason": selection.reason,
                "constant_b": {"kernel": constant.row.name, "bucket": constant.bucket_index, "reason": constant.reason},
                "tiles": tiles,
                "waves": blocks / sms,
                "predicted": [{"kernel": one.name, "us": parts.us, **parts._asdict()} for one, parts in fastest],
                "contiguous_misfits": misfits,
                "fallback": table.fallback,
                "row": row_dict(table, row.name),
            },
            indent=2,
        )
        return 0
    estimate = row_dict(table, row.name)["estimate"]
    registers = estimate["accumulator_registers"]
    unpadded = contiguous_row(table, M, N, K, gpu=gpu).name
    served = f"{unpadded} if the tensors are contiguous, {row.name} if their rows are padded" if misfits else row.name
    print(f"M={M} N={N} K={K}: {served}")
    print(f"  why     {selection.reason}")
    print(f"  table   {f'tuned on {table.gpu}' if table.tuned else 'not tuned'}")
    shape = [f"tile {row.tile}", f"warp {row.warp}"] if row.warp else [f"tile {row.tile}"]
    shape += [f"cluster {row.cluster}", row.schedule, row.scheduler if row.schedule else None]
    if row.swizzle > 1:
        shape.append(f"swizzle {row.swizzle}")
    if row.prefetch:
        shape.append(f"prefetch {row.prefetch}")
    if row.early_weights:
        shape.append("early weights")
    print(f"  kernel  {row.family}, {', '.join(part for part in shape if part)}{', swap_ab' if row.swap_ab else ''}")
    split = f" x {row.split_k} parts of K" if row.split_k > 1 else ""
    print(f"  tiles   {tiles}{split}: {blocks / sms:.2f} waves on {sms} multiprocessors")
    stages = f"{estimate['stages']} {'stage' if estimate['stages'] == 1 else 'stages'}"
    cost = f"{stages}, {estimate['shared_memory_bytes'] / 1024:.1f} KB of shared memory"
    print(f"  cost    {cost}{'' if registers is None else f', {registers} accumulator registers per thread'}")
    if fastest:
        print("  times   predicted, for weights that are not prepared:")
    for one, parts in fastest:
        print(f"          {one.name} {parts.us:.4g} us: {parts}")
    if constant.row != row:
        print(f"  note    with a prepared weight {constant.row.name}: {constant.reason}")
    for misfit in misfits:
        print(f"  note    {misfit}; such operands take {unpadded}")
    for bound, points in ((K_BOUNDS[1], "a zero point"), (K_BOUNDS[2], "two zero points")):
        if K > bound:
            print(f"  note    with {points} it is refused: K <= {bound} then")
            break
    return 0


def _gpu(table: TileTable, sms: int | None) -> GpuFacts:
    """The GPU that a tuned table was measured on, else a common one of the architecture; with `sms` SMs if that is given."""
    from scaled_mm.kernels.gpu import GpuFacts, facts, typical

    if ARCHES[table.arch].typical is None:
        if sms is None:
            what = f"no typical GPU of {table.arch} is known (scaled_mm/kernels/arch.py)"
            raise BadParamError(f"--sms: expected the number of SMs of the GPU: {what}")
        return GpuFacts(table.arch, sms, 0.0, 0.0)
    return facts(table.gpu or "", table.arch, sms or typical(table.arch).multiprocessors)


def _three_fastest(table: TileTable, M: int, N: int, K: int, gpu: GpuFacts) -> list[KernelConfig]:
    """By predicted time, of tensors whose weights are not constant; none where there is nothing to compute."""
    known = gpu.bandwidth > 0 and M and N and K
    return [row for _, row in table.fastest(M, N, K, gpu=gpu)[:3]] if known else []


_OTHER_MODES = {
    "w4a8": "with q8_1 activations",
    "w4a16": "in mode w4a16, as for float32 outputs and unpacked weights,",
    "w16a16": "in mode w16a16, as for float32 activations,",
}


def _explain_block(args: argparse.Namespace, table: TileTable) -> int:
    from scaled_mm.gguf_formats import WEIGHT_FORMATS
    from scaled_mm.kernels.registry import family_of
    from scaled_mm.tables import FASTEST, load_table
    from scaled_mm.tables.rules import shared_memory_of
    from scaled_mm.tables.select import MODES, block_refusal

    M, N, K = args.M, args.N, args.K
    if (reason := block_refusal(M, N, K, args.format)) is not None:
        return _refused(args, table, reason)
    section = table.gguf or load_table(table.arch).gguf  # as for calls: a tuned table may lack the section
    mode = next(rule.mode for rule in section.auto if rule.m is None or M <= rule.m)
    by_time = any(bucket.kernel == FASTEST for bucket in section.buckets)
    gpu = _gpu(section, args.sms) if by_time or args.sms is not None else None
    minima = WEIGHT_FORMATS[args.format].second == "m"
    by_mode = {name: section.select(M, N, K, mode=name, gpu=gpu, minima=minima) for name in MODES}
    selection = by_mode[mode]
    fastest = section.fastest(M, N, K, gpu=gpu)[:3] if M and N and section.buckets[selection.bucket_index].kernel == FASTEST else []
    row, limit = selection.row, shared_memory_of(section)
    family = family_of(row)
    stages, memory = family.stages(row, args.format, limit), family.shared_memory(row, args.format, limit)
    if args.json:
        head = {
            "format": args.format,
            "M": M,
            "N": N,
            "K": K,
            "arch": section.arch,
            "source": section.source,
            "tuned": section.tuned,
            "gpu": section.gpu,
        }
        chosen = {"kernel": selection.row.name, "bucket": selection.bucket_index, "reason": selection.reason, "auto": mode}
        modes = {name: {"kernel": one.row.name, "bucket": one.bucket_index, "reason": one.reason} for name, one in by_mode.items()}
        estimate = {"stages": stages, "shared_memory_bytes": memory}
        predicted = [{"kernel": one.name, "us": us} for us, one in fastest]
        row_fields = {**row.model_dump(mode="json"), "estimate": estimate}
        common.print_json({**head, **chosen, "modes": modes, "predicted": predicted, "row": row_fields}, indent=2)
        return 0
    print(f"{_product(args)}: {row.name}")
    print(f"  why     {selection.reason}")
    print(f"  mode    auto is {mode} for float16 and bfloat16 activations, w16a16 for float32 ones")
    print(f"  table   {f'tuned on {section.gpu}' if section.tuned else 'not tuned'}")
    print(f"  kernel  {row.family}, a tile is {row.tile.m} tokens x {row.tile.n} rows of the weight x {row.tile.k} k")
    ring = f"{stages} stages of the weight" if stages > 1 else "no stages, the weight goes from memory to registers"
    print(f"  cost    {ring}, {memory / 1024:.1f} KB of shared memory")
    if fastest:
        times = ", ".join(f"{one.name} {us:.4g} us" for us, one in fastest)
        print(f"  times   predicted, on {gpu.multiprocessors} multiprocessors: {times}")
    for name, what in _OTHER_MODES.items():
        if (other := by_mode[name]).row != row:
            print(f"  note    {what} {other.row.name}: {other.reason}")
    for note in family.notes(row, args.format, limit) if M and N else ():
        print(f"  note    {note}")
    if M == 0 or N == 0:
        print("  note    there is nothing to compute: no kernel is launched")
    return 0


def _product(args: argparse.Namespace) -> str:
    """`M=16 N=4096 K=4096`; for a GGUF product also the meaning of M and N."""
    if args.format is None:
        return f"M={args.M} N={args.N} K={args.K}"
    return f"M={args.M} tokens, N={args.N} rows of a {args.format} weight, K={args.K}"


def _refused(args: argparse.Namespace, table: TileTable, reason: str) -> int:
    if args.json:
        product = {"M": args.M, "N": args.N, "K": args.K, **({"format": args.format} if args.format else {})}
        head = {**product, "arch": table.arch, "source": table.source}
        common.print_json({**head, "kernel": None, "reason": f"refused: expected {reason}"}, indent=2)
    else:
        print(f"{_product(args)}: refused")
        print(f"  why     expected {reason}")
    return 1
