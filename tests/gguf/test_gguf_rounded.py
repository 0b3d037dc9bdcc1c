"""What mode w16a16 loses in blocks whose scales are far below the largest of their row: figures of docs/design/gguf-formats.md."""

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
