"""Where a formula has a corner: zeros, halves, saturation, long sums, tails. Drawn values stay away from most of them."""

from __future__ import annotations

import pytest
import torch
from schema_data import collection
from schema_independent import ZERO, check

from scaled_mm import schema
from scaled_mm.gguf_formats import FORMATS
from scaled_mm.schema import runner

QUANTIZERS = [*(f"quantize_{fmt}" for fmt in FORMATS), *(f"quantize_{fmt}_ggml" for fmt in ZERO)]


def both_pass(name: str, inputs: list, independent: bool = True) -> None:
    """The reference equals an independent computation, and both solutions pass by it."""
    definition = collection().definitions[name]
    if independent:
        check(definition, schema.build_reference(definition), inputs)
    expected = runner.reference_outputs(definition, schema.build_reference(definition), inputs)
    for solution in collection().solutions[name]:
        result = schema.build_solution(solution)(*inputs)
        outputs = list(result) if isinstance(result, (tuple, list)) else [result]
        assert runner.compare(definition, outputs, expected)[0], solution.name


def corner_blocks() -> torch.Tensor:
    """float32 [4, 3, 32]: ramps whose levels fall on halves, both signs, one large value, constants, and in row 3 values of a size of their own."""
    ramp = torch.arange(-16, 16).float()
    rows = [
        [ramp / 2, -ramp / 2, torch.where(ramp == 3, 1e4, ramp)],
        [torch.full((32,), 0.5), torch.full((32,), -2.0), torch.where(ramp == 0, -7.0, 0.5)],
        [ramp.abs() + 0.5, -(ramp.abs() + 0.5), torch.where(ramp == -16, 127.0, ramp + 0.5)],
        [ramp * 1e-3, ramp * 1e3, torch.where(ramp == 5, 15.0, ramp.abs() / 2)],
    ]
    return torch.stack([torch.stack(row) for row in rows])


@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantizers_at_halves_and_extremes(name):
    both_pass(name, [corner_blocks()])


@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantizers_of_zeros(name):
    both_pass(name, [torch.zeros(2, 2, 32)], independent=name not in [f"quantize_{fmt}" for fmt in ZERO])  # numpy divides by 0 there
    definition = collection().definitions[name]
    q = schema.build_reference(definition)(torch.zeros(1, 1, 32))
    back = schema.build_reference(collection().definitions[f"dequantize_{definition.logical['q']}"])(q)
    assert back.count_nonzero() == 0


@pytest.mark.parametrize("name", ["quantize_int8_static", "quantize_int8_static_tensor"])
def test_static_quantization_saturates_and_rounds_halves_to_even(name):
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 1e4, -1e4, 127.4, 127.6, -128.4, -129.0]]).bfloat16()
    size = x.shape[1] if name.endswith("static") else 1
    both_pass(name, [x, torch.ones(size), torch.zeros(size)])
    both_pass(name, [x, torch.full((size,), 40.0), torch.full((size,), 0.25)])


@pytest.mark.parametrize("name", ["quantize_int8_dynamic", "quantize_int8_dynamic_smooth"])
def test_dynamic_quantization_of_halves_and_of_nothing(name):
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127.0], [1.0, -1.0, 0.25, 0.0, 1e-3, 3e4, 7.0, 8.0]]).bfloat16()
    smooth = [torch.ones(8)] if name.endswith("smooth") else []
    both_pass(name, [x, *smooth])
    zeros = [torch.zeros(2, 8).bfloat16(), *smooth]
    both_pass(name, zeros, independent=False)
    y, scale = schema.build_reference(collection().definitions[name])(*zeros)
    assert y.count_nonzero() == 0 and (scale == 2.0**-126).all()


@pytest.mark.parametrize("name", ["gemm_int8_scaled_n4096_k14336", "gemm_int8_scaled_bias_n4096_k14336", "gemm_int8_scaled_bias_zp_n4096_k14336"])
def test_sums_of_the_longest_k_are_exact(name):
    definition = collection().definitions[name]
    g = torch.Generator().manual_seed(1)
    a = torch.randint(-128, 128, (2, 14336), generator=g, dtype=torch.int8)
    a[0], b = 127, torch.randint(-128, 128, (4096, 14336), generator=g, dtype=torch.int8)
    b[0], b[1], b[2] = 127, -128, torch.where(torch.arange(14336) % 2 == 0, 127, 126)
    given = {"a": a, "b": b, "a_scale": torch.tensor([1.0, 0.3]), "b_scale": torch.rand(4096, generator=g), "bias": torch.randn(4096, generator=g)}
    given |= {
        "a_zero_point": torch.tensor([-128, 3], dtype=torch.int8),
        "b_zero_point": torch.randint(-128, 128, (4096,), generator=g, dtype=torch.int8),
    }
    both_pass(name, [given[one] for one in definition.inputs])


@pytest.mark.parametrize("name", ["silu_h4096", "gelu_h4096"])
def test_activations_in_their_tails(name):
    x = torch.linspace(-4, -2, 4096).bfloat16()[None]  # where gelu by tanh is another function
    both_pass(name, [x])
    both_pass(name, [torch.linspace(-30, 30, 4096).bfloat16()[None]])


@pytest.mark.parametrize("name", ["rmsnorm_h4096", "add_rms_norm_h4096"])
def test_norms_of_small_rows_feel_epsilon(name):
    g = torch.Generator().manual_seed(2)
    x = (torch.randn(3, 4096, generator=g) * 1e-3).bfloat16()
    weight = torch.randn(4096, generator=g).bfloat16()
    residual = [x.flip(0)] if name.startswith("add") else []
    both_pass(name, [x, *residual, weight, 1e-5])
    zeros = [torch.zeros_like(x)] * (1 + len(residual))
    both_pass(name, [*zeros, weight, 1e-5])


def test_softmax_of_large_numbers():
    both_pass("softmax_d128", [torch.linspace(-1000, 1000, 3 * 128).view(3, 128)])


def test_decoding_a_context_of_one_and_of_all():
    name = "paged_decode_attention_h32_kv8_d128_bs16"
    inputs = schema.draw(collection().definitions[name], collection().workloads[name][0])
    inputs[3] = torch.tensor([1, 128, 16, 17], dtype=torch.int32)
    both_pass(name, inputs)
