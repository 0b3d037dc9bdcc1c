"""Runs solutions against a definition's reference on a workload, and records the results in Traces.

Each solution gets its own inputs and must not change them. Outputs are compared twice. The second comparison follows the timing and uses other
numbers in the same tensors, so that cached results are detected.

Times on a GPU: triton's do_bench, CUDA events around each call with the L2 cache overwritten before it; median. On a CPU:
torch.utils.benchmark, adaptive, median. Milliseconds.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import importlib.metadata
import platform
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from scaled_mm.schema.collection import schemas_dir
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
from scaled_mm.schema.vocabulary import torch_dtype

Run = Callable[..., object]
WARM_UP_MS, TIMED_MS = 5, 20
_LOG = 4000
_RAISED = (Exception, SystemExit)  # how a user's text may exit; only an interrupt comes from the user


def build_reference(definition: Definition) -> Run:
    """The definition's `run`. Raises SchemaError if its text cannot be executed."""
    try:
        return _function(definition.reference, "run", f"{definition.name}_reference")
    except _RAISED as error:
        raise SchemaError(f"{definition.name}: reference: expected a text that can be executed, got {type(error).__name__}: {error}") from error


def build_solution(solution: Solution) -> Run:
    """The solution's entry function. Raises SchemaError unless the solution is one Python file whose function returns its results."""
    only = "is what this reader builds; flashinfer-bench builds others"
    if solution.spec.language != "python":
        raise SchemaError(f"{solution.name}: spec.language: expected 'python', which {only}, got {solution.spec.language!r}")
    if len(solution.sources) != 1:
        raise SchemaError(f"{solution.name}: sources: expected one file, which {only}, got {len(solution.sources)}")
    if solution.spec.destination_passing_style:  # the format's default is true
        raise SchemaError(f"{solution.name}: spec.destination_passing_style: expected false, a function that returns its outputs, which {only}")
    return _function(solution.sources[0].content, solution.spec.entry_point.split("::")[1], solution.name)


def reference_outputs(definition: Definition, run: Run, inputs: Sequence) -> list[torch.Tensor]:
    """The reference's outputs. Raises SchemaError unless number, shapes and dtypes are right, all values are finite, and the inputs are unchanged."""
    own = _copies(inputs)
    try:
        outputs = _outputs(run, own)
    except _RAISED as error:
        raise SchemaError(f"{definition.name}: reference: expected it to run, got {type(error).__name__}: {error}") from error
    problem = _unlike(definition, inputs, outputs)
    if problem:
        raise SchemaError(f"{definition.name}: reference: {problem[1]}")
    if changed := _changed(definition, inputs, own):
        raise SchemaError(f"{definition.name}: reference: expected it to leave input {changed} as it was")
    for name, value in zip(definition.outputs, outputs):
        bad = int((~_wide(value).isfinite()).sum()) if value.is_floating_point() else 0
        if bad:
            raise SchemaError(
                f"{definition.name}: reference: expected finite numbers, {bad} of {value.numel()} of output {name} are NaN or "
                "infinite, with which anything passes"
            )
    return [value.clone() for value in outputs]  # not views of the inputs


def check_reference(definition: Definition, workload: Workload, root: Path | None = None) -> None:
    """Raises SchemaError unless the reference runs on the workload on the CPU and returns finite outputs that match the definition."""
    try:
        inputs = draw(definition, workload, root=root)
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, SchemaError):
            raise
        raise SchemaError(f"{definition.name}: inputs: expected a workload whose inputs this machine holds, got {workload.uuid}: {error}") from error
    reference_outputs(definition, build_reference(definition), inputs)


def check_solution(solution: Solution) -> None:
    """Raises SchemaError unless its Python files parse and the entry file defines the entry function at top level. Executes nothing."""
    file, entry = solution.spec.entry_point.split("::")
    for index, source in enumerate(solution.sources):
        if not source.path.endswith(".py"):
            continue
        try:
            names = compile(source.content, source.path, "exec").co_names
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise SchemaError(f"sources.{index}.content: expected Python, got {type(error).__name__}: {error}") from error
        if source.path == file and entry not in names:
            raise SchemaError(f"spec.entry_point: expected {file} to have {entry!r} at its top level; it does not")


