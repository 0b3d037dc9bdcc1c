"""Plans whose kernel config is not built when they are made: what test_core_stand_in.py runs in processes of their own.

fake_gpu_stand_in.py FUNCTION LIBRARIES...     prints one JSON document. A library holds some kernel configs of the table.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import sys
import threading
from pathlib import Path

import torch
from fake_gpu_core import Core, aligned_bytes, described, status_of

from operands.cases import Case  # isort: skip
from operands.grouped_cases import grouped  # isort: skip

from scaled_mm import TensorDesc, reference
from scaled_mm.core import binding
from scaled_mm.core.plan import Plan
from scaled_mm.errors import ScaledMMError
from scaled_mm.jit import background, library, mode
from scaled_mm.products import codes
from scaled_mm.tables import load_table

CASE = Case(16, 64, 128, out_dtype=torch.float32)


def load_elsewhere(path: str) -> str:
    """Loads a library on another thread, as a build in the background does; the status."""
    answer = []
    thread = threading.Thread(target=lambda: answer.append(status_of(lambda: binding.call("scaledMMLoadKernels", path.encode()))))
    thread.start()
    thread.join()
    return answer[0]


def launches(path: str) -> ctypes.c_int:
    return ctypes.c_int.in_dll(ctypes.CDLL(path), "host_kernels_launches")


def said(core: Core, plan) -> list:
    choice = core.choice(plan)
    return [choice.row.decode(), choice.better.decode() if choice.better else None, choice.reason.decode()]


class Run:
    """A product, and its plan on a core."""

    def __init__(self, core: Core, case: Case = CASE, kernel: str | None = None):
        self.core, self.operands = core, case.make()
        self.out = self.operands.poisoned_out()
        self.plan = core.create(kernel, **described(self.operands, self.out))
        self.size = core.workspace_size(self.plan)

    def right(self) -> bool:
        self.out.fill_(float("nan"))
        self.core.calculate(self.plan, self.out, self.operands.inputs, aligned_bytes(self.size) if self.size else None)
        return reference.same_bits(self.out, self.operands.expected())


def in_python(run: Run) -> list[dict]:
    """`desc.kernel` of the plan, while nothing is compiled, then while something is, and after that failed."""
    plan = object.__new__(Plan)
    plan._pointer, plan._device_index, plan._arch = run.plan, 0, "sm90"
    answer = [dataclasses.asdict(plan.kernel)]
    key = ("sm90", plan.kernel.better, "fp32")
    background._queue.unfinished.add(key)
    answer.append(dataclasses.asdict(plan.kernel))
    background._queue.unfinished.clear()
    background._queue.failed[key] = "no compiler"
    return [*answer, dataclasses.asdict(plan.kernel)]


def package(starter: str, better: str, *loaded: str) -> dict:
    """The package's own provider, with a compiler that gives a library of the better kernel configs when it is let go."""
    go, compiled, answer = threading.Event(), [], {}

    def build(table, name, announce=True):
        compiled.append(name[0])
        assert name[0] == load_table("sm90").fallback or go.wait(30)
        return Path(starter if name[0] == load_table("sm90").fallback else better)

    library.build_kernel, library.arch_library, library.find_kernel = build, lambda table: None, lambda *_: None
    core = Core(*loaded)
    binding.call("scaledMMSetKernelProvider", binding._provider, None)
    if mode.current() == "wait":
        go.set()
    try:
        run = Run(core)
    except ScaledMMError as error:
        return {"compiled": compiled, "error": [error.status.name, str(error)]}
    answer["before"], answer["right"], answer["state"] = said(core, run.plan), [run.right()], background.state("sm90", said(core, run.plan)[1])
    go.set()
    assert background.join(30)
    answer["right"].append(run.right())
    answer["after"], answer["compiled"] = said(core, run.plan), compiled
    return answer


def switch(starter: str, better: str) -> dict:
    """A plan that was made before its kernel was loaded, before and after; and one that was made after."""
    core = Core(starter)
    run = Run(core)
    answer = {"before": said(core, run.plan), "asked": core.asked[:], "right": [run.right() for _ in range(3)]}
    answer["in Python"] = in_python(run)
    Run(core)
    answer["asked again"] = len(core.asked) - len(answer["asked"])
    operands = run.operands.inputs
    odd = {**operands, "a": torch.zeros(16 * 128 + 1, dtype=torch.int8)[1:].view(16, 128)}
    answer["odd pointer"] = status_of(lambda: core.calculate(run.plan, run.out, odd, None))
    answer["loaded"] = load_elsewhere(better)
    counts = [launches(path) for path in (starter, better)]
    before = [count.value for count in counts]
    answer["right after"] = run.right()
    cache = ctypes.c_bool.in_dll(ctypes.CDLL(better), "host_kernels_last_cache_filled")
    answer["cache of the stand-in"] = cache.value
    answer["right again"], answer["own cache"] = run.right(), cache.value
    answer["launches"] = [count.value - former for count, former in zip(counts, before)]
    answer["after"] = said(core, run.plan)
    new = Run(core)
    answer["new"], answer["new right"] = said(core, new.plan), new.right()
    return answer


