"""`scaled-mm verify`: quantizes random matrices, multiplies them here and compares bit for bit with the reference."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from scaled_mm.cli import common

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from scaled_mm import Handle
    from scaled_mm.jit.library import KernelName
    from scaled_mm.kernels.gpu import GpuFacts
    from scaled_mm.tables import TileTable

HELP = "check on this machine that every result equals the reference, bit for bit"

# M, N, K: nothing aligned, decode, one past a tile, one tile of tokens, a prefill chunk. The cheapest come first, because a time limit leaves
# out the last ones. About five seconds on two CPU cores. On a new GPU machine their kernels are compiled first. N is chosen so that few are c3x
# kernels, which compile longest: test_verify_names_the_kernels_that_its_products_need counts them.
DEFAULT_SHAPES = ((33, 1000, 1031), (1, 4096, 4096), (17, 2048, 4096), (128, 1024, 4096), (512, 3072, 2048))
OUT_DTYPES = ("bfloat16", "float16", "float32", "int32")

_POISON_INT32 = -1595877173
_QUANTIZER = ("rowwise_quantize", "fp32")
_TIMING_BUDGET_MS = 40.0  # of one product
# For all products together, by device: on a slow or busy CPU the others stay untimed.
_TIMING_LIMIT_S = {"cpu": 10.0, "cuda": 30.0}
# On a CPU, no product of the default shapes is started later than this after the process started. The checks get at least _LEAST_S, and the
# first shape is always checked. Importing torch takes half a minute if other programs leave a twentieth of a core.
_LIMIT_S, _LEAST_S = 40.0, 10.0


@dataclasses.dataclass(frozen=True)
class Result:
    """One product, computed by `sm.scaled_mm` and through a descriptor.

    relative_error: ||out - ref|| / ||ref||, ref: the float32 product of the matrices before quantization. An int32 out is scaled first.
    median_us: of one call of the descriptor; None without --time, or after the time for measuring was spent.
    difference: from the reference; None if equal.
    error: why there is no product; None if there is one.
    """

    m: int
    n: int
    k: int
    out_dtype: str
    bias: bool
    asymmetric: bool
    kernel: str | None = None
    reason: str | None = None
    equal: bool = False
    difference: str | None = None
    relative_error: float | None = None
    median_us: float | None = None
    error: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help='"cuda:0", "cpu", ...; default: cuda:0 where torch sees a GPU, else cpu')
    parser.add_argument(
        "--shape",
        metavar="MxNxK",
        type=_shape,
        action="append",
        help="may be given several times; default: a list of five",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help=f"check the whole list of shapes on a busy or slow CPU too; default: begin no product {_LIMIT_S:.0f} s after the start",
    )
    parser.add_argument("--asymmetric", action="store_true", help="quantize both matrices with zero points")
    parser.add_argument("--time", action="store_true", help="also the median time of a call: one weight, caches warm, a GPU below its power limit")
    parser.add_argument("--seed", type=common.seed, default=0, help="of the random matrices (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """0 if every result equals the reference; 1 if one differs or is refused."""
    import torch

    from scaled_mm import Handle
    from scaled_mm.cpu import integer_product

    device = common.device_of(args.device)
    shapes = args.shape or list(DEFAULT_SHAPES)
    handle = Handle(str(device))
    if device.type == "cpu":
        integer_product.choice()  # BadParamError if SCALED_MM_CPU_KERNEL cannot be used
    else:
        _build_ahead(handle, shapes, args.asymmetric)
    total = len(shapes) * len(_combinations())
    limited = device.type == "cpu" and not args.all and not args.shape
    deadline = time.monotonic() + max(_LIMIT_S - common.process_age(), _LEAST_S) if limited else math.inf
    clock = _Clock(_TIMING_LIMIT_S[device.type]) if args.time else None
    results = []
    with _progress(total, quiet=args.json) as advance:
        for m, n, k in shapes:
            if results and time.monotonic() > deadline:
                break
            with _in_memory(m, n, k):
                for result in verify_shape(handle, device, m, n, k, args.asymmetric, clock, args.seed):
                    results.append(result)
                    advance()
                    if time.monotonic() > deadline and (m, n, k) != shapes[0]:
                        break

    left_out = total - len(results)
    equal = all(result.equal for result in results)
    head = {"device": str(device), "name": _device_name(device), "torch": torch.__version__, "seed": args.seed}
    if args.json:
        refused = sum(result.error is not None for result in results)
        verdict = {"equal": equal, "refused": refused, "left_out": left_out}
        common.print_json({**head, **verdict, "cases": [dataclasses.asdict(r) for r in results]}, indent=2)
    else:
        _print(head, results, left_out, timed=args.time)
    return 0 if equal else 1


class _Clock:
    """The time that is left for measuring."""

    def __init__(self, seconds: float):
        self.left = seconds

    def measure(self, call: Callable[[], None], device: torch.device) -> float | None:
        """The median time of a call in microseconds; None once the time is spent."""
        from scaled_mm.measure import timing
        from scaled_mm.measure.regime import BRIEF  # the standard one rests and settles for 0.6 s a product, 21 s in all

        if self.left <= 0:
            return None
        start = time.monotonic()
        us = timing.measure([call], device, budget_ms=_TIMING_BUDGET_MS, cold=False, regime=BRIEF).us
        self.left -= time.monotonic() - start
        return us


def needed_kernels(table: TileTable, shapes: Sequence[tuple[int, int, int]], asymmetric: bool, gpu: GpuFacts | None = None) -> list[KernelName]:
    """The kernels of a table that `verify` launches for these shapes, and the quantizer's. Tensors are contiguous; with zero points, prepared weights
    are covered too."""
    from scaled_mm.jit import codegen
    from scaled_mm.tables.select import contiguous_row

    names: set[KernelName] = {_QUANTIZER, *([(codegen.ZERO_POINT_TERMS, None)] if asymmetric else [])}
    sizes = {"bf16": 2, "fp16": 2, "fp32": 4, "int32": 4}
    for (M, N, K), out, constant_b in itertools.product(shapes, sizes, {False, asymmetric}):
        names.add((contiguous_row(table, M, N, K, constant_b, sizes[out], gpu).name, out))
    return sorted(names, key=str)


def _build_ahead(handle: Handle, shapes: Sequence[tuple[int, int, int]], asymmetric: bool) -> None:
    """Compiles the needed kernels in parallel, one per core, and the torch operators. Otherwise they would be compiled one after the other."""
    from scaled_mm.core import dispatcher
    from scaled_mm.errors import KernelNotBuiltError
    from scaled_mm.jit import dispatch, library
    from scaled_mm.kernels.gpu import of_handle

    table = dispatch.machine_table(handle.arch)
    if library.arch_library(table) is not None:
        return
    names = needed_kernels(table, shapes, asymmetric, of_handle(handle))
    with ThreadPoolExecutor(1) as beside, _progress(len(names), quiet=False, what="compile") as advance:
        beside.submit(dispatcher.load_cuda_operators, compiles_kernels=False)  # an error is dropped, here and below: the product raises it again
        with contextlib.suppress(KernelNotBuiltError):
            library.build_kernels(table, names, on_kernel=lambda *_: advance(), apart=True)


def verify_shape(handle: Handle, device: torch.device, m: int, n: int, k: int, asymmetric: bool, clock: _Clock | None, seed: int) -> Iterator[Result]:
    """The product [m, k] x [k, n] of two matrices: one Result for each output dtype, with and without bias.

    clock: measures each product; None: nothing is timed.
    """
    import torch

    from scaled_mm import reference
    from scaled_mm.errors import ScaledMMError

    generator = torch.Generator().manual_seed(seed)
    # Like a transformer's activations: a few channels are far larger than the others.
    x = torch.randn(m, k, generator=generator) * torch.randn(k, generator=generator).exp()
    weight = torch.randn(n, k, generator=generator) / max(k, 1) ** 0.5
    bias = torch.randn(n, generator=generator).to(device)
    x, weight = x.to(device), weight.to(device)
    operands = _quantize(x, weight, asymmetric)
    accumulators = reference.accumulators(operands["a"], operands["b"], operands["a_zero_point"], operands["b_zero_point"])
    exact = x @ weight.t()
    for name, with_bias in _combinations():
        case = Result(m, n, k, name, with_bias, asymmetric)
        out_dtype = getattr(torch, name)
        inputs = dict(operands, bias=bias.to(out_dtype) if with_bias else None)
        if out_dtype is torch.int32:
            inputs["a_scale"] = inputs["b_scale"] = None
            expected = accumulators
        else:
            expected = reference.scaled(accumulators, inputs["a_scale"], inputs["b_scale"], inputs["bias"], out_dtype)
        try:
            case, out = _compare(handle, case, inputs, expected, clock)
        except ScaledMMError as error:
            yield dataclasses.replace(case, error=f"{error.status.name}: {error}")
            continue
        if out_dtype is torch.int32:
            out = out.float() * operands["b_scale"] * operands["a_scale"]
        yield dataclasses.replace(case, relative_error=_relative_error(out, exact + bias if with_bias else exact))


@contextlib.contextmanager
def _in_memory(m: int, n: int, k: int) -> Iterator[None]:
    """Turns an allocator's error into a BadParamError: the matrices of --shape do not fit in memory."""
    from scaled_mm.errors import BadParamError, ScaledMMError, lacks_memory

    try:
        yield
    except ScaledMMError:
        raise
    except (RuntimeError, MemoryError) as error:
        overflows = ("Storage size calculation overflowed", "numel: integer multiplication overflow")
        if not lacks_memory(error) and not any(one in str(error) for one in overflows):
            raise
        raise BadParamError(f"--shape: expected matrices that fit into memory, got {m}x{n}x{k}") from error