@dataclasses.dataclass(frozen=True)
class _Task:
    """The inputs and reference outputs of a workload. again: other inputs, and the reference's outputs for them."""

    definition: Definition
    workload: Workload
    device: torch.device
    inputs: list
    expected: list[torch.Tensor]
    again: tuple[list, list[torch.Tensor]]
    reference_ms: float
    root: Path | None


def evaluate(
    definition: Definition, solutions: Sequence[Solution], workload: Workload, device: torch.device | str, root: Path | None = None
) -> list[Trace]:
    """A Trace per solution, in order. Errors of a solution become the status of its trace; errors of the definition or the workload raise
    SchemaError. root: the folder with files of inputs (see `draw`). A trace's log begins with the command that repeats the run."""
    device = torch.device(device)
    run = build_reference(definition)
    with torch.no_grad():
        inputs, others = draw(definition, workload, device, root), draw(definition, workload, device, root, salt="again")
        expected, again = reference_outputs(definition, run, inputs), reference_outputs(definition, run, others)
        task = _Task(definition, workload, device, inputs, expected, (others, again), milliseconds(lambda: run(*inputs), device), root)
        return [
            Trace(definition=definition.name, workload=workload, solution=solution.name, evaluation=_evaluation(task, solution))
            for solution in solutions
        ]


def command(solution: Solution, workload: Workload, device: torch.device, root: Path | None = None) -> str:
    """The command that repeats a trace. root: the folder of the collection, None for this package's."""
    folder = "" if root is None or root == schemas_dir() else f" --root {root}"
    return f"scaled-mm schema run --solution {solution.name} --workload {workload.uuid} --device {device}{folder}"


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """The median time of a call, in milliseconds."""
    if device.type == "cuda":
        from triton.testing import do_bench

        with torch.cuda.device(device):
            return float(do_bench(call, warmup=WARM_UP_MS, rep=TIMED_MS, return_mode="median"))
    from torch.utils.benchmark import Timer

    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=TIMED_MS / 1000).median * 1000


def _evaluation(task: _Task, solution: Solution) -> Evaluation:
    def evaluation(status: str, log: str = "", **measured) -> Evaluation:
        stamp = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        log = f"{command(solution, task.workload, task.device, task.root)}\n{log[-_LOG:]}"
        return Evaluation(status=status, environment=_environment(str(task.device)), timestamp=stamp, log=log, **measured)

    try:
        run = build_solution(solution)
    except _RAISED:
        return evaluation("COMPILE_ERROR", traceback.format_exc())
    inputs = _copies(task.inputs)
    try:
        wrong, correctness = _attempt(task, run, inputs, task.inputs, task.expected)
        if wrong:
            return evaluation(*wrong, **correctness)
        latency = milliseconds(lambda: run(*inputs), task.device)
        others, again = task.again
        for own, other in zip(inputs, others):
            if isinstance(own, torch.Tensor):
                own.copy_(other)
        wrong, after = _attempt(task, run, inputs, others, again)
        if wrong:
            return evaluation(wrong[0], f"after it was timed, on other numbers in the same tensors: {wrong[1]}", **after)
    except _RAISED:
        return evaluation("RUNTIME_ERROR", traceback.format_exc())
    performance = Performance(latency_ms=latency, reference_latency_ms=task.reference_ms, speedup_factor=task.reference_ms / latency)
    return evaluation("PASSED", performance=performance, **correctness)


