"""`torch.ops.scaled_mm.gguf_*`: on a CPU the functions' own values; whole in a compiled graph; refusals of what calls them directly."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gguf_data import BLOCK_BYTES, WEIGHTS, planned_weight, random_blocks, relative_error, seeded

import scaled_mm as sm
from scaled_mm.errors import (
    BadParamError,
    BadTensorDeviceError,
    BadTensorDtypeError,
    BadTensorShapeError,
    BadTensorStridesError,
    InternalError,
    NullPointerError,
    ScaledMMError,
)
from scaled_mm.gguf import operators, reference, tiles
from scaled_mm.gguf_formats import FORMATS, BlockFormat

M, N, K = 6, 40, 96  # tokens, rows of the weight, inner dimension


def weight(fmt: str) -> torch.Tensor:
    return sm.quantize_block(torch.randn(N, K, generator=seeded(1)), fmt)


def activation(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(M, K, generator=seeded(2)).to(dtype)


def call(weight_q, x, bias=None, fmt="q4_0", rows=N, k=K, packed=False, out_dtype=torch.float32, mode="auto", transposed_out=False):
    code = operators.format_code(fmt) if isinstance(fmt, str) else fmt
    mode = operators.mode_code(mode) if isinstance(mode, str) else mode
    return operators.gguf_gemm(weight_q, x, bias, code, rows, k, packed, False, out_dtype, mode, transposed_out)


@pytest.mark.parametrize("fmt", WEIGHTS)
@pytest.mark.parametrize("packed", [False, True])
def test_blocks_tiles_and_fields_give_the_same_values(fmt, packed):
    weight_q, x, bias = weight(fmt), activation(), torch.randn(N, generator=seeded(3))
    given = tiles.from_blocks(weight_q, FORMATS[fmt]) if packed else weight_q
    want = reference.gemm_q8_1(weight_q, sm.quantize_q8_1(x), fmt) + bias.double()[:, None]
    out = call(given, x, bias, fmt, packed=packed, mode="w4a8")
    assert out.shape == (N, M) and relative_error(out, want) <= 2e-6
    turned = call(given, sm.quantize_q8_1(x), bias, fmt, packed=packed, transposed_out=True)
    assert turned.is_contiguous() and torch.equal(turned, sm.block_linear(x, sm.pack_block_weight(weight_q, fmt), bias, mode="w4a8"))


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_products_take_a_packed_weight(fmt):
    weight_q, x = weight(fmt), activation()
    packed, activation_q = sm.pack_block_weight(weight_q, fmt), sm.quantize_q8_1(x)
    gemm, gemm_q8_1 = getattr(sm, f"gemm_{fmt}"), getattr(sm, f"gemm_{fmt}_q8_1")
    assert torch.equal(gemm(packed, x.half()), gemm(weight_q, x.half()))
    assert torch.equal(gemm_q8_1(packed, activation_q, N, M, K), gemm_q8_1(weight_q, activation_q))
    other = sm.pack_block_weight(random_blocks(N, K // 32, "q5_0" if fmt != "q5_0" else "q4_0"), "q5_0" if fmt != "q5_0" else "q4_0")
    with pytest.raises(BadParamError, match=f"^weight_q: expected a packed weight of {fmt}, got one of "):
        gemm(other, x.half())
    with pytest.raises(BadTensorShapeError, match=r"^activation: expected K = 96 as in weight_q \[M, K\] = \[40, 96\], got K = 64"):
        gemm(packed, x[:, :64].half())


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_the_operators_keep_what_torch_asks_of_them(fmt):
    weight_q, x, bias = weight(fmt), activation(torch.bfloat16), torch.randn(N, generator=seeded(3))
    code, given = operators.format_code(fmt), tiles.from_blocks(weight_q, FORMATS[fmt])
    rest = (torch.bfloat16, operators.mode_code("auto"), True)
    torch.library.opcheck(operators.gguf_gemm, (weight_q, x, bias, code, N, K, False, False, *rest))
    torch.library.opcheck(operators.gguf_gemm, (given, sm.quantize_q8_1(x), None, code, N, K, True, True, *rest))
    d, m, high, levels = sm.pack_block_weight(weight_q, fmt).fields
    torch.library.opcheck(operators.gguf_gemm_fields, (levels, high, d, m, x, bias, code, *rest))


@pytest.mark.parametrize("fmt", ["q4_0", "q5_1", "q8_0"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_products_and_layers_stay_whole_in_a_compiled_graph(fmt, dynamic):
    weight_q, bias = weight(fmt), torch.randn(N, generator=seeded(3))
    packed = sm.pack_block_weight(weight_q, fmt)
    gemm, gemm_q8_1 = getattr(sm, f"gemm_{fmt}"), getattr(sm, f"gemm_{fmt}_q8_1")
    seen = []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True, dynamic=dynamic)
    def all_of_them(x, activation_q):
        return gemm(weight_q, x), gemm_q8_1(weight_q, activation_q), gemm(packed, x), sm.block_linear(x, packed, bias, mode="w4a8")

    x = activation(torch.bfloat16)
    activation_q = sm.quantize_q8_1(x)
    eager = (gemm(weight_q, x), gemm_q8_1(weight_q, activation_q), gemm(packed, x), sm.block_linear(x, packed, bias, mode="w4a8"))
    for got, want in zip(all_of_them(x, activation_q), eager):
        assert torch.equal(got, want)
    assert seen.count("scaled_mm.gguf_gemm.default") == 2 and seen.count("scaled_mm.gguf_gemm_fields.default") == 2, seen


@pytest.mark.parametrize("strict", [False, True])
def test_sizes_may_be_symbols_of_an_exported_graph(strict):
    weight_q, x = weight("q4_0"), activation(torch.half)

    class Product(torch.nn.Module):
        def forward(self, x):
            return sm.gemm_q4_0(weight_q, x, M=N, N=x.shape[0], K=x.shape[1])

    exported = torch.export.export(Product(), (x,), dynamic_shapes={"x": {0: torch.export.Dim("n", min=1)}}, strict=strict).module()
    for rows in (x, x[:1], x.repeat(5, 1)):
        assert torch.equal(exported(rows), sm.gemm_q4_0(weight_q, rows))


def test_inductor_compiles_a_layer():
    packed, x = sm.pack_block_weight(weight("q4_0"), "q4_0"), activation(torch.bfloat16)
    compiled = torch.compile(lambda x: sm.block_linear(x * 2, packed) + 1, fullgraph=True)
    assert torch.equal(compiled(x), sm.block_linear(x * 2, packed) + 1)


def test_meta_tensors_have_shapes_alone():
    out = sm.gemm_q4_0(weight("q4_0").to("meta"), activation(torch.half).to("meta"))
    assert out.is_meta and out.shape == (N, M) and out.dtype is torch.float32
    packed = sm.pack_block_weight(weight("q4_0").to("meta"), "q4_0")
    y = sm.block_linear(activation(torch.half).to("meta"), packed)
    assert y.is_meta and y.shape == (M, N) and y.dtype is torch.float16


@pytest.mark.parametrize(
    "changed, error, message",
    [
        (dict(weight_q=weight("q5_0")), BadTensorShapeError, r"^weight: expected \[..., K/32, 18\] for q4_0, got \[40, 3, 22\]"),
        (dict(weight_q=weight("q4_0").float()), BadTensorDtypeError, "^weight: expected uint8, got torch.float32"),
        (dict(weight_q=weight("q4_0")[0]), BadTensorShapeError, r"^weight: expected 3 dimensions \[rows, K/32, 18\], got \[3, 18\]"),
        (dict(rows=41), BadTensorShapeError, r"^weight: expected \[41, 3, 18\] of rows = 41, k = 96, got \[40, 3, 18\]"),
        (dict(k=128), BadTensorShapeError, r"^weight: expected \[40, 4, 18\] of rows = 40, k = 128"),
        (dict(packed=True), BadTensorShapeError, r"^weight: expected \[1, 1, 9344\] of rows = 40, k = 96, got \[40, 3, 18\]"),
        (
            dict(weight_q=torch.zeros(1, 1, 2 * 9344, dtype=torch.uint8)[..., ::2], packed=True),
            BadTensorStridesError,
            "^weight: expected contiguous tiles",
        ),
        (dict(weight_q=random_blocks(N, 6, "q4_0")[:, ::2]), BadTensorStridesError, "^weight: expected blocks one after the other"),
        (dict(weight_q=None), (NullPointerError, RuntimeError), "weight"),
        (dict(fmt="q8_1"), BadParamError, "^fmt: expected the format of a weight, one of 'q4_0', .* got 'q8_1'"),
        (dict(fmt=99), BadParamError, "^fmt: expected one of 'q4_0', .* got 99"),
        (dict(x=activation()[:, :64]), BadTensorShapeError, r"^activation: expected \[M, K\] with K = 96 as in weight \[N, K\], got \[6, 64\]"),
        (dict(x=activation()[0]), BadTensorShapeError, r"^activation: expected 2 dimensions \[M, K\], got 1: \[96\]"),
        (dict(x=activation().double()), BadTensorDtypeError, "^activation: expected float16, bfloat16, float32, or uint8 for q8_1, got float64"),
        (dict(x=random_blocks(M, 6, "q8_1")[:, ::2]), BadTensorStridesError, "^activation: expected blocks one after the other"),
        (dict(x=activation().to("meta")), BadTensorDeviceError, "^activation: expected a tensor on cpu, got one on meta"),
        (
            dict(bias=torch.zeros(N, dtype=torch.half)),
            BadTensorDtypeError,
            "^bias: expected out's dtype torch.float32 or torch.float32, got torch.float16",
        ),
        (dict(bias=torch.zeros(1, N)), BadTensorShapeError, r"^bias: expected 1 dimension \[N\], got 2: \[1, 40\]"),
        (dict(bias=torch.zeros(N - 1)), BadTensorShapeError, r"^bias: expected \[N\] with N = 40 as in weight \[N, K\], got \[39\]"),
        (dict(out_dtype=torch.float64), BadTensorDtypeError, "^out_dtype: expected float16, bfloat16 or float32, got float64"),
        (dict(mode=4), BadParamError, "^mode: expected a scaledMMGgufMode_t, got 4"),
        (dict(mode="w4a16"), BadParamError, "^mode: expected auto, w4a8 or w16a16 with float32 activations, got w4a16"),
        (dict(x=sm.quantize_q8_1(activation()), mode="w4a16"), BadParamError, "^mode: expected auto or w4a8 with q8_1 activations, got w4a16"),
    ],
)
def test_what_an_operator_cannot_compute_is_refused_with_the_arguments_name(changed, error, message):
    with pytest.raises(error, match=message):
        call(**{"weight_q": weight("q4_0"), "x": activation(), **changed})


def fields_of(fmt: str, **changed) -> list:
    d, m, high, levels = sm.pack_block_weight(weight(fmt), fmt).fields
    return list({**dict(levels=levels, high=high, d=d, m=m), **changed}.values())


@pytest.mark.parametrize(
    "fmt, changed, error, message",
    [
        ("q5_0", dict(high=None), BadParamError, "^high: expected a tensor for q5_0, got None"),
        ("q4_1", dict(m=None), BadParamError, "^m: expected a tensor for q4_1, got None"),
        ("q4_0", dict(m=torch.zeros(N, 3, dtype=torch.half)), BadParamError, "^m: expected None for q4_0, got a tensor"),
        (
            "q4_0",
            dict(levels=torch.zeros(3, 3, 16, dtype=torch.uint8)),
            BadTensorShapeError,
            r"^levels: expected \[40, 3, 16\] for q4_0, got \[3, 3, 16\]",
        ),
        (
            "q8_0",
            dict(levels=torch.zeros(N, 3, 16, dtype=torch.uint8)),
            BadTensorDtypeError,
            "^levels: expected torch.int8 for q8_0, got torch.uint8",
        ),
        ("q4_0", dict(d=torch.zeros(N, dtype=torch.half)), BadTensorShapeError, r"^d: expected 2 dimensions \[N, K/32\], got \[40\]"),
        ("q4_0", dict(d=torch.zeros(N, 3)), BadTensorDtypeError, "^d: expected torch.float16 for q4_0, got torch.float32"),
    ],
)
def test_fields_that_are_not_those_of_the_format_are_refused_also_without_data(fmt, changed, error, message):
    rest = (operators.format_code(fmt), torch.float32, operators.mode_code("auto"), True)
    with pytest.raises(error, match=message):
        operators.gguf_gemm_fields(*fields_of(fmt, **changed), activation(), None, *rest)
    with pytest.raises(error, match=message):
        meta = [field if field is None else field.to("meta") for field in fields_of(fmt, **changed)]
        operators.gguf_gemm_fields(*meta, activation().to("meta"), None, *rest)


@pytest.mark.parametrize("rows, k", [(40, 97), (-5, 96), (40, -32)])
@pytest.mark.parametrize("packed", [False, True])
def test_rows_and_k_that_no_weight_has_are_refused(rows, k, packed):
    for device in ("cpu", "meta"):
        x, given = activation().to(device), (torch.zeros(1, 1, 9344, dtype=torch.uint8) if packed else weight("q4_0")).to(device)
        with pytest.raises(BadTensorShapeError, match=f"^weight: expected rows and k of 0 or more, k a multiple of 32, got {rows} and {k}"):
            operators.gguf_gemm(
                given, x, None, operators.format_code("q4_0"), rows, k, packed, False, torch.float32, operators.mode_code("auto"), True
            )


@pytest.mark.parametrize("kind", ["blocks", "packed"])
def test_a_descriptor_runs_inside_a_compiled_function(kind):
    given = weight("q5_1") if kind == "blocks" else sm.pack_block_weight(weight("q5_1"), "q5_1")
    out, x = torch.empty(M, N).t(), activation()
    with sm.create_block_descriptor(sm.Handle("cpu"), out=out, weight=given, activation=x) as descriptor:

        @torch.compile(backend="eager")
        def layer(out, x):
            descriptor.calculate(out, given, x)
            return out + 1

        got = layer(out, x)
        torch._dynamo.reset()
        assert torch.equal(got.t(), sm.block_linear(x, sm.pack_block_weight(weight("q5_1"), "q5_1")) + 1)


def test_a_descriptors_operator_takes_no_cpu_tensors():
    with pytest.raises(InternalError, match="^gguf_calculate: it takes CUDA tensors"):
        operators.gguf_calculate(0, torch.empty(N, M), weight("q4_0"), activation(), None, None, operators.format_code("q4_0"), N, K, False, -1)


# ---- descriptors on a CPU -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", WEIGHTS)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_descriptor_on_a_cpu_computes_what_the_layer_does(fmt, out_dtype):
    weight_q, x, bias = weight(fmt), activation(torch.bfloat16), torch.randn(N, generator=seeded(3))
    packed = sm.pack_block_weight(weight_q, fmt)
    with sm.Handle("cpu") as handle:
        for given in (weight_q, packed):
            planned = dict(weight=planned_weight(given, fmt), activation=x, bias=bias)
            for mode in ("auto", "w4a8", "w4a16", "w16a16"):
                out = torch.full((M + 1, N + 3), torch.nan, dtype=out_dtype)[1:, 2:-1].t()  # any strides
                with sm.create_block_descriptor(handle, out=out, **planned, mode=mode) as descriptor:
                    assert descriptor.workspace_size == 0 and descriptor.kernel.row == "cpu_gguf_float32"
                    descriptor.calculate(out, given, x, bias)
                want = sm.block_linear(x, packed, bias, torch.float32, mode)
                assert torch.equal(out.t(), want.to(out_dtype)), mode
    assert "destroyed" in repr(descriptor) and fmt in repr(descriptor)


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_a_plain_weight_is_planned_by_its_bytes_or_refused_if_several_formats_have_as_many(fmt):
    weight_q, x, out = weight(fmt), activation(torch.half), torch.empty(M, N).t()
    same = [name for name, size in BLOCK_BYTES.items() if size == BLOCK_BYTES[fmt]]
    if len(same) > 1:
        with pytest.raises(BadParamError, match=f"bytes are those of {' and '.join(same)}, got a tensor"):
            sm.create_block_descriptor(sm.Handle("cpu"), out=out, weight=weight_q, activation=x)
        return
    with sm.create_block_descriptor(sm.Handle("cpu"), out=out, weight=weight_q, activation=x) as descriptor:
        descriptor.calculate(out, weight_q, x)
    assert torch.equal(out, sm.block_linear(x, sm.pack_block_weight(weight_q, fmt), out_dtype=torch.float32).t())


def pretend(monkeypatch, like: str) -> str:
    """The name of one more format of the weight, with blocks of as many bytes as those of `like`."""
    code = max(description.code for description in FORMATS.values()) + 1
    other = BlockFormat("pretended", code, bits=FORMATS[like].bits, zero=7, second="m" if FORMATS[like].second else None)
    assert other.block_bytes == BLOCK_BYTES[like] and other.is_weight
    monkeypatch.setitem(FORMATS, other.name, other)
    return other.name


def test_a_plain_weight_of_a_size_that_two_formats_have_is_refused_and_a_desc_or_a_packed_weight_is_taken(monkeypatch):
    weight_q, x, out = weight("q4_0"), activation(torch.half), torch.empty(M, N).t()
    same = " and ".join(name for name, size in BLOCK_BYTES.items() if size == 18)
    name = pretend(monkeypatch, "q4_0")
    with pytest.raises(BadParamError) as error:
        sm.create_block_descriptor(sm.Handle("cpu"), out=out, weight=weight_q, activation=x)
    why = f"which names the format: blocks of 18 bytes are those of {same} and {name}"
    assert str(error.value) == f"weight: expected a TensorDesc or a PackedBlockWeight, {why}, got a tensor [{N}, {K // 32}, 18]"
    want = sm.block_linear(x, sm.pack_block_weight(weight_q, "q4_0"), out_dtype=torch.float32).t()
    packed = sm.pack_block_weight(weight_q, "q4_0")
    for planned, given in ((sm.TensorDesc((N, K), "q4_0"), weight_q), (packed, packed)):
        with sm.create_block_descriptor(sm.Handle("cpu"), out=out, weight=planned, activation=x) as descriptor:
            descriptor.calculate(out.zero_(), given, x)
        assert torch.equal(out, want)
    with sm.create_block_descriptor(sm.Handle("cpu"), out=out, weight=sm.TensorDesc((N, K), "q4_0"), activation=x) as descriptor:
        for wrong, message in (
            ((out, weight_q[:-1], x), r"^weight: expected \[40, 96\] as the descriptor was created, got \[39, 96\]"),
            ((out, weight_q, x[:-1]), r"^activation: expected \[6, 96\] as the descriptor was created, got \[5, 96\]"),
        ):
            with pytest.raises(ScaledMMError, match=message):
                descriptor.calculate(*wrong)


def test_q8_1_activations_are_taken_though_a_weight_s_format_has_as_many_bytes(monkeypatch):
    weight_q, x_q, out = weight("q4_0"), sm.quantize_q8_1(activation()), torch.empty(N, M)
    pretend(monkeypatch, "q8_1")
    with sm.create_block_descriptor(sm.Handle("cpu"), out=out, weight=sm.TensorDesc((N, K), "q4_0"), activation=x_q) as descriptor:
        descriptor.calculate(out, weight_q, x_q)
    assert torch.equal(out, sm.gemm_q4_0_q8_1(weight_q, x_q))


def test_a_descriptor_is_planned_from_what_tensors_are_and_refuses_others():
    desc = sm.TensorDesc
    weight_q, x = weight("q4_0"), activation(torch.half)
    handle, out = sm.Handle("cpu"), torch.empty(N, M)
    planned = dict(out=desc((N, M), torch.float32), weight=desc((N, K), "q4_0"), activation=desc((M, K), "q8_1"))
    descriptor = sm.create_block_descriptor(handle, **planned)
    activation_q = sm.quantize_q8_1(x)
    descriptor.calculate(out, weight_q, activation_q)
    assert torch.equal(out, sm.gemm_q4_0_q8_1(weight_q, activation_q))
    packed = sm.pack_block_weight(weight_q, "q4_0")
    for arguments, error, message in [
        ((out, weight_q, x), BadTensorDtypeError, "^activation: expected q8_1 as the descriptor was created, got float16"),
        ((out, weight("q5_0"), activation_q), BadTensorDtypeError, "^weight: expected q4_0 as the descriptor was created, got q5_0"),
        ((out, packed, activation_q), BadParamError, "^weight: expected blocks as the descriptor was created, got packed tiles"),
        ((out.t().contiguous().t(), weight_q, activation_q), ScaledMMError, "^out: expected strides .* as the descriptor was created"),
        ((out, weight_q, activation_q, torch.zeros(N)), BadParamError, "^bias: expected none as the descriptor was created, got a tensor"),
        ((out, planned["weight"], activation_q), BadParamError, "^weight: expected a tensor, got a TensorDesc"),
        (
            (out, weight_q.float(), activation_q),
            BadTensorDtypeError,
            "^weight: expected blocks, uint8, or a PackedBlockWeight, got float32; sm.quantize_block makes blocks$",
        ),
    ]:
        with pytest.raises(error, match=message):
            descriptor.calculate(*arguments)
    memory = torch.empty(N * M * 4 + weight_q.numel(), dtype=torch.uint8)
    shared = memory[: N * M * 4].view(torch.float32).view(N, M)
    with pytest.raises(BadParamError, match="^out: expected memory apart from every input, got an overlap with weight"):
        descriptor.calculate(shared, memory[: weight_q.numel()].view_as(weight_q), activation_q)
    with pytest.raises(BadParamError, match="^workspace: expected a tensor or None"):
        descriptor.calculate(out, weight_q, activation_q, workspace=3)
    descriptor.destroy()
    with pytest.raises(BadParamError, match="destroyed"):
        descriptor.calculate(out, weight_q, activation_q)
    for changed, error, message in [
        (dict(weight=None), BadParamError, "^weight: expected a tensor or a TensorDesc, got None"),
        (dict(weight=5), BadParamError, "^weight: expected a tensor, a TensorDesc or a PackedBlockWeight, got int"),
        (dict(weight=sm.QuantizedTensor("q4_0", weight("q4_0"))), BadParamError, "^weight: .* got a QuantizedTensor; give its .q, and its .fmt"),
        (dict(mode="w8a8"), BadParamError, "^mode: expected one of 'auto', 'w4a8', 'w4a16', 'w16a16', got 'w8a8'"),
        (dict(mode="w4a16"), BadParamError, "^mode: expected auto or w4a8 with q8_1 activations, got w4a16"),
        (dict(kernel="gguf_mma_16x8_x2"), BadParamError, "^kernel: expected none on a CPU, got gguf_mma_16x8_x2"),
        (dict(activation=packed), BadParamError, "^activation: expected a tensor or a TensorDesc, got a PackedBlockWeight"),
        (
            dict(activation=torch.zeros(M, 3, 35, dtype=torch.uint8)),
            BadTensorShapeError,
            r"^activation: expected blocks \[rows, K/32, bytes of a block: 18 for q4_0",
        ),
        (dict(weight=desc((N, K + 16), "q4_0")), BadTensorShapeError, "^weight: expected K a multiple of 32"),
    ]:
        with pytest.raises(error, match=message):
            sm.create_block_descriptor(handle, **{**planned, **changed})


def test_what_a_tensor_desc_says_of_blocks():
    desc = sm.TensorDesc((65, 288), "q5_1")
    assert desc.strides == (9 * 24, 1) and desc.bytes == 65 * 9 * 24
    assert sm.TensorDesc((65, 288), "q5_1", (1000, 1)).bytes == 64 * 1000 + 9 * 24
    assert sm.TensorDesc((65, 288), "q5_1", packed=True).bytes == 2 * 2 * (512 * 24 + 128)
    packed = sm.TensorDesc((65, 288), "q5_1", packed=True)
    assert dataclasses.replace(packed, constant=True).strides == packed.strides
    for arguments, message in [
        (dict(shape=(65, 288), dtype="q6_k"), r"^dtype: expected a torch.dtype or a GGUF format \(q4_0, "),
        (dict(shape=(65, 288, 1), dtype="q5_1"), r"^shape: expected \[rows, K\] of a tensor of q5_1 blocks"),
        (dict(shape=(65, 288), dtype=torch.int8, packed=True), "^packed: expected a GGUF format as dtype"),
        (dict(shape=(65, 288), dtype="q5_1", strides=(500, 1), packed=True), r"^strides: expected None for a packed weight, .* got \(500, 1\)$"),
    ]:
        with pytest.raises(BadParamError, match=message):
            sm.TensorDesc(**arguments)