def _combinations() -> list[tuple[str, bool]]:
    return [(name, bias) for name in OUT_DTYPES for bias in (False, True) if name != "int32" or not bias]


def _compare(handle: Handle, case: Result, inputs: dict[str, Any], expected: torch.Tensor, clock: _Clock | None) -> tuple[Result, torch.Tensor]:
    """The completed result, and the output of `sm.scaled_mm`. Every output is filled with NaN or a marker before it is written.

    With zero points a prepared weight is tested too. It and the descriptor use the sums of the quantizer and of the weight.
    """
    import torch

    import scaled_mm as sm
    from scaled_mm import reference

    quantized = {name: t for name, t in inputs.items() if not name.endswith("_sums")}
    out_dtype = expected.dtype
    poison = _POISON_INT32 if out_dtype is torch.int32 else float("nan")
    called, calculated = torch.full_like(expected, poison), torch.full_like(expected, poison)

    sm.scaled_mm(**quantized, out_dtype=out_dtype, out=called)  # computes the sums itself
    outputs = [("scaled_mm", called), ("descriptor", calculated)]
    if case.asymmetric:
        weight = sm.prepare_weight(inputs["b"], inputs["b_zero_point"])
        known = {name: inputs[name] for name in ("a", "a_scale", "b_scale", "bias", "a_zero_point", "a_row_sums")}
        prepared = torch.full_like(expected, poison)
        sm.scaled_mm(**known, b=weight, out_dtype=out_dtype, out=prepared)
        outputs.append(("prepared weight", prepared))
    median_us = None
    with sm.create_descriptor(handle, out=calculated, **inputs) as descriptor:
        workspace = torch.empty(descriptor.workspace_size, dtype=torch.uint8, device=expected.device)

        def calculate() -> None:
            descriptor.calculate(calculated, **inputs, workspace=workspace)

        calculate()
        kernel, reason = descriptor.kernel.row, descriptor.kernel.reason
        differences = [f"{what}: {reference.describe_difference(out, expected)}" for what, out in outputs if not reference.same_bits(out, expected)]
        if clock is not None:
            median_us = clock.measure(calculate, expected.device)
    verdict = dataclasses.replace(
        case,
        kernel=kernel,
        reason=reason,
        equal=not differences,
        difference="; ".join(differences) or None,
        median_us=median_us,
    )
    return verdict, called


