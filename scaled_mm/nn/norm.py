"""RMS norms as modules, which may quantize their result for the layers that read it."""

from __future__ import annotations

import torch

from scaled_mm.errors import BadParamError
from scaled_mm.nn.quantized import QuantizedActivation
from scaled_mm.nn.weights import Float32Scales
from scaled_mm.rowwise.norm import add_rms_norm, rms_norm
from scaled_mm.rowwise.outputs import Quantized


class RMSNorm(Float32Scales):
    """`scaled_mm.rms_norm` as a module.

    quantize: None: forward(x) returns a tensor like x. "token", "static": it returns a `QuantizedActivation` for `Int8Linear`, with a scale of each
    token, or with the static scale `input_scale`, float32 [1], and, for an asymmetric input, `input_zero_point`, int8 [1].
    """

    scales = ("input_scale",)

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, *, quantize: str | None = None, symmetric: bool = True, device=None, dtype=torch.bfloat16
    ):
        super().__init__()
        if quantize not in (None, "token", "static"):
            raise BadParamError(f"quantize: expected None, 'token' or 'static', got {quantize!r}")
        self.eps, self.quantize = eps, quantize
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype, device=device), requires_grad=False)
        static = quantize == "static"
        self.input_scale = torch.nn.Parameter(torch.ones(1, dtype=torch.float32, device=device), requires_grad=False) if static else None
        zero = torch.zeros(1, dtype=torch.int8, device=device)
        self.input_zero_point = torch.nn.Parameter(zero, requires_grad=False) if static and not symmetric else None

    def forward(self, x: torch.Tensor) -> torch.Tensor | QuantizedActivation:
        return self._result(rms_norm(x, self.weight, self.eps, quantize=self._how(), zero_point=self.input_zero_point), x.dtype)

    def _how(self) -> str | torch.Tensor | None:
        return self.input_scale if self.quantize == "static" else self.quantize

    def _result(self, result: torch.Tensor | Quantized, dtype: torch.dtype) -> torch.Tensor | QuantizedActivation:
        return result if self.quantize is None else QuantizedActivation(result[0], result[1], dtype, self.input_zero_point)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, quantize={self.quantize!r}"


class AddRMSNorm(RMSNorm):
    """`scaled_mm.add_rms_norm` as a module: forward(x, residual) returns (the norm of x + residual, x + residual)."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor | QuantizedActivation, torch.Tensor]:
        result, total = add_rms_norm(x, residual, self.weight, self.eps, quantize=self._how(), zero_point=self.input_zero_point)
        return self._result(result, x.dtype), total
