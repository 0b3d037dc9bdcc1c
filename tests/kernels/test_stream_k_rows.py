"""Kernel configs that divide tiles along K (scheduler: stream_k): the bits of the reference, whatever the workspace held."""

from __future__ import annotations

import pytest
import torch

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.errors import InsufficientWorkspaceError
from scaled_mm.tables import load_table

pytestmark = pytest.mark.gpu

ROWS = [row.name for row in load_table("sm90").rows if row.scheduler == "stream_k"]
# (batch, M, N, K)
SHAPES = {
    "one tile for all SMs": (1, 70, 96, 40000),
    "a few tiles, K ends inside a step": (1, 300, 520, 9104),
    "tiles of which some SMs have parts of two": (1, 600, 1800, 4112),
    "a wave and a part": (1, 2200, 2312, 4240),
    "several waves": (1, 4200, 4104, 3088),
    "too few steps to divide": (1, 200, 264, 144),
    "a batch": (5, 130, 264, 2320),
}


def operands(shape: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """An output that is poisoned, and the inputs."""
    B, M, N, K = SHAPES[shape]
    generator = torch.Generator("cuda").manual_seed(K)
    a = torch.randint(-128, 128, (B, M, K), dtype=torch.int8, device="cuda", generator=generator)
    b = torch.randint(-128, 128, (B, N, K), dtype=torch.int8, device="cuda", generator=generator).transpose(1, 2)
    inputs = {
        "a": a,
        "b": b,
        "a_scale": torch.rand(B, M, 1, device="cuda", generator=generator),
        "b_scale": torch.rand(B, 1, N, device="cuda", generator=generator),
        "bias": torch.randn(B, 1, N, device="cuda", generator=generator),
        "a_zero_point": torch.randint(-128, 128, (B, M, 1), dtype=torch.int32, device="cuda", generator=generator),
    }
    inputs = inputs if B > 1 else {name: tensor[0] for name, tensor in inputs.items()}
    return torch.full((B, M, N)[B == 1 :], float("nan"), dtype=torch.bfloat16, device="cuda"), inputs


def dirty(size: int, value: int) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("row", ROWS)
def test_divided_tiles_have_the_bits_of_the_reference_whatever_the_workspace_held(handle, row, shape):
    out, inputs = operands(shape)
    expected = reference.scaled_mm(**inputs)
    with sm.create_descriptor(handle, out=out, kernel=row, **inputs) as desc:
        for value in (0, 255, 1):
            out.fill_(float("nan"))
            desc.calculate(out, **inputs, workspace=dirty(desc.workspace_size, value))
            assert torch.equal(out, expected), (row, shape, value)


@pytest.mark.parametrize("row", ROWS)
def test_a_graph_divides_tiles_again_in_every_replay_and_beside_another_stream(handle, row):
    out, inputs = operands("a few tiles, K ends inside a step")
    other_out, other = torch.empty_like(out), {**inputs, "a": inputs["a"].flip(0)}
    expected, other_expected = reference.scaled_mm(**inputs), reference.scaled_mm(**other)
    beside = torch.cuda.Stream()
    with sm.create_descriptor(handle, out=out, kernel=row, **inputs) as desc, sm.create_descriptor(handle, out=out, kernel=row, **other) as second:
        mine, theirs = dirty(desc.workspace_size, 7), dirty(second.workspace_size, 9)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                desc.calculate(out, **inputs, workspace=mine)
        for _ in range(3):
            out.fill_(float("nan"))
            torch.cuda.synchronize()
            graph.replay()
            with torch.cuda.stream(beside):
                for _ in range(4):
                    second.calculate(other_out, **other, workspace=theirs)
            torch.cuda.synchronize()
            assert torch.equal(out, expected) and torch.equal(other_out, other_expected), row


@pytest.mark.parametrize("row", ROWS)
def test_the_workspace_is_bounded_and_one_byte_less_is_refused(handle, row):
    tile = load_table("sm90").row(row).tile
    largest = 2 * 160 * tile.m * tile.n * 4 + 4096  # two waves of tiles, whatever M and N
    out, inputs = operands("several waves")
    with sm.create_descriptor(handle, out=out, kernel=row, **inputs) as desc:
        terms = 8 * (out.shape[0] + out.shape[1]) + 16  # of the zero point
        assert 0 < desc.workspace_size <= largest + terms
        with pytest.raises(InsufficientWorkspaceError):
            desc.calculate(out, **inputs, workspace=dirty(desc.workspace_size - 1, 0))


def test_calls_and_linear_descriptors_give_a_divided_product_its_workspace(handle):
    M, N, K = 254, 2304, 27264
    assert load_table("sm90").select(M, N, K).row.scheduler == "stream_k"
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(M, K, dtype=torch.bfloat16, device="cuda", generator=generator)
    weight = torch.randint(-128, 128, (N, K), dtype=torch.int8, device="cuda", generator=generator)
    weight_scale = torch.rand(1, N, device="cuda", generator=generator)
    q, scale = sm.quantize_int8(x)
    expected = reference.scaled_mm(q, weight.t(), scale, weight_scale)
    assert torch.equal(sm.scaled_mm(q, weight.t(), scale, weight_scale), expected)
    assert torch.equal(sm.int8_linear(x, weight, weight_scale), expected)
    out = torch.empty_like(expected)
    with sm.create_linear_descriptor(handle, out=out, x=x, weight=weight, weight_scale=weight_scale) as desc:
        assert "_sk_" in desc.kernel.row
        desc.calculate(out, x, weight, weight_scale, workspace=dirty(desc.workspace_size, 255))
    assert torch.equal(out, expected)
