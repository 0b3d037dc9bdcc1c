"""GGUF products in CUDA graphs, on streams and in compiled functions; and what a descriptor refuses."""

from __future__ import annotations

import itertools

import pytest
import torch
from gguf_data import WEIGHTS, planned_weight, relative_error, seeded
from gguf_gpu import BOUND, ROUNDING, compute, expected, gemm, gemm_q8_1, operands

import scaled_mm as sm
from scaled_mm.errors import BadParamError, BadTensorDeviceError, BadTensorDtypeError, BadTensorShapeError, InsufficientWorkspaceError, ScaledMMError
from scaled_mm.tables import load_table

pytestmark = pytest.mark.gpu

SHARING = [row.name for row in load_table("sm90").gguf.rows if row.split_k > 1]


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_a_captured_layer_follows_its_inputs(fmt):
    weight_q, x = operands(fmt, 130, 5, 544)
    packed, x = sm.pack_block_weight(weight_q, fmt), x.half()
    activation_q = sm.quantize_q8_1(x)
    sm.block_linear(x, packed, mode="w4a8"), gemm_q8_1(fmt)(weight_q, activation_q), gemm(fmt)(packed, x)  # builds what has to be built
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = sm.block_linear(x, packed, mode="w4a8"), gemm_q8_1(fmt)(weight_q, activation_q), gemm(fmt)(packed, x)
    for seed in range(3):
        x.copy_(torch.randn(x.shape, generator=seeded(seed)))
        activation_q.copy_(sm.quantize_q8_1(x * 2))
        weight_q.copy_(sm.quantize_block(torch.randn(130, 544, generator=seeded(seed + 9)), fmt))
        graph.replay()
        torch.cuda.synchronize()
        kept = packed.unpack()
        assert relative_error(outs[0].t().cpu(), expected(kept, fmt, x, "w4a8")) <= ROUNDING[torch.float16]
        assert relative_error(outs[1].cpu(), expected(weight_q, fmt, activation_q)) <= BOUND
        assert relative_error(outs[2].cpu(), expected(kept, fmt, x, "w4a16")) <= BOUND


