"""Runs solutions against a definition's reference on a workload, and says in a Trace what came of it.

Times on a GPU: triton's do_bench, CUDA events around each call with the L2 cache overwritten before it; median. On a CPU:
torch.utils.benchmark, adaptive, median. Milliseconds.
"""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import platform
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from scaled_mm.schema.inputs import draw
from scaled_mm.schema.model import (
    Correctness,
    Definition,
    Environment,
    Evaluation,
    Performance,
    SchemaError,
    Solution,
    Trace,
    Workload,
)

Run = Callable[..., object]
WARM_UP_MS, TIMED_MS = 5, 20
_LOG = 4000


def build_reference(definition: Definition) -> Run:
    """The definition's `run`. SchemaError if its text cannot be executed."""
    try:
        return _function(definition.reference, "run", f"{definition.name}: reference")
    except Exception as error:  # noqa: BLE001 - whatever a text of somebody's raises
        raise SchemaError(f"{definition.name}: reference: expected a text that can be executed, got {type(error).__name__}: {error}") from error


def build_solution(solution: Solution) -> Run:
    """The solution's entry function. SchemaError for what this reader does not build: anything but one Python file that returns its results."""
    if solution.spec.language != "python" or len(solution.sources) != 1 or solution.spec.destination_passing_style:
        raise SchemaError(f"{solution.name}: spec: expected one Python file that returns its outputs, which is what this reader builds; flashinfer-bench builds others")
    return _function(solution.sources[0].content, solution.spec.entry_point.split("::")[1], solution.name)


def reference_outputs(definition: Definition, run: Run, inputs: Sequence) -> list[torch.Tensor]:
    """What a reference returns, checked: number, shapes, dtypes, and every number finite. SchemaError otherwise."""
    try:
        outputs = _outputs(run, inputs)
    except Exception as error:  # noqa: BLE001
        raise SchemaError(f"{definition.name}: reference: expected it to run, got {type(error).__name__}: {error}") from error
    problem = _unlike(definition, inputs, outputs)
    if problem:
        raise SchemaError(f"{definition.name}: reference: {problem[1]}")
    for name, value in zip(definition.outputs, outputs):
        bad = int(value.numel() - value.isfinite().sum()) if value.is_floating_point() else 0
        if bad:
            raise SchemaError(f"{definition.name}: reference: expected finite numbers, {bad} of {value.numel()} of output {name} are NaN or infinite, with which anything passes")
    return outputs


def check_reference(definition: Definition, workload: Workload, root: Path | None = None) -> None:
    """SchemaError unless the reference runs on the workload, on the CPU, and returns what the definition says, all of it finite."""
    reference_outputs(definition, build_reference(definition), draw(definition, workload, root=root))


def evaluate(
    definition: Definition, solutions: Sequence[Solution], workload: Workload, device: torch.device | str, root: Path | None = None
) -> list[Trace]:
    """A Trace for each solution, in order. What a solution does wrong is its trace's status; what the definition or the workload
    does wrong is a SchemaError. root: where files of inputs are looked for (`draw`). A trace's log begins with the command that repeats it."""
    device = torch.device(device)
    run = build_reference(definition)
    with torch.no_grad():
        inputs = draw(definition, workload, device, root)
        expected = reference_outputs(definition, run, inputs)
        reference_ms = milliseconds(lambda: run(*inputs), device)
        environment = _environment(str(device))
        return [
            Trace(
                definition=definition.name,
                workload=workload,
                solution=solution.name,
                evaluation=_evaluation(definition, solution, workload, inputs, expected, reference_ms, device, environment),
            )
            for solution in solutions
        ]


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """The median time of a call."""
    if device.type == "cuda":
        from triton.testing import do_bench

        with torch.cuda.device(device):
            return float(do_bench(call, warmup=WARM_UP_MS, rep=TIMED_MS, return_mode="median"))
    from torch.utils.benchmark import Timer

    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=TIMED_MS / 1000).median * 1000


def command(solution: Solution, workload: Workload, device: torch.device) -> str:
    """What makes a trace again."""
    return f"scaled-mm schema run --solution {solution.name} --workload {workload.uuid} --device {device}"


