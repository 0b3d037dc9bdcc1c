"""The run: shortlist, compile, time, close cliffs, choose. Everything that touches a machine comes in through two interfaces."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol

from scaled_mm.autotune import choose, model
from scaled_mm.autotune.candidates import candidates
from scaled_mm.autotune.choose import Choice, Product
from scaled_mm.autotune.record import ProductRecord
from scaled_mm.autotune.state import Cell, Journal, cell_key
from scaled_mm.errors import BadParamError, InternalError, KernelNotBuiltError
from scaled_mm.kernels.config import KernelConfig
from scaled_mm.kernels.gpu import GpuFacts
from scaled_mm.measure.record import describe
from scaled_mm.measure.roofline import roof_us
from scaled_mm.measure.shapes import Case
from scaled_mm.tables import TileTable
from scaled_mm.tables.select import contiguous_misfits, refusal

PASS = 4  # candidates of a product that are timed before the next product's: a budget that ends early leaves none without
HOPELESS = 1.1  # a candidate so much slower than its product's best after one round of samples is timed no further
_DISQUALIFYING = ("wrong", "crashed", "hung")


class Kernels(Protocol):
    """Where kernels come from."""

    def key(self, row: KernelConfig) -> str:
        """A digest that changes with whatever changes the row's machine code."""

    def build(self, row: KernelConfig) -> Path:
        """The library with the row's bfloat16 kernel. KernelNotBuiltError if the compiler refuses it."""


class Measurer(Protocol):
    def measure(self, request: dict[str, Any]) -> dict[str, Any]: ...


class Progress(Protocol):
    def phase(self, name: str, total: int) -> None: ...

    def step(self, text: str) -> None: ...


class BuiltKernels:
    """Kernels that nvcc compiles, in the cache that calls use too."""

    def __init__(self, table: TileTable):
        self._table = table

    def key(self, row: KernelConfig) -> str:
        from scaled_mm.jit import library

        return library.kernel_key(self._table, (row.name, "bf16"))

    def build(self, row: KernelConfig) -> Path:
        from scaled_mm.jit import library

        return library.build_kernel(self._table, (row.name, "bf16"), announce=False)


@dataclasses.dataclass(frozen=True)
class Settings:
    """budget_s: seconds for compiling (at most half of them) and timing. top: candidates per product; the table's row is measured in any case.
    jobs: kernels compiled at a time, default one per core. machine: GPU, driver and libraries in words, part of a cell's key."""

    budget_s: float
    machine: str
    top: int = 12
    jobs: int | None = None


@dataclasses.dataclass
class Plan:
    """What a run wants to measure. wanted: the rows of each product, the table's own row first, then the model's best first.

    experts: those of each product, with M rows each, for sections of experts; else 1.
    """

    legal: int
    rows: dict[str, KernelConfig]
    wanted: dict[Product, list[str]]
    experts: int = 1

    def by_rank(self, first: int, last: int) -> Iterator[tuple[Product, str]]:
        """The candidates of ranks first to last - 1, product by product."""
        for product, names in self.wanted.items():
            for name in names[first:last]:
                yield product, name

    @property
    def most(self) -> int:
        return max(map(len, self.wanted.values()))


@dataclasses.dataclass
class Outcome:
    """What a run found. cells: by product and row, of this run and of earlier ones. unbuilt: row -> the compiler's message.

    left_out: row and product of cells that the budget did not reach. ended: why timing stopped early, if it did.
    choices, buckets: empty when nothing was timed.
    """

    plan: Plan
    cells: dict[tuple[Product, str], Cell] = dataclasses.field(default_factory=dict)
    resumed: int = 0
    unbuilt: dict[str, str] = dataclasses.field(default_factory=dict)
    left_out: list[tuple[Product, str]] = dataclasses.field(default_factory=list)
    ended: str | None = None
    choices: list[Choice] = dataclasses.field(default_factory=list)
    buckets: list[Any] = dataclasses.field(default_factory=list)

    def bad_rows(self) -> set[str]:
        """Rows that may not win anywhere: their bits were wrong, or they took the process down, on some product."""
        return {cell.row for cell in self.cells.values() if cell.outcome in _DISQUALIFYING}

    def times(self) -> dict[Product, dict[str, float]]:
        """Microseconds by product and row, of rows that may win."""
        bad = self.bad_rows()
        found: dict[Product, dict[str, float]] = {product: {} for product in self.plan.wanted}
        for (product, row), cell in self.cells.items():
            if cell.us is not None and row not in bad:
                found.setdefault(product, {})[row] = cell.us
        return found