def test_a_weight_packed_while_a_graph_is_captured_is_not_constant():
    weight_q, _ = operands("q4_0", 64, 1, 256)
    sm.pack_block_weight(weight_q, "q4_0")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed = sm.pack_block_weight(weight_q, "q4_0")
    assert not packed.constant
    graph.replay()
    assert torch.equal(packed.unpack(), weight_q)


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_a_descriptor_runs_on_a_stream_and_is_captured(fmt):
    weight_q, x = operands(fmt, 65, 9, 288)
    packed, x, out = sm.pack_block_weight(weight_q, fmt), x.bfloat16(), torch.empty(65, 9, device="cuda")
    descriptor = sm.create_block_descriptor(sm.Handle("cuda"), out=out, weight=packed, activation=x, mode="w4a8")
    workspace = torch.empty(descriptor.workspace_size, dtype=torch.uint8, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    descriptor.calculate(out, packed, x, workspace=workspace, stream=stream)
    stream.synchronize()
    assert relative_error(out.cpu(), expected(weight_q, fmt, x)) <= BOUND
    with torch.cuda.graph(graph):
        descriptor.calculate(out, packed, x, workspace=workspace)
    x.copy_(torch.randn(9, 288, generator=seeded(8)))
    graph.replay()
    assert relative_error(out.cpu(), expected(weight_q, fmt, x)) <= BOUND


@pytest.mark.parametrize("fmt, mode", [("q4_0", "w4a16"), ("q5_1", "w4a16"), ("q5_1", "w4a8"), ("q8_0", "w4a8")])
@pytest.mark.parametrize("row", SHARING)
def test_products_that_share_tiles_follow_one_another_on_one_workspace(row, fmt, mode):
    """Each waits for the one before on the GPU alone: called one after another, and captured, of another size and of other activations."""
    handle = sm.Handle("cuda")
    if handle.arch != "sm90":
        pytest.skip("a row of SM90's table")
    tokens, calls, memory = load_table("sm90").row(row).tile.m + 3, [], 0
    for m, k in ((300, 8224), (128 * 140 + 1, 1056)):  # of an H200: few tiles that many share; a round of whole ones or two, and 18 that are left
        weight_q, x = operands(fmt, m, tokens, k)
        weight, xs = sm.pack_block_weight(weight_q, fmt), (x.half(), x.flip(0).half())
        outs = [torch.empty(10, m, tokens, device="cuda") for _ in xs]  # of ten calls
        descriptor = sm.create_block_descriptor(handle, out=outs[0][0], weight=weight, activation=xs[0], mode=mode, kernel=row)
        memory = max(memory, descriptor.workspace_size)
        calls += [(descriptor, weight, x, out) for x, out in zip(xs, outs)]
    workspace = torch.empty(memory, dtype=torch.uint8, device="cuda")

    def ten_times_one_after_another() -> None:
        for i, (descriptor, weight, x, out) in itertools.product(range(10), calls):
            descriptor.calculate(out[i], weight, x, workspace=workspace)

    def check(run) -> None:
        workspace.fill_(255)
        for *_, out in calls:
            out.fill_(torch.nan)
        run()
        wanted = [compute(handle, fmt, weight, x, *out.shape[1:], mode=mode, kernel=row) for _, weight, x, out in calls]
        assert not torch.equal(wanted[0], wanted[1])
        for (*_, out), want in zip(calls, wanted):
            assert torch.equal(out, want.expand_as(out))

    check(ten_times_one_after_another)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ten_times_one_after_another()
    for seed in range(5):
        for i, (_, _, x, _) in enumerate(calls):
            x.copy_(torch.randn(x.shape, generator=seeded(10 * seed + i)))
        check(graph.replay)


@pytest.mark.parametrize("fmt", ["q4_0", "q5_1"])
def test_a_compiled_layer_has_the_bits_of_the_eager_one(fmt):
    weight_q, x = operands(fmt, 65, 9, 288)
    packed, bias, x = sm.pack_block_weight(weight_q, fmt), torch.randn(65, generator=seeded(1)).cuda(), x.half()
    for mode in ("w4a8", "w4a16"):
        compiled = torch.compile(lambda x, mode=mode: sm.block_linear(x, packed, bias, mode=mode), fullgraph=True)
        assert torch.equal(compiled(x), sm.block_linear(x, packed, bias, mode=mode))
    compiled = torch.compile(lambda x: gemm(fmt)(weight_q, x), fullgraph=True)
    assert torch.equal(compiled(x), gemm(fmt)(weight_q, x))


def test_what_a_descriptor_refuses():
    weight_q, x = operands("q4_0", 65, 9, 288)
    packed, out, handle = sm.pack_block_weight(weight_q, "q4_0"), torch.empty(65, 9, device="cuda"), sm.Handle("cuda")
    with sm.create_block_descriptor(handle, out=out, weight=packed, activation=x) as descriptor:
        assert descriptor.kernel.reason.startswith("GGUF w16a16 bucket ")
        for arguments, error, message in [
            ((out, weight_q, x), BadParamError, "^weight: expected a constant PackedBlockWeight"),
            (
                (out, sm.pack_block_weight(weight_q[:64], "q4_0"), x),
                BadTensorShapeError,
                r"^weight: expected \[65, 288\] as the descriptor was created",
            ),
            ((out, packed, x.half()), BadTensorDtypeError, "^activation: expected float32 as the descriptor was created, got float16"),
            ((out.t().contiguous().t(), packed, x), ScaledMMError, "^out: expected strides"),
            ((out, packed, x.cpu()), BadTensorDeviceError, "^activation: expected a tensor on cuda:0"),
            ((out, packed, x, torch.zeros(65, device="cuda")), BadParamError, "^bias: expected none as the descriptor was created"),
        ]:
            with pytest.raises(error, match=message):
                descriptor.calculate(*arguments, workspace=torch.empty(descriptor.workspace_size, dtype=torch.uint8, device="cuda"))
        if descriptor.workspace_size:
            with pytest.raises(InsufficientWorkspaceError, match="^workspace: expected at least"):
                descriptor.calculate(out, packed, x)
    with sm.create_block_descriptor(handle, out=out, weight=planned_weight(weight_q, "q4_0"), activation=x) as descriptor:
        with pytest.raises(BadParamError, match="^weight: expected blocks as the descriptor was created, got packed tiles"):
            descriptor.calculate(out, packed, x)