def _quantize(x: torch.Tensor, weight: torch.Tensor, asymmetric: bool) -> dict[str, torch.Tensor | None]:
    """x [M, K] per token, weight [N, K] per output channel, as keyword arguments of `scaled_mm`."""
    from scaled_mm import quantize_int8

    if not asymmetric:
        (a, a_scale), (w, b_scale) = quantize_int8(x, "token"), quantize_int8(weight, "channel")
        return dict(a=a, b=w.t(), a_scale=a_scale, b_scale=b_scale, a_zero_point=None, b_zero_point=None)
    activation, channels = quantize_int8(x, "token", symmetric=False), quantize_int8(weight, "channel", symmetric=False)
    return dict(
        a=activation.q,
        b=channels.q.t(),
        a_scale=activation.scale,
        b_scale=channels.scale,
        a_zero_point=activation.zero_point,
        b_zero_point=channels.zero_point,
        a_row_sums=activation.row_sums,
        b_column_sums=channels.row_sums,
    )


def _relative_error(out: torch.Tensor, exact: torch.Tensor) -> float | None:
    norm = exact.double().norm().item()
    return None if norm == 0 else (out.double() - exact.double()).norm().item() / norm


# ---- the command line and its output ---------------------------------------------------------------------------------


def _shape(text: str) -> tuple[int, int, int]:
    found = re.fullmatch(r"(\d+)[xX](\d+)[xX](\d+)", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected MxNxK, as in 16x4096x14336")
    m, n, k = (int(size) for size in found.groups())
    if max(m, n, k) > common.LARGEST_SIZE:
        raise argparse.ArgumentTypeError(f"{text!r}: expected sizes up to {common.LARGEST_SIZE}")
    return m, n, k


def _device_name(device: torch.device) -> str:
    import torch

    from scaled_mm.measure.environment import cpu_name

    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


@contextlib.contextmanager
def _progress(total: int, quiet: bool, what: str = "verify") -> Iterator[Callable[[], None]]:
    """A progress bar on a terminal's stderr; nothing if quiet. Yields the function that advances it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def _print(head: dict[str, Any], results: list[Result], left_out: int, timed: bool) -> None:
    console = common.console()
    table = common.narrow_table(f"{head['name']} ({head['device']}), torch {head['torch']}")
    for header in ("MxNxK", "out", "bias", "kernel", "equal", "error*", *(["us"] if timed else [])):
        table.add_column(header, no_wrap=True, justify="right" if header in ("error*", "us") else "left")
    shape = None
    for result in results:
        if shape is not None and shape != (result.m, result.n, result.k):
            table.add_section()
        shape = (result.m, result.n, result.k)
        equal = "-" if result.error else "[green]yes[/]" if result.equal else "[bold red]NO[/]"
        cells = [
            f"{result.m}x{result.n}x{result.k}",
            result.out_dtype,
            "yes" if result.bias else "",
            "[yellow]refused[/]" if result.error else result.kernel or "-",
            equal,
            "-" if result.relative_error is None else f"{result.relative_error:.2%}",
        ]
        if timed:
            cells.append("-" if result.median_us is None else f"{result.median_us:,.1f}")
        table.add_row(*cells)
    console.print(table)
    console.print("* of the product before quantization; quantizing causes it, whatever the kernel", style="dim")
    _print_verdict(results, left_out, console)
    if timed and (untimed := sum(r.median_us is None and r.error is None for r in results)):
        console.print(f"{untimed} of {len(results)} products were not timed: the time for timing was spent", style="yellow")
    if head["device"] == "cpu" and _uneven(results):
        from scaled_mm.measure.environment import BUSY_CPU

        console.print(f"times of one shape differ by more than 3 times: {BUSY_CPU}", style="yellow", highlight=False)


def _uneven(results: list[Result]) -> bool:
    """Whether the times of products of one shape differ by more than their output dtypes explain."""
    times: dict[tuple[int, int, int], list[float]] = {}
    for result in results:
        if result.median_us is not None:
            times.setdefault((result.m, result.n, result.k), []).append(result.median_us)
    return any(max(found) > 3 * min(found) for found in times.values())


def _print_verdict(results: list[Result], left_out: int, console: Console) -> None:
    refused = [result for result in results if result.error]
    wrong = [result for result in results if not result.equal and not result.error]
    for reason in dict.fromkeys(f"{r.m}x{r.n}x{r.k}: {r.error}" for r in refused):
        console.print(reason, style="yellow", highlight=False, markup=False)
    for r in wrong:
        label = f"{r.m}x{r.n}x{r.k} {r.out_dtype}{' with bias' if r.bias else ''}"
        console.print(f"{label}: {r.difference}", style="red", highlight=False, markup=False)
    if refused:
        console.print(f"{len(refused)} of {len(results)} products were refused", style="bold yellow")
    if wrong:
        console.print(f"{len(wrong)} of {len(results)} results differ from the reference", style="bold red")
    elif len(refused) < len(results):
        equal = len(results) - len(refused)
        which = "the other" if refused else "the" if left_out else "all"
        console.print(f"{which} {equal} result{'s equal' if equal > 1 else ' equals'} the reference bit for bit", style="green")
    if left_out:
        total = len(results) + left_out
        console.print(f"{left_out} of {total} products were left out: {_LIMIT_S:.0f} s were over; --all checks them", style="bold yellow")
