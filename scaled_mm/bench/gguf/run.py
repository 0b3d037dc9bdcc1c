"""The loop over the grid: every product is compared with the formula in float64, before its timing and after."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from scaled_mm.bench.gguf import peers as block_peers
from scaled_mm.bench.gguf.cases import BlockCase, group_by_format
from scaled_mm.bench.gguf.inputs import BlockInputs, BlockWeights, weight_bytes
from scaled_mm.bench.gguf.llama import LlamaTimes
from scaled_mm.bench.gguf.record import BlockCaseRecord
from scaled_mm.bench.int8.peers import Peer
from scaled_mm.bench.int8.run import Layer, Options, Progress, describe, layers, no_progress, time_peers
from scaled_mm.gguf import quantize_block, reference
from scaled_mm.measure import timing
from scaled_mm.measure.record import Result

#: Rows of the weight and tokens that the reference computes, spread evenly from the first to the last.
CHECK_ROWS, CHECK_TOKENS = 128, 256


class BlockLayer(Layer):
    """The cases that share one weight of a format."""

    @staticmethod
    def make_weights(case: BlockCase, device: torch.device, generator: torch.Generator, sets: int | None) -> BlockWeights:
        return BlockWeights(case, device, generator, sets)

    @staticmethod
    def make_inputs(case: BlockCase, weights: BlockWeights, generator: torch.Generator) -> BlockInputs:
        return BlockInputs(case, weights, generator)


def run_grid(
    cases: list[BlockCase],
    peers: list[Peer],
    device: torch.device,
    options: Options,
    llama: LlamaTimes | None = None,
    progress: Progress = no_progress,
) -> Iterator[list[BlockCaseRecord]]:
    """Runs every case with every peer and yields the records of one weight after another. llama: times to stand beside them."""
    for group in group_by_format(cases):
        for layer in layers(group, device, options, BlockLayer):
            yield [run_case(layer.inputs(case), peers, options, llama, progress) for case in layer.cases]


def run_case(inputs: BlockInputs, peers: list[Peer], options: Options, llama: LlamaTimes | None, progress: Progress) -> BlockCaseRecord:
    case = inputs.case
    references: dict[str, torch.Tensor] = {}

    def error(peer: Peer) -> dict[str, float]:
        if not options.check:
            return {}
        if peer.name not in references:
            references[peer.name] = expected(peer, inputs)
        return {"error": error_of(inputs.out(0), inputs, references[peer.name])}

    def compare(peer: Peer, call: Callable[[], torch.Tensor]) -> dict[str, float]:
        inputs.poison()
        call()
        timing.synchronize(inputs.device)
        return error(peer)

    def again(peer: Peer, result: Result, runner: timing.Runner) -> Result:
        if not options.check or not isinstance(peer, block_peers.OursBlock):
            return result
        inputs.poison()
        try:
            runner.replay()
        except RuntimeError as failure:
            return Result(failed=f"after timing: {describe(failure)}")
        after = error(peer)["error"]
        if after <= result.error or result.error != result.error:
            return result
        return result.model_copy(update={"error": after})

    return BlockCaseRecord(
        fmt=case.fmt,
        shape=case.shape,
        M=case.M,
        N=case.N,
        K=case.K,
        weight_bytes=weight_bytes(case),
        rotation=inputs.weights.sets,
        outputs=inputs.slots,
        cold=inputs.weights.cold,
        llama_us=None if llama is None else llama.us.get((case.fmt, case.N, case.K, case.M)),
        results=time_peers(inputs, peers, options, compare, again, progress),
    )


def spread(count: int, most: int, device: torch.device) -> torch.Tensor:
    """At most `most` of 0 ... count - 1, evenly spread, the first and the last among them."""
    return torch.linspace(0, count - 1, min(count, most), dtype=torch.float64, device=device).round().long().unique()


def _slices(inputs: BlockInputs) -> tuple[torch.Tensor, torch.Tensor]:
    case = inputs.case
    return spread(case.M, CHECK_TOKENS, inputs.device), spread(case.N, CHECK_ROWS, inputs.device)


def expected(peer: Peer, inputs: BlockInputs) -> torch.Tensor:
    """float64 [tokens, rows] of the slice of weight set 0's product: the documented formula of what this peer computes."""
    tokens, rows = _slices(inputs)
    weight, fmt = inputs.weights.first[rows], inputs.case.fmt
    if not isinstance(peer, block_peers.OursBlock):
        return reference.gemm(weight, inputs.float32[tokens], fmt).t()
    activation = peer.activation(inputs)[tokens]
    if peer.quantizes(inputs):
        activation = quantize_block(activation, "q8_1")
    if activation.dtype is torch.uint8:
        return reference.gemm_q8_1(weight, activation, fmt).t()
    return reference.gemm(weight, activation, fmt).t()


def error_of(out: torch.Tensor, inputs: BlockInputs, want: torch.Tensor) -> float:
    """||out - want|| / ||want|| over the slice; NaN where any element of the whole output is not finite."""
    if not bool(out.isfinite().all()):
        return float("nan")
    tokens, rows = _slices(inputs)
    part = out[tokens][:, rows].double()
    return float((part - want).norm() / want.norm())
