"""`Int8Linear`: a linear layer with an int8 weight."""

from __future__ import annotations

import torch

from scaled_mm.errors import BadParamError, BadTensorShapeError
from scaled_mm.layers.linear import int8_linear
from scaled_mm.nn.quantized import QuantizedActivation
from scaled_mm.nn.weights import Float32Scales, wrong_int8
from scaled_mm.products.gemm import scaled_mm
from scaled_mm.products.prepared_weight import PreparedWeight, prepare_weight
from scaled_mm.rowwise.int8 import quantize_int8


class Int8Linear(Float32Scales):
    """y = x W^T + bias with an int8 weight and an int8 input, in place of `torch.nn.Linear`. Its state_dict has the names of compressed-tensors.

    weight: int8 [N, K]. weight_scale: float32 [N, 1]. bias: float [N], or None.
    input_scale: float32 [1]: a static scale of the input; None: each token has a scale of its own. input_zero_point: int8 [1], or None.
    symmetric: whether inputs are quantized without zero points.

    forward(x): x float [..., K], or what a norm of `scaled_mm.nn` with quantize= returns. y [..., N] in x's dtype, bit-identical to `int8_linear`, or
    with dynamic asymmetric inputs to `quantize_int8` and `scaled_mm`. No gradient. Raises a ScaledMMError subclass that names the argument.
    """

    is_shard = False  # whether the layer has a rank's part of the weight: scaled_mm.parallel
    scales = ("weight_scale", "input_scale")
    weights = ("weight",)
    zero_points = ("input_zero_point",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        static: bool = False,
        symmetric: bool = True,
        device=None,
        dtype=torch.bfloat16,
    ):
        """Memory for the tensors, uninitialized. dtype: of the bias. static: whether the layer has an input_scale; with symmetric=False it has an
        input_zero_point too."""
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.symmetric = symmetric
        self._prepared: tuple[object, PreparedWeight] | None = None

        def tensor(*shape: int, of: torch.dtype) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(shape, dtype=of, device=device), requires_grad=False)

        self.weight = tensor(out_features, in_features, of=torch.int8)
        self.weight_scale = tensor(out_features, 1, of=torch.float32)
        self.input_scale = tensor(1, of=torch.float32) if static else None
        self.input_zero_point = tensor(1, of=torch.int8) if static and not symmetric else None
        self.bias = tensor(out_features, of=dtype) if bias else None

    @classmethod
    def from_tensors(cls, weight, weight_scale, bias=None, input_scale=None, input_zero_point=None, *, symmetric: bool = True) -> Int8Linear:
        """A layer of the given tensors, which are not copied. Shapes and dtypes: see the class; scales of other shapes with as many values and float
        dtypes are converted."""
        if weight.dim() != 2 or weight.dtype is not torch.int8:
            raise BadTensorShapeError(f"weight: expected int8 [N, K], got {weight.dtype} {list(weight.shape)}")
        if weight_scale.numel() != weight.shape[0]:
            raise BadTensorShapeError(f"weight_scale: expected [{weight.shape[0]}, 1], got {list(weight_scale.shape)}")
        if input_zero_point is not None and input_scale is None:
            raise BadParamError("input_zero_point: expected None without input_scale, got a zero point")
        for name, value in (("input_scale", input_scale), ("input_zero_point", input_zero_point)):
            if value is not None and value.numel() != 1:
                raise BadTensorShapeError(f"{name}: expected one value, got {list(value.shape)}")
        if input_zero_point is not None and (wrong := wrong_int8(input_zero_point)):
            raise BadParamError(f"input_zero_point: {wrong}")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise BadTensorShapeError(f"bias: expected [{weight.shape[0]}], got {list(bias.shape)}")
        symmetric = input_zero_point is None if input_scale is not None else symmetric
        n, k = weight.shape
        layer = cls(k, n, bias is not None, static=input_scale is not None, symmetric=symmetric, device="meta")
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(weight_scale.reshape(n, 1).float(), requires_grad=False)
        for name, value, dtype in (("input_scale", input_scale, torch.float32), ("input_zero_point", input_zero_point, torch.int8)):
            if value is not None:
                setattr(layer, name, torch.nn.Parameter(value.reshape(1).to(dtype), requires_grad=False))
        if bias is not None:
            layer.bias = torch.nn.Parameter(bias.detach(), requires_grad=False)
        return layer

    @property
    def activation(self) -> str:
        """ "static" or "dynamic"."""
        return "dynamic" if self.input_scale is None else "static"

    def forward(self, x: torch.Tensor | QuantizedActivation) -> torch.Tensor:
        if isinstance(x, QuantizedActivation):
            return self._of_quantized(x.q, x.scale, x.zero_point, x.dtype)
        if not isinstance(x, torch.Tensor):
            raise BadParamError(f"x: expected a tensor or a QuantizedActivation, got a {type(x).__name__}")
        bias = self.bias if self.bias is None or self.bias.dtype in (x.dtype, torch.float32) else self.bias.float()
        if self.input_scale is None and not self.symmetric:
            q = quantize_int8(x, symmetric=False)
            return self._of_quantized(q.q, q.scale, q.zero_point, x.dtype)
        prepared = self._constant_weight() if x.is_cuda else None
        weight = self.weight if prepared is None else prepared
        return int8_linear(x, weight, self.weight_scale, bias, input_scale=self.input_scale, input_zero_point=self.input_zero_point)

    def _of_quantized(self, q, scale, zero_point, dtype) -> torch.Tensor:
        if q.dim() == 0 or q.shape[-1] != self.in_features:
            raise BadTensorShapeError(f"x: expected [..., {self.in_features}], got {list(q.shape)}")
        rows = q[None] if q.dim() == 1 else q.flatten(0, -2)
        bias = self.bias if self.bias is None or self.bias.dtype in (dtype, torch.float32) else self.bias.float()
        if zero_point is not None:
            zero_point = zero_point.reshape(-1, 1)
        prepared = self._constant_weight() if q.is_cuda else None
        weight = self.weight.t() if prepared is None else prepared
        y = scaled_mm(rows, weight, scale.reshape(-1, 1), self.weight_scale.reshape(1, -1), bias, out_dtype=dtype, a_zero_point=zero_point)
        return y.view(*q.shape[:-1], self.out_features)

    def _constant_weight(self) -> PreparedWeight | None:
        """The prepared weight, made again when the weight is replaced or written to (writes through `.data` and to inference tensors are not
        detected). None under torch.compile, and during a graph capture if no eager call has prepared it: preparing synchronizes."""
        if torch.compiler.is_compiling():
            return None
        weight = self.weight
        state = weight.data_ptr(), 0 if weight.is_inference() else weight._version, weight.device
        if self._prepared is None or self._prepared[0] != state:
            if torch.cuda.is_current_stream_capturing():
                return None
            self._prepared = state, prepare_weight(weight.detach().t())
        return self._prepared[1]

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_prepared": None}

    def extra_repr(self) -> str:
        zero = "" if self.symmetric else ", asymmetric"
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, activation={self.activation}{zero}"