def _attempt(task: _Task, run: Run, own: list, inputs: list, expected: list[torch.Tensor]) -> tuple[tuple[str, str] | None, dict[str, Correctness]]:
    """One call with `own`, a copy of `inputs`. Returns ((status, reason) or None, {"correctness": ...} or {})."""
    outputs = _outputs(run, own)
    if task.device.type == "cuda":
        torch.cuda.synchronize(task.device)  # an asynchronous kernel error belongs to this call
    wrong = _unlike(task.definition, inputs, outputs)
    if wrong:
        return wrong, {}
    if changed := _changed(task.definition, inputs, own):
        return ("RUNTIME_ERROR", f"input {changed}: expected it to be left as it was"), {}
    passed, correctness = compare(task.definition, outputs, expected)
    return None if passed else ("INCORRECT_NUMERICAL", f"expected {task.definition.compare}"), {"correctness": correctness}


def compare(definition: Definition, outputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> tuple[bool, Correctness]:
    """Whether the outputs satisfy `definition.compare`, and their largest difference from the reference's."""
    passed, absolute, relative, extra = True, 0.0, 0.0, {}
    for name, out, ref in zip(definition.outputs, outputs, expected):
        equal = torch.equal(_bytes(out), _bytes(ref))
        difference, size = _wide(out).sub(_wide(ref)), _wide(ref).abs()
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
    # The text gets its own module, because dataclasses and pickle look it up by name.
    module = types.ModuleType(f"scaled_mm_schema_{label}_{hashlib.sha256(text.encode()).hexdigest()[:12]}")
    sys.modules[module.__name__] = module
    exec(compile(text, f"<{label}>", "exec"), module.__dict__)  # noqa: S102 - files of a schema are programs
    return getattr(module, name)


def _outputs(run: Run, inputs: Sequence) -> list:
    with torch.no_grad():
        result = run(*inputs)
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _copies(inputs: Sequence) -> list:
    return [one.clone() if isinstance(one, torch.Tensor) else one for one in inputs]


def _changed(definition: Definition, before: Sequence, after: Sequence) -> str | None:
    """The first input that has changed, or None."""
    for name, a, b in zip(definition.inputs, before, after):
        if isinstance(a, torch.Tensor) and not torch.equal(_bytes(a), _bytes(b)):
            return name
    return None


def _bytes(value: torch.Tensor) -> torch.Tensor:
    """Compares every byte: NaN equals the same NaN, and -0 differs from 0."""
    return value.contiguous().reshape(-1).view(torch.uint8)


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.float64)


def _unlike(definition: Definition, inputs: Sequence, outputs: Sequence) -> tuple[str, str] | None:
    """(status, reason) if outputs do not match the definition in number, type, shape or dtype."""
    if len(outputs) != len(definition.outputs):
        return "INCORRECT_SHAPE", f"expected {len(definition.outputs)} outputs ({', '.join(definition.outputs)}), got {len(outputs)}"
    sizes = {name: axis.value for name, axis in definition.axes.items()}
    for tensor, value in zip(definition.inputs.values(), inputs):
        sizes.update(zip(tensor.shape or (), getattr(value, "shape", ())))
    devices = [value.device for value in inputs if isinstance(value, torch.Tensor)]
    for (name, tensor), out in zip(definition.outputs.items(), outputs):
        if not isinstance(out, torch.Tensor):
            return "INCORRECT_DTYPE", f"output {name}: expected a tensor, got {type(out).__name__}"
        shape = tuple(sizes[axis] for axis in tensor.shape or ())
        if tuple(out.shape) != shape:
            return "INCORRECT_SHAPE", f"output {name}: expected {list(shape)}, got {list(out.shape)}"
        if out.dtype != torch_dtype(tensor.dtype):
            return "INCORRECT_DTYPE", f"output {name}: expected {tensor.dtype}, got {str(out.dtype).removeprefix('torch.')}"
        if out.layout is not torch.strided or (devices and out.device != devices[0]):
            return (
                "RUNTIME_ERROR",
                f"output {name}: expected a strided tensor on {devices[0] if devices else 'the device'}, got {out.layout} on {out.device}",
            )
    return None


@functools.cache
def _environment(device: str) -> Environment:
    from scaled_mm import __version__
    from scaled_mm.measure.environment import read_environment

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