def _evaluation(definition, solution, workload, inputs, expected, reference_ms, device, environment) -> Evaluation:
    def evaluation(status: str, log: str = "", **measured) -> Evaluation:
        stamp = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        log = f"{command(solution, workload, device)}\n{log[-_LOG:]}"
        return Evaluation(status=status, environment=environment, timestamp=stamp, log=log, **measured)

    try:
        run = build_solution(solution)
    except Exception:  # noqa: BLE001
        return evaluation("COMPILE_ERROR", traceback.format_exc())
    try:
        outputs = _outputs(run, inputs)
    except Exception:  # noqa: BLE001
        return evaluation("RUNTIME_ERROR", traceback.format_exc())
    problem = _unlike(definition, inputs, outputs)
    if problem:
        return evaluation(*problem)
    passed, correctness = compare(definition, outputs, expected)
    if not passed:
        return evaluation("INCORRECT_NUMERICAL", f"expected {definition.compare}", correctness=correctness)
    try:
        latency = milliseconds(lambda: run(*inputs), device)
    except Exception:  # noqa: BLE001
        return evaluation("RUNTIME_ERROR", traceback.format_exc())
    performance = Performance(latency_ms=latency, reference_latency_ms=reference_ms, speedup_factor=reference_ms / latency)
    return evaluation("PASSED", correctness=correctness, performance=performance)


def compare(definition: Definition, outputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> tuple[bool, Correctness]:
    """Whether outputs are what `definition.compare` asks for, and by how much they differ from the reference's at most."""
    passed, absolute, relative, extra = True, 0.0, 0.0, {}
    for name, out, ref in zip(definition.outputs, outputs, expected):
        equal = torch.equal(out, ref)
        difference, size = out.double().sub_(ref), ref.double().abs_()
        norm = float(difference.norm() / size.norm().clamp_min(torch.finfo(torch.float64).tiny))
        finite = bool(difference.isfinite().all())
        if difference.numel():
            absolute = max(absolute, float(difference.abs().amax()) if finite else float("inf"))
            relative = max(relative, float((difference.abs_() / (size + 1e-8)).amax()) if finite else float("inf"))
        bound = definition.compare.norm
        passed &= equal if bound is None else finite and norm <= bound
        extra[name] = {"bit_equal": equal, "relative_norm": norm if finite else "inf"}
    return passed, Correctness(max_relative_error=relative, max_absolute_error=absolute, extra=extra)


def _function(text: str, name: str, label: str) -> Run:
    space: dict[str, object] = {"__name__": f"scaled_mm.schema.<{label}>"}
    exec(compile(text, f"<{label}>", "exec"), space)  # noqa: S102 - files of a schema are programs
    return space[name]


def _outputs(run: Run, inputs: Sequence) -> list:
    with torch.no_grad():
        result = run(*inputs)
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _unlike(definition: Definition, inputs: Sequence, outputs: Sequence) -> tuple[str, str] | None:
    """(status, why) of outputs that are not those of the definition, by number, type, shape and dtype."""
    if len(outputs) != len(definition.outputs):
        return "INCORRECT_SHAPE", f"expected {len(definition.outputs)} outputs ({', '.join(definition.outputs)}), got {len(outputs)}"
    sizes = {name: axis.value for name, axis in definition.axes.items()}
    for tensor, value in zip(definition.inputs.values(), inputs):
        sizes.update(zip(tensor.shape or (), getattr(value, "shape", ())))
    for (name, tensor), out in zip(definition.outputs.items(), outputs):
        if not isinstance(out, torch.Tensor):
            return "INCORRECT_DTYPE", f"output {name}: expected a tensor, got {type(out).__name__}"
        shape = tuple(sizes[axis] for axis in tensor.shape or ())
        if tuple(out.shape) != shape:
            return "INCORRECT_SHAPE", f"output {name}: expected {list(shape)}, got {list(out.shape)}"
        if out.dtype != getattr(torch, tensor.dtype):
            return "INCORRECT_DTYPE", f"output {name}: expected {tensor.dtype}, got {str(out.dtype).removeprefix('torch.')}"
    return None


@functools.cache
def _environment(device: str) -> Environment:
    from scaled_mm import __version__
    from scaled_mm.bench.environment import read_environment

    known = read_environment(torch.device(device))
    libs = {
        "scaled_mm": f"{__version__}{f' ({known.git_commit})' if known.git_commit else ''}",
        "torch": known.torch,
        "cuda": known.cuda,
        "driver": known.driver,
        "cutlass": known.cutlass,
        "python": platform.python_version(),
        "triton": _version("triton"),
    }
    return Environment(hardware=known.gpu.replace(" ", "_"), libs={name: version for name, version in libs.items() if version})


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