def forced(starter: str, better: str) -> dict:
    """A kernel config that is named is asked for now, and nothing stands in for it."""
    core = Core(starter, provide=lambda arch, row, dtype, when: 0)
    row = said(core, Run(core).plan)[1]
    core.asked.clear()
    answer = {"row": row, "missing": status_of(lambda: Run(core, kernel=row)), "asked": core.asked[:]}
    core.provide = lambda *_: core.lib.scaledMMLoadKernels(better.encode())
    answer["loaded"] = said(core, Run(core, kernel=row).plan)
    return answer


def workspaces(kernels: str, better: str) -> dict:
    """A better kernel that needs more workspace than the plans announced."""
    core, answer = Core(kernels, arch="sm_stand_in"), {}
    plain, points = Run(core, CASE), Run(core, Case(3, 15, 16, out_dtype=torch.float32, a_zero_point="vector_int32"))
    answer["sizes"] = [plain.size, points.size]
    answer["loaded"] = load_elsewhere(better)
    answer["right"] = [plain.right(), points.right()]
    answer["plain"], answer["points"] = said(core, plain.plan), said(core, points.plan)
    new = Run(core, CASE)
    answer["new"], answer["new size"], answer["new right"] = said(core, new.plan), new.size, new.right()
    return answer


class GroupedCore(Core):
    PRODUCT = codes.GROUPED_GEMM


def experts(starter: str, better: str) -> dict:
    """A grouped plan announces enough workspace for the kernel that is not there yet."""
    core = GroupedCore(starter)
    case = grouped(40, 7, 32, 16, out_dtype=torch.float32)
    out = case.poisoned()
    plan = core.create(**{name: None if t is None else TensorDesc.of(t) for name, t in {**case.inputs, "out": out}.items()})
    answer = {"before": said(core, plan), "size": core.workspace_size(plan), "loaded": []}
    for path in (None, better):
        if path:
            answer["loaded"] = load_elsewhere(path)
        out.fill_(float("nan"))
        core.calculate(plan, out, case.inputs, aligned_bytes(answer["size"]))
        assert reference.same_bits(out, reference.grouped_scaled_mm(**case.defined_by, out_dtype=torch.float32)), path
    answer["after"], answer["launches"] = said(core, plan), launches(better).value
    return answer


def divided(starter: str, *sizes: str) -> dict:
    """What a plan announces for a kernel that divides tiles along K and is not there yet."""
    run = Run(Core(starter), Case(*map(int, sizes), out_dtype=torch.float32))
    return {"said": said(run.core, run.plan), "size": run.size}


def refused(kernels: str, better: str) -> dict:
    """A better kernel that cannot run on the device: whoever loads it is told once, and the plan keeps what it has."""
    core = Core(kernels, arch="sm_stand_in")
    run = Run(core)
    answer = {"loaded": load_elsewhere(better), "again": load_elsewhere(better)}
    answer["right"], answer["choice"] = run.right(), said(core, run.plan)
    return answer


def nearest(starter: str, near: str, far: str, *rows: str) -> dict:
    """The provider has two kernel configs in its cache: the one of a neighbouring bucket is loaded, and the others are not asked for."""
    there = dict(zip(rows, (near, far)))

    def provide(arch, row, dtype, when):
        return core.lib.scaledMMLoadKernels(there[row].encode()) if when == 2 and row in there else 0

    core = Core(starter, provide=provide)
    run = Run(core)
    return {"choice": said(core, run.plan), "right": run.right(), "asked": core.asked}


def threads(starter: str, better: str) -> dict:
    """One plan on many threads while its kernel is loaded."""
    core, failed, stop = Core(starter), [], threading.Event()
    run = Run(core)
    expected = run.operands.expected()

    def work() -> None:
        while not stop.is_set():
            out = run.operands.poisoned_out()
            status, message = status_of(lambda: core.calculate(run.plan, out, run.operands.inputs, None))  # noqa: B023
            if message or not reference.same_bits(out, expected):
                failed.append(message or "wrong")

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    count = launches(better)
    loaded = load_elsewhere(better)
    while count.value < 20 and not failed:
        pass
    stop.set()
    for worker in workers:
        worker.join()
    return {"failed": failed[:3], "loaded": loaded, "row": said(core, run.plan)[0]}


if __name__ == "__main__":
    function = globals()[sys.argv[1]]
    print(json.dumps(function(*sys.argv[2:])))