def make_plan(base: TileTable, products: Collection[Product], gpu: GpuFacts, top: int, experts: int = 1) -> Plan:
    """The candidates of each product. BadParamError for a product that no call takes, or the fallback alone: there is nothing to tune.

    base: the table, or its section that is tuned. experts: see `Plan`.
    """
    legal = candidates(base)
    rows = {row.name: row for row in legal}
    wanted: dict[Product, list[str]] = {}
    for product in products:
        if (expected := refusal(*product, base.section)) is not None:
            raise BadParamError(f"--shapes: expected {expected}, got {'x'.join(map(str, product))}")
        fitting = [row for row in legal if not contiguous_misfits(row, *product)]
        own = base.select(*product, constant_b=True, gpu=gpu, count=experts).row  # as the weights of every measurement are
        if not fitting or own.name not in rows:
            why = "; ".join(contiguous_misfits(own, *product)) or "the table's row is the fallback"
            raise BadParamError(f"--shapes: expected sizes that tuned rows take, got {'x'.join(map(str, product))} ({why})")
        ranked = model.shortlist(fitting, base, product, gpu, top, experts)
        wanted[product] = list(dict.fromkeys([own.name, *(row.name for row in ranked)]))
    used = {name for names in wanted.values() for name in names}
    return Plan(len(legal), {name: row for name, row in rows.items() if name in used}, wanted, experts)


