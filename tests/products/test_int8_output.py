"""int8 outputs of `scaled_mm`: the static quantization of the float32 output."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import scaled_mm as sm
from scaled_mm.errors import BadParamError, BadTensorDeviceError, BadTensorDtypeError, BadTensorShapeError

M, N, K = 9, 40, 64


def operands(batch: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    a, weight = (torch.randint(-128, 128, (*batch, size, K), dtype=torch.int8, generator=generator) for size in (M, N))
    return dict(a=a, b=weight.transpose(-1, -2), a_scale=torch.rand(M, 1, generator=generator), b_scale=torch.rand(N, generator=generator) * 0.01)


def expected(y: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None) -> torch.Tensor:
    """The formula, in numpy."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.rint(y.cpu().numpy() / scale.cpu().numpy().reshape(-1))
    q = np.where(np.isnan(ratio), np.float32(0), ratio)
    if zero_point is not None:
        q = q + zero_point.cpu().numpy().reshape(-1).astype(np.float32)
    return torch.from_numpy(np.clip(q, -128, 127).astype(np.int8))


DRAWN = torch.Generator().manual_seed(0)
COLUMNS = torch.rand(2, N, generator=DRAWN) * 4 + 0.1
SCALES = {"one": torch.tensor([2.5]), "0-d": torch.tensor(2.5), "columns": COLUMNS[0], "row": COLUMNS[1:]}
POINTS = {
    "none": None,
    "one": torch.tensor([7], dtype=torch.int32),
    "columns": torch.randint(-128, 128, (N,), dtype=torch.int8, generator=DRAWN),
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("zero_point", POINTS)
@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_output_is_the_quantized_float32_output(device, scale, zero_point, bias):
    given = {name: t.to(device) for name, t in operands().items()}
    if bias is not None:
        given["bias"] = torch.randn(N).to(bias).to(device)
    of_float = given if bias is None else {**given, "bias": given["bias"].float()}
    y = sm.scaled_mm(**of_float, out_dtype=torch.float32)
    s, z = SCALES[scale].to(device), POINTS[zero_point]
    z = z if z is None else z.to(device)
    want = expected(y, s, z)
    q = sm.scaled_mm(**given, out_dtype=torch.int8, out_scale=s, out_zero_point=z)
    assert q.dtype is torch.int8 and torch.equal(q.cpu(), want)
    out = torch.full((M, N + 3), 55, dtype=torch.int8, device=device)[:, :N]
    assert sm.scaled_mm(**given, out=out, out_scale=s, out_zero_point=z) is out and torch.equal(out.cpu(), want)
    assert want.unique().numel() > 20


def test_batches_zero_points_and_prepared_weights(device):
    given = {name: t.to(device) for name, t in operands((3,)).items()}
    given["a_zero_point"] = torch.tensor([5], dtype=torch.int32, device=device)
    scale = SCALES["columns"].to(device)
    y = sm.scaled_mm(**given, out_dtype=torch.float32)
    weight = sm.prepare_weight(given.pop("b"))
    q = sm.scaled_mm(b=weight, **given, out_dtype=torch.int8, out_scale=scale)
    assert torch.equal(q.cpu(), expected(y, scale, None))


def test_nan_and_infinity(device):
    given = {name: t.to(device) for name, t in operands().items()}
    given["a_scale"] = given["a_scale"].clone()
    given["a_scale"][0], given["a_scale"][1] = float("nan"), float("inf")
    y = sm.scaled_mm(**given, out_dtype=torch.float32)
    for value in (1.0, 0.0, float("inf"), float("nan")):
        scale = torch.tensor([value], device=device)
        assert torch.equal(sm.scaled_mm(**given, out_dtype=torch.int8, out_scale=scale).cpu(), expected(y, scale, None))


def test_refusals():
    given = operands()
    one = torch.tensor([1.0])
    for error, name, options in (
        (BadTensorDtypeError, "out_dtype", dict(out_dtype=torch.int8)),
        (BadTensorDtypeError, "out", dict(out=torch.empty(M, N, dtype=torch.int8))),
        (BadParamError, "out_scale", dict(out_dtype=torch.int8, out_zero_point=torch.tensor([1]))),
        (BadParamError, "out_scale", dict(out_dtype=torch.float32, out_scale=one)),
        (BadParamError, "out_zero_point", dict(out_zero_point=torch.tensor([1]))),
        (BadParamError, "out_scale", dict(out_dtype=torch.int8, out_scale=1.0)),
        (BadTensorDtypeError, "out_scale", dict(out_dtype=torch.int8, out_scale=one.double())),
        (BadTensorShapeError, "out_scale", dict(out_dtype=torch.int8, out_scale=torch.ones(M, 1))),
        (BadTensorDtypeError, "out_zero_point", dict(out_dtype=torch.int8, out_scale=one, out_zero_point=one)),
        (BadTensorShapeError, "out_zero_point", dict(out_dtype=torch.int8, out_scale=one, out_zero_point=torch.ones(3, dtype=torch.int8))),
        (BadTensorDeviceError, "out_scale", dict(out_dtype=torch.int8, out_scale=one.to("meta"))),
        (BadTensorShapeError, "out", dict(out=torch.empty(M, N + 1, dtype=torch.int8), out_scale=one)),
        (BadTensorDtypeError, "bias", dict(out_dtype=torch.int8, out_scale=one, bias=torch.zeros(N, dtype=torch.float64))),
        (BadParamError, "a", dict(out_dtype=torch.int8, out_scale=one, a=None)),
        (BadParamError, "b", dict(out_dtype=torch.int8, out_scale=one, b=given["b"].to_sparse())),
        (BadParamError, "out_scale", dict(out=torch.empty(M, N, dtype=torch.int8), out_scale=one.to_sparse())),
    ):
        with pytest.raises(error, match=f"^{name}: expected"):
            sm.scaled_mm(**given | options)


@pytest.mark.parametrize("vectors", [1, 0])
def test_an_output_without_columns_is_empty(device, vectors):
    given = {name: t.to(device) for name, t in operands().items()} | {"b": torch.empty(K, 0, dtype=torch.int8, device=device)}
    scale, point = torch.ones(vectors, device=device), torch.ones(vectors, dtype=torch.int8, device=device)
    out = sm.scaled_mm(**given | {"b_scale": scale}, out_dtype=torch.int8, out_scale=scale, out_zero_point=point)
    assert out.shape == (M, 0) and out.dtype is torch.int8


@pytest.mark.parametrize("shape", [(N,), (1, N)])
def test_it_is_exported_with_any_number_of_tokens(shape):
    class Layer(torch.nn.Module):
        def forward(self, a, scale):
            return sm.scaled_mm(**given | {"a": a, "a_scale": one}, out_dtype=torch.int8, out_scale=scale)

    given, one, scale = operands(), torch.ones(1), torch.ones(shape)
    tokens = torch.export.Dim("tokens", min=2, max=64)
    exported = torch.export.export(Layer(), (given["a"], scale), dynamic_shapes=({0: tokens}, {})).module()
    a = given["a"].repeat(3, 1)
    assert torch.equal(exported(a, scale), Layer()(a, scale))


def test_a_compiler_gives_the_same_bits(device):
    given = {name: t.to(device) for name, t in operands().items()}
    scale = SCALES["columns"].to(device)
    compiled = torch.compile(lambda **t: sm.scaled_mm(**t, out_dtype=torch.int8, out_scale=scale), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(**given), sm.scaled_mm(**given, out_dtype=torch.int8, out_scale=scale))
