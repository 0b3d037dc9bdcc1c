"""Times every kernel config of sm90's sections for experts and block-scaled products: `python tests/autotune/time_sections.py FOLDER`, on an H200.

Writes `h200_experts.json` and `h200_block_scaled.json`, to which fit_sections.py fits the `times` of these sections. Graph replays; weights
rotate, so that they come from memory. For experts, all kernel configs must give the same bits for the first routing. Takes 40 s.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import scaled_mm as sm
from scaled_mm.bench.experts import cases
from scaled_mm.bench.experts.inputs import MANY_TOKENS, ExpertsInputs, ExpertsWeights
from scaled_mm.measure.environment import read_environment
from scaled_mm.tables import KernelRow, load_table

TABLE = load_table("sm90")
MODELS = ("mixtral", "qwen3", "deepseek_ep8", "deepseek")
TOKENS = {cases.BALANCED: (1, 8, 64, 256, 1024, 4096, 8192), cases.SKEWED: (64, 1024)}
WEIGHTS = ((7168, 2048), (4096, 7168), (2112, 7168), (24576, 1536), (32768, 512), (7168, 16384))  # N, K: layers of DeepSeek-V3
MS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
ROTATED_BYTES, LEAST_CALLS = 1.5e8, 20
Calls = list[Callable[[], None]]


def microseconds(calls: Calls) -> float:
    """Of one call, the median of five replays of a graph with all of them."""
    stream, graph, times = torch.cuda.Stream(), torch.cuda.CUDAGraph(), []
    with torch.cuda.stream(stream):
        calls[0]()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return round(sorted(times)[2], 2)


def worth_timing(row: KernelRow, rows: float) -> bool:
    """False for the generic kernel, and for tiles that are lower than 64 and a 24th of this many rows."""
    height = row.tile.n if row.swap_ab else row.tile.m
    return row.family != "generic" and (height >= 64 or rows <= 24 * height)


def time_experts(case: cases.ExpertsCase, weights: ExpertsWeights, generator: torch.Generator) -> dict:
    inputs, handle = ExpertsInputs(case, weights, generator), sm.Handle("cuda:0")
    block, count = case.scales == cases.BLOCK, len(inputs.routings)
    rows = (TABLE.grouped_block_scaled if block else TABLE.grouped).rows
    b, b_scale = inputs.weight.transpose(1, 2), inputs.weight_scale.transpose(1, 2) if block else inputs.weight_scale
    create = sm.create_grouped_block_scaled_descriptor if block else sm.create_grouped_descriptor
    a, ends, us, expected = [(inputs.a(i), inputs.a_scale(i)) for i in range(count)], [one.order.ends for one in inputs.routings], {}, None
    for row in rows:
        if not worth_timing(row, case.copies / case.model.experts):
            continue
        operands = dict(out=inputs.out(0), a=a[0][0], b=b, a_scale=a[0][1], b_scale=b_scale, expert_offsets=ends[0], kernel=row.name)
        with create(handle, **operands) as plan:
            workspace = torch.empty(plan.workspace_size, dtype=torch.uint8, device="cuda") if plan.workspace_size else None
            us[row.name] = microseconds(_calls(plan, inputs, a, b, b_scale, ends, workspace))
            plan.calculate(inputs.out(0), a[0][0], b, a[0][1], b_scale, ends[0], workspace=workspace)
            out = inputs.out(0).clone()
        expected = out if expected is None else expected
        assert torch.equal(out, expected), f"{row.name}: other bits for {case}"
    active = min(case.model.here, case.copies)
    product = dict(M=-(-case.copies // active), N=case.N, K=case.K, count=active)
    return dict(model=case.shape, part=case.part, tokens=case.M, routing=case.routing, scales=case.scales, **product, us=us)


def _calls(plan, inputs: ExpertsInputs, a: list, b, b_scale, ends: list, workspace) -> Calls:
    def call(i: int) -> Callable[[], None]:
        return lambda: plan.calculate(inputs.out(i), a[i][0], b, a[i][1], b_scale, ends[i], workspace=workspace)

    short = 3 if inputs.case.M <= MANY_TOKENS else 1  # the start of a graph must not count
    return [call(i) for i in range(len(a))] * short


def experts() -> list[dict]:
    generator, found = torch.Generator("cuda").manual_seed(5), []
    for model in MODELS:
        for scales in cases.SCALES:
            weights = ExpertsWeights(cases.MODELS[model], scales == cases.BLOCK, torch.device("cuda:0"), generator)
            for routing, tokens in TOKENS.items():
                for case in cases.cases([model], tokens, [cases.W13, cases.W2], [routing], [scales]):
                    found.append(time_experts(case, weights, generator))
                    print(case, min(found[-1]["us"].items(), key=lambda pair: pair[1]), flush=True)
    return found


def block_scaled() -> list[dict]:
    handle, generator, found = sm.Handle("cuda:0"), torch.Generator("cuda").manual_seed(5), []

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(-127, 128, shape, dtype=torch.int8, device="cuda", generator=generator)

    for N, K in WEIGHTS:
        weights = [numbers(N, K).t() for _ in range(max(2, min(16, int(ROTATED_BYTES // (N * K)))))]
        b_scale = torch.rand(-(-K // 128), -(-N // 128), device="cuda", generator=generator)
        for M in MS:
            a, a_scale, us = numbers(M, K), torch.rand(M, -(-K // 128), device="cuda", generator=generator), {}
            out = torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
            for row in TABLE.block_scaled.rows:
                if not worth_timing(row, M):
                    continue
                with sm.create_block_scaled_descriptor(handle, out=out, a=a, b=weights[0], a_scale=a_scale, b_scale=b_scale, kernel=row.name) as plan:
                    calls = [lambda b=b: plan.calculate(out, a, b, a_scale, b_scale) for b in weights]  # noqa: B023
                    us[row.name] = microseconds(calls * -(-LEAST_CALLS // len(calls)))
            found.append(dict(M=M, N=N, K=K, us=us))
            print(M, N, K, min(us.items(), key=lambda pair: pair[1]), flush=True)
    return found


def main(folder: Path) -> None:
    environment = read_environment(torch.device("cuda:0"))
    for name, found in (("h200_experts.json", experts()), ("h200_block_scaled.json", block_scaled())):
        about = f"Microseconds by kernel config, {environment.gpu}, commit {environment.git_commit}, by tests/autotune/time_sections.py."
        (folder / name).write_text(json.dumps({"about": about, "cases": found}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