class Run:
    """One run. `tune` is what to call."""

    def __init__(
        self,
        base: TileTable,
        plan: Plan,
        gpu: GpuFacts,
        settings: Settings,
        journal: Journal,
        kernels: Kernels,
        measurer: Measurer,
        progress: Progress,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.outcome = Outcome(plan)
        self._base, self._plan, self._gpu, self._settings, self._journal, self._kernels = base, plan, gpu, settings, journal, kernels
        self._measurer, self._progress, self._clock = measurer, progress, clock
        self._start = clock()
        self._libraries: dict[str, Path] = {}
        self._keys: dict[str, str] = {}

    def _spent(self, share: float = 1.0) -> bool:
        return self._clock() - self._start >= share * self._settings.budget_s

    def _key(self, product: Product, name: str) -> str:
        if name not in self._keys:
            self._keys[name] = self._kernels.key(self._plan.rows[name])
        return cell_key(self._settings.machine, self._keys[name], product)

    def recall(self) -> None:
        """Takes over what the journal has."""
        for product, name in self._plan.by_rank(0, self._plan.most):
            if (cell := self._journal.get(self._key(product, name))) is not None:
                self.outcome.cells[product, name] = cell
        self.outcome.resumed = len(self.outcome.cells)

    def compile(self) -> None:
        """Builds the rows that cells still need, the best first, until half of the budget is spent."""
        missing: dict[str, None] = {}
        for rank in range(self._plan.most):
            for product, name in self._plan.by_rank(rank, rank + 1):
                if (product, name) not in self.outcome.cells:
                    missing[name] = None
        waiting = [self._plan.rows[name] for name in missing]
        self._progress.phase("compiling", len(waiting))
        jobs = self._settings.jobs or os.cpu_count() or 1
        with ThreadPoolExecutor(jobs) as pool:
            running: dict[Future[Path], str] = {}
            while waiting or running:
                while waiting and len(running) < jobs and not self._spent(0.5):
                    row = waiting.pop(0)
                    running[pool.submit(self._kernels.build, row)] = row.name
                if not running:
                    break
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    name = running.pop(future)
                    try:
                        self._libraries[name] = future.result()
                    except KernelNotBuiltError as error:
                        self.outcome.unbuilt[name] = describe(error)
                    self._progress.step(name)

    def time(self) -> None:
        """Times what was compiled, in passes over all products, until the budget is spent."""
        self._progress.phase("timing", sum(map(len, self._plan.wanted.values())))
        for first in range(0, self._plan.most, PASS):
            for product, name in self._plan.by_rank(first, first + PASS):
                if not self._cell(product, name) and name not in self.outcome.unbuilt and name not in self.outcome.bad_rows():
                    self.outcome.left_out.append((product, name))

    def _cell(self, product: Product, name: str) -> bool:
        """Whether a cell is there when this returns."""
        M, N, K = product
        self._progress.step(f"{M}x{N}x{K} {name}")
        if (product, name) in self.outcome.cells:
            return True
        if self.outcome.ended or self._spent() or name not in self._libraries or name in self.outcome.bad_rows():
            return False
        best = min((cell.us for (other, _), cell in self.outcome.cells.items() if other == product and cell.us), default=None)
        limit_us = None if best is None else HOPELESS * best
        request = {"row": name, "library": str(self._libraries[name]), "M": M, "N": N, "K": K, "limit_us": limit_us}
        try:
            answer = self._measurer.measure(request)
        except InternalError as error:
            self.outcome.ended = str(error)
            return False
        cell = Cell(key=self._key(product, name), row=name, M=M, N=N, K=K, **answer)
        self._journal.add(cell)
        self.outcome.cells[product, name] = cell
        return True

    def close_cliffs(self) -> None:
        """Where a product is slower than its next larger M, times that M's row on it too."""
        for (N, K), ms in choose.ladders(self._plan.wanted).items():
            for M, above in zip(reversed(ms[:-1]), reversed(ms[1:])):
                times = self.outcome.times()
                here, there = times[M, N, K], times[above, N, K]
                if here and there and min(here.values()) > choose.CLIFF * min(there.values()):
                    row = min(there, key=lambda name: (there[name], name))
                    if row not in here and row in self._libraries:
                        self._cell((M, N, K), row)

    def decide(self) -> None:
        """Fills in choices and buckets from what was timed."""
        times = self.outcome.times()
        self.outcome.choices = choose.choose(times, self._plan.wanted)
        self.outcome.buckets = choose.buckets(self.outcome.choices, self._base, self._plan.rows.values(), times, self._gpu, self._plan.experts)


def tune(
    base: TileTable,
    products: Collection[Product],
    gpu: GpuFacts,
    settings: Settings,
    journal: Journal,
    kernels: Kernels,
    measurer: Measurer,
    progress: Progress,
    clock: Callable[[], float] = time.monotonic,
    plan: Plan | None = None,
) -> Outcome:
    """Tunes a table for some products; every cell is in the journal as soon as it is measured.

    A candidate that does not compile, crashes or hangs is an outcome. An interrupt passes through; the journal has what was measured.
    """
    run = Run(base, plan or make_plan(base, products, gpu, settings.top), gpu, settings, journal, kernels, measurer, progress, clock)
    run.recall()
    run.compile()
    run.time()
    run.close_cliffs()
    run.decide()
    return run.outcome


def chosen_us(outcome: Outcome) -> Mapping[Product, float]:
    """Microseconds of the chosen rows, of the products whose choice was measured."""
    return {choice.product: choice.us for choice in outcome.choices if choice.us is not None}


def product_record(
    case: Case | None,
    base: TileTable,
    choices: Mapping[Product, Choice],
    times: choose.Times,
    gpu: GpuFacts,
    name: str,
    product: Product | None = None,
    experts: int = 1,
) -> ProductRecord:
    """The record of a case that was asked for, or of another `product`. name: the driver's name of the GPU, for the roof. experts: see `Plan`."""
    M, N, K = product or (case.M, case.N, case.K)
    own = base.select(M, N, K, constant_b=True, gpu=gpu, count=experts).row.name
    roof = roof_us(M, N, K, name)
    choice = choices.get((M, N, K))
    return ProductRecord(
        shape=case.shape if case else f"{N}x{K}",
        M=M,
        N=N,
        K=K,
        row=choice.row if choice else None,
        how=choice.how if choice else "none",
        us=choice.us if choice else None,
        base_row=own,
        base_us=times.get((M, N, K), {}).get(own),
        roof_us=None if roof is None else experts * roof,
    )
