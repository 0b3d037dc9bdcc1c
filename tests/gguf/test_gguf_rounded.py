"""What mode w16a16 loses by rounding the weight: figures of docs/design/gguf-formats.md."""

from __future__ import annotations

import pytest
import torch
from gguf_data import relative_error, seeded

import scaled_mm as sm
from scaled_mm.gguf import reference


@pytest.mark.parametrize("fmt, errors", [("q4_0", (1.9e-4, 1.2e-3, 9.4e-3, 1.5e-1, 9.7e-2)), ("q5_1", (1.9e-4, 2.4e-4, 2.5e-3, 3.9e-2, 3.8e-2))])
def test_one_large_value_of_a_row_costs_the_others_what_the_documentation_says(fmt, errors):
    """errors: of the other blocks by rounding, for each size of the value, then by quantization."""
    for times, error in zip((100, 1000, 10_000, 100_000), errors):
        weight = torch.randn(64, 4096, generator=seeded(1)) / 100
        weight[:, 5] = times / 100
        q, x = sm.quantize_block(weight, fmt), torch.randn(4096, 16, generator=seeded(2)).double()
        exact, rounded = reference.dequantize(q, fmt), reference.rounded(q, fmt, torch.float16)
        assert relative_error(rounded[:, 32:], exact[:, 32:]) == pytest.approx(error, rel=0.1)
        assert relative_error(exact[:, 32:], weight[:, 32:]) == pytest.approx(errors[-1], rel=0.1)
        assert relative_error(rounded @ x, exact @ x) < 2.5e-4


@pytest.mark.parametrize("fmt, dtype, error", [
    ("q4_0", torch.float16, 2e-4), ("q5_1", torch.float16, 2e-4), ("q8_0", torch.float16, 2e-4),
    ("q4_0", torch.bfloat16, 2.3e-3), ("q5_0", torch.bfloat16, 2.3e-3), ("q8_0", torch.bfloat16, 2.3e-3),
    ("q4_1", torch.bfloat16, 1.7e-3), ("q5_1", torch.bfloat16, 1.7e-3),
])  # fmt: skip
def test_products_of_normal_data_have_the_error_that_the_documentation_says(fmt, dtype, error):
    weight, x = torch.randn(256, 2048, generator=seeded(3)) / 50, torch.randn(2048, 16, generator=seeded(4)).double()
    q = sm.quantize_block(weight, fmt)
    exact, rounded = reference.dequantize(q, fmt), reference.rounded(q, fmt, dtype)
    assert relative_error(rounded @ x, exact @ x) == pytest.approx(error, rel=0.1)
    assert relative_error(exact.bfloat16().double() @ x, exact @ x) == pytest.approx(1.7e-3, rel=0.1)
