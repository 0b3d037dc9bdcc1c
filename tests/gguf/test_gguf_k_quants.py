"""K-quants: dequantized with the bits of the gguf package, converted by the documented formula, loaded from files, and refused elsewhere."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_data import relative_error, seeded
from gguf_k_quant_data import CONVERTIBLE, HALVES, K_QUANTS, fields, gguf_dequantize, quantize, random_super_blocks
from gguf_malformed import file as malformed_file
from gguf_malformed import tensor as malformed_tensor

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.errors import BadParamError, BadTensorDtypeError, BadTensorShapeError, BadTensorStridesError
from scaled_mm.gguf import layout
from scaled_mm.gguf import reference as block_reference
from scaled_mm.gguf_k_quants import K_QUANTS as REGISTRY

# What docs/design/gguf-formats.md says of weights X, 512 x 4096: ||V - X|| / ||X|| of the K-quant's values V; ||V' - V|| / ||V|| of converted V'.
ERRORS = {
    ("normal", "q4_k"): (7.8e-2, 6.9e-4),
    ("normal", "q5_k"): (3.8e-2, 6.9e-4),
    ("normal", "q6_k"): (1.9e-2, 5.3e-3),
    ("cubed", "q4_k"): (1.1e-1, 1.0e-3),
    ("cubed", "q5_k"): (5.6e-2, 1.0e-3),
    ("cubed", "q6_k"): (2.6e-2, 6.8e-3),
}


def bound(q: torch.Tensor, fmt: str) -> torch.Tensor:
    """float64 [N, K]: what the conversion of each value may add, 2^-11 (|d * scale * level| + |dmin * minimum|)."""
    rows = []
    for row in q.cpu().numpy():
        parts = [fields(block, fmt) for block in row]
        rows.append(np.concatenate([(np.abs(scale)[:, None] * levels + np.abs(offset)[:, None]).reshape(-1) for scale, offset, levels in parts]))
    return torch.from_numpy(np.stack(rows)) * 2.0**-11


def test_the_registry_has_the_package_s_sizes():
    assert {name: (d.block_bytes, d.converted) for name, d in REGISTRY.items()} == K_QUANTS
    for name, description in REGISTRY.items():
        kind = gguf.GGMLQuantizationType[name.upper()]
        assert gguf.GGML_QUANT_SIZES[kind] == (description.block_values, description.block_bytes)


# ---- dequantizing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", K_QUANTS)
def test_any_bytes_dequantize_to_the_bits_of_the_gguf_package(device, fmt):
    q = random_super_blocks(150, 6, fmt, seed=1)
    value = sm.dequantize_block(q.to(device), fmt).cpu()
    assert value.shape == (150, 1536) and value.isnan().any() and value.isfinite().any()
    assert reference.same_bits(value, gguf_dequantize(q, fmt))


@pytest.mark.parametrize(("fmt", "at"), [(fmt, offset) for fmt in K_QUANTS for offset in HALVES[fmt]])
def test_every_half_of_float16_is_taken(device, fmt, at):
    q = random_super_blocks(2**16, 1, fmt, seed=2, finite=True)
    q[:, 0, at : at + 2] = torch.arange(2**16).to(torch.int16).unsqueeze(-1).view(torch.uint8)
    assert reference.same_bits(sm.dequantize_block(q.to(device), fmt).cpu(), gguf_dequantize(q, fmt))


@pytest.mark.parametrize("fmt", K_QUANTS)
def test_a_narrower_dtype_is_a_cast_of_float32(device, fmt):
    q = random_super_blocks(20, 4, fmt, seed=3).to(device)
    for dtype in (torch.float16, torch.bfloat16):
        assert reference.same_bits(sm.dequantize_block(q, fmt, dtype), sm.dequantize_block(q, fmt).to(dtype))


@pytest.mark.parametrize("fmt", K_QUANTS)
def test_rows_of_any_stride_and_super_blocks_at_any_address_are_taken(device, fmt):
    size = K_QUANTS[fmt][0]
    q = random_super_blocks(8, 12, fmt, seed=4).to(device)
    odd = torch.empty(q.numel() + 1, dtype=torch.uint8, device=device)[1:].view(q.shape).copy_(q)
    views = (q[::2], q[:, 3:7], q[:, 3:4], q[:1, :1], q.view(4, 2, 12, size).transpose(0, 1), q[0], odd, odd[:, 2:3], q[:0], q[:, :0])
    for view in views:
        value = sm.dequantize_block(view, fmt)
        assert value.is_contiguous() and value.shape == (*view.shape[:-2], 256 * view.shape[-2])
        assert reference.same_bits(value, sm.dequantize_block(view.contiguous().clone(), fmt))
        if fmt in CONVERTIBLE:
            blocks = sm.convert_k_quant(view, fmt).q
            assert blocks.is_contiguous() and blocks.shape[:-1] == (*view.shape[:-2], 8 * view.shape[-2])
            assert torch.equal(blocks, sm.convert_k_quant(view.contiguous().clone(), fmt).q)


@pytest.mark.parametrize("fmt", K_QUANTS)
@pytest.mark.parametrize("elements", [96, 768])
def test_where_the_chunks_end_does_not_show(device, fmt, elements, monkeypatch):
    q = random_super_blocks(7, 5, fmt, seed=5).to(device)
    whole, converted = sm.dequantize_block(q, fmt), sm.convert_k_quant(q, fmt).q if fmt in CONVERTIBLE else None
    monkeypatch.setattr(layout, "_CHUNK_ELEMENTS", {q.device.type: elements})
    assert reference.same_bits(sm.dequantize_block(q, fmt), whole)
    assert converted is None or torch.equal(sm.convert_k_quant(q, fmt).q, converted)


# ---- conversion -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", CONVERTIBLE)
def test_the_conversion_is_the_documented_formula(device, fmt):
    q = random_super_blocks(60, 2, fmt, seed=6)
    target = CONVERTIBLE[fmt]
    converted = sm.convert_k_quant(q.to(device), fmt)
    assert isinstance(converted, sm.QuantizedTensor) and converted.fmt == target and converted.shape == (60, 512)
    levels, _, _ = block_reference.fields(converted.q.cpu(), target)
    d, m = (converted.q[..., offset : offset + 2].cpu().contiguous().view(torch.float16).squeeze(-1) for offset in (0, 2))
    overflows = 0
    for i, row in enumerate(q.numpy()):
        with np.errstate(all="ignore"):
            parts = [fields(block, fmt) for block in row]
            scale, offset = (np.concatenate([part[j] for part in parts]) for j in (0, 1))
            assert reference.same_bits(d[i], torch.from_numpy(scale.astype(np.float16)))  # one rounding, of the exact product
            assert reference.same_bits(m[i], torch.from_numpy((-offset).astype(np.float16)))
        assert torch.equal(levels[i], torch.from_numpy(np.concatenate([part[2] for part in parts])).double())
        overflows += np.count_nonzero(np.isfinite(scale) & (np.abs(scale) >= 65520))
    assert overflows and d.isnan().any()
    assert set(d.view(torch.int16)[d.isnan()].tolist()) == {0x7E00}


def test_a_product_with_six_bits_rounds_by_at_most_2_to_the_minus_11_and_not_where_it_is_subnormal():
    """Every float16 with every number: d * scale is a multiple of 2^-24, as d is."""
    half = torch.arange(2**16).to(torch.int16).view(torch.float16)
    half = half[half.isfinite()]
    product = half.double()[:, None] * torch.arange(64)
    assert torch.equal((half.float()[:, None] * torch.arange(64)).double(), product)
    rounded = layout.to_half(product.float()).double()
    overflows = product.abs() >= 65520
    assert torch.equal(rounded.isinf(), overflows) and not rounded.isnan().any()
    error = (rounded - product).abs()
    assert (error <= 2.0**-11 * product.abs())[~overflows].all()
    assert (error[product.abs() < 2.0**-13] == 0).all()


@pytest.mark.parametrize("fmt", CONVERTIBLE)
def test_converted_values_are_within_the_documented_bound(fmt):
    q = random_super_blocks(40, 3, fmt, seed=7, finite=True)
    error = (block_reference.dequantize(sm.convert_k_quant(q, fmt).q, CONVERTIBLE[fmt]) - gguf_dequantize(q, fmt).double()).abs()
    allowed = bound(q, fmt)
    assert (error <= allowed * (1 + 2.0**-12)).all()  # the oracle's subtraction rounds to float32
    assert error.max() > 0.5 * allowed[error == error.max()].min()


@pytest.mark.parametrize("fmt", CONVERTIBLE)
def test_products_that_float16_holds_convert_without_an_error(fmt):
    q = random_super_blocks(16, 2, fmt, seed=8)
    for offset in HALVES[fmt]:
        q[..., offset : offset + 2] = torch.tensor([2.0**-24, -(2.0**-16), 2.0**-10, 1.0]).half()[:, None].view(torch.uint8).repeat(4, 1).unsqueeze(1)
    assert reference.same_bits(sm.convert_k_quant(q, fmt).dequantize(), gguf_dequantize(q, fmt))


@pytest.mark.parametrize(("kind", "fmt"), ERRORS)
def test_the_error_of_the_conversion_is_what_the_documentation_says(kind, fmt):
    """q6_k: of quantizing its values again to q8_0."""
    x = torch.randn(512, 4096, generator=seeded(9))
    x = x if kind == "normal" else x**3
    q = quantize(x, fmt)
    value = sm.dequantize_block(q, fmt)
    other = sm.convert_k_quant(q, fmt).dequantize() if fmt in CONVERTIBLE else sm.dequantize_q8_0(sm.quantize_q8_0(value))
    for measured, documented in zip((relative_error(value, x.double()), relative_error(other, value.double())), ERRORS[kind, fmt]):
        assert 0.9 * documented <= measured <= 1.1 * documented


# ---- products -------------------------------------------------------------------------------------------------------------


def check_layer(q: torch.Tensor, fmt: str, device: str) -> None:
    """block_linear of a packed K-quant: the converted format's product, and within the bound of the K-quant's values."""
    packed = sm.pack_block_weight(q.to(device), fmt)
    target = CONVERTIBLE[fmt]
    converted = sm.convert_k_quant(q, fmt)
    assert packed.fmt == target and packed.shape == (q.shape[0], 256 * q.shape[1])
    assert torch.equal(packed.unpack().cpu(), converted.q)  # a GPU converts to the CPU's bytes
    x = torch.randn(5, packed.shape[1], generator=seeded(10)).half()
    y = sm.block_linear(x.to(device), packed, out_dtype=torch.float32, mode="w4a16").cpu().double()
    assert relative_error(y, x.double() @ block_reference.dequantize(converted.q, target).t()) <= 2e-6
    exact = x.double() @ gguf_dequantize(q, fmt).double().t()
    added = x.abs().double() @ bound(q, fmt).t()
    assert ((y - exact).abs() <= added + 4e-6 * exact.norm() / exact.numel() ** 0.5).all()


@pytest.mark.parametrize("fmt", CONVERTIBLE)
@pytest.mark.parametrize("kind", ["random", "normal"])
def test_a_layer_is_within_the_bound_of_the_dequantized_weight(fmt, kind):
    q = random_super_blocks(24, 3, fmt, seed=11, finite=True) if kind == "random" else quantize(torch.randn(70, 1024, generator=seeded(12)), fmt)
    check_layer(q, fmt, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", CONVERTIBLE)
def test_a_layer_on_a_gpu_is_within_the_bound_and_has_the_cpu_s_bytes(fmt):
    for q in (random_super_blocks(24, 3, fmt, seed=11, finite=True), quantize(torch.randn(130, 1024, generator=seeded(12)), fmt)):
        check_layer(q, fmt, "cuda")
    anything = random_super_blocks(100, 5, fmt, seed=13)
    assert torch.equal(sm.convert_k_quant(anything.cuda(), fmt).q.cpu(), sm.convert_k_quant(anything, fmt).q)


@pytest.mark.gpu
def test_a_gpu_dequantizes_and_converts_without_synchronising():
    blocks = {fmt: random_super_blocks(4, 2, fmt).cuda() for fmt in K_QUANTS}
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for fmt, q in blocks.items():
            sm.dequantize_block(q, fmt)
            if fmt in CONVERTIBLE:
                sm.convert_k_quant(q, fmt)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("fmt", CONVERTIBLE)
def test_every_mode_product_and_descriptor_takes_a_converted_weight(fmt):
    q = quantize(torch.randn(40, 512, generator=seeded(14)), fmt)
    x, want = torch.randn(6, 512, generator=seeded(15)), gguf_dequantize(q, fmt).double()
    packed, converted = sm.pack_block_weight(q, fmt), sm.convert_k_quant(q, fmt)
    for mode in ("auto", "w4a8", "w16a16"):
        assert relative_error(sm.block_linear(x, packed, mode=mode), x.double() @ want.t()) <= 0.02
    product = getattr(sm, f"gemm_{converted.fmt}_q8_1")
    assert torch.equal(product(packed, sm.quantize_q8_1(x)), product(converted.q, sm.quantize_q8_1(x)))
    out = torch.empty(40, 6)
    for weight in (packed, converted.q):
        planned = weight if weight is packed else sm.TensorDesc((40, 512), converted.fmt)
        with sm.create_block_descriptor(sm.Handle("cpu"), out=out, weight=planned, activation=x) as descriptor:
            descriptor.calculate(out, weight, x)
        assert relative_error(out.t(), x.double() @ want.t()) <= 2e-3


# ---- files ----------------------------------------------------------------------------------------------------------------


def write(path: Path, tensors: dict[str, tuple[torch.Tensor, str]]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    for name, (q, fmt) in tensors.items():
        writer.add_tensor(name, q.flatten(-2).numpy(), raw_dtype=gguf.GGMLQuantizationType[fmt.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_of_k_quants_is_loaded_dequantized_and_multiplied(tmp_path):
    tensors = {fmt: (quantize(torch.randn(24, 768, generator=seeded(16)), fmt), fmt) for fmt in K_QUANTS}
    tensors["experts"] = (random_super_blocks(6, 2, "q4_k", seed=17).view(3, 2, 2, 144), "q4_k")
    loaded = sm.load_gguf(write(tmp_path / "k.gguf", tensors))
    assert list(loaded) == list(tensors)
    x = torch.randn(3, 768, generator=seeded(18))
    for name, (q, fmt) in tensors.items():
        tensor = loaded[name]
        assert isinstance(tensor, sm.QuantizedTensor) and tensor.fmt == fmt and torch.equal(tensor.q, q)
        assert tensor.shape == (*q.shape[:-2], 256 * q.shape[-2]) == tensor.dequantize().shape
        assert reference.same_bits(tensor.dequantize(), gguf_dequantize(q, fmt))
        if name in CONVERTIBLE:
            assert tensor.pack().fmt == CONVERTIBLE[fmt]
            assert relative_error(sm.block_linear(x, tensor.pack()), x.double() @ tensor.dequantize().double().t()) <= 2e-3
    with pytest.raises(BadParamError, match="^fmt: expected one of 'q4_0', .*'q5_k', got 'q6_k'; q6_k has a scale for each 16 values"):
        loaded["q6_k"].pack()
    assert sm.convert_k_quant(loaded["experts"].q, "q4_k").shape == (3, 2, 512)


def test_q8_k_is_for_activations_and_refused_in_a_file(tmp_path):
    path = write(tmp_path / "q8.gguf", {"x": (torch.zeros(2, 1, 292, dtype=torch.uint8), "q8_k")})
    known = "Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, F32, F16, BF16, F64, I8, I16, I32, I64"
    with pytest.raises(BadTensorDtypeError, match=f"^x: expected a tensor of type {known}, got Q8_K; skip_unsupported=True loads the others$"):
        sm.load_gguf(path)
    assert sm.load_gguf(path, skip_unsupported=True) == {}


@pytest.mark.parametrize("fmt", K_QUANTS)
def test_a_malformed_file_of_k_quants_is_refused(tmp_path, fmt):
    kind, size, path = int(gguf.GGMLQuantizationType[fmt.upper()]), K_QUANTS[fmt][0], tmp_path / "m.gguf"
    path.write_bytes(malformed_file(tensors=[malformed_tensor(dims=(512, 1), kind=kind)], data=bytes(2 * size)))
    assert sm.load_gguf(path)["t"].shape == (1, 512)
    for dims, length, message in (
        ((320, 1), 4 * size, "expected the first dimension, K, to be a multiple of 256, got dimensions"),
        ((512, 1), 2 * size - 1, f"expected {2 * size} bytes, got {2 * size - 1} up to the end; the file may be truncated"),
    ):
        path.write_bytes(malformed_file(tensors=[malformed_tensor(dims=dims, kind=kind)], data=bytes(length)))
        with pytest.raises(BadParamError, match=message):
            sm.load_gguf(path)


# ---- refusals -------------------------------------------------------------------------------------------------------------

TAKERS = {
    "dequantize_block": ("q", sm.dequantize_block),
    "convert_k_quant": ("q", sm.convert_k_quant),
    "pack_block_weight": ("weight_q", sm.pack_block_weight),
}


@pytest.mark.parametrize(
    ("function", "fmt"), [("dequantize_block", fmt) for fmt in K_QUANTS] + [(name, fmt) for name in list(TAKERS)[1:] for fmt in CONVERTIBLE]
)
def test_what_are_no_super_blocks_is_refused(function, fmt):
    name, call = TAKERS[function]
    size, q = K_QUANTS[fmt][0], random_super_blocks(3, 4, fmt)
    call(q, fmt)
    with pytest.raises(BadParamError, match=f"^{name}: expected a tensor, got None"):
        call(None, fmt)
    with pytest.raises(BadParamError, match=f"^{name}: expected a tensor, got a QuantizedTensor; give its .q, and its .fmt$"):
        call(sm.QuantizedTensor(fmt, q), fmt)
    for dtype in (torch.int8, torch.float16, torch.float32):  # no hint of quantize_block, which makes no K-quants
        with pytest.raises(BadTensorDtypeError, match=f"^{name}: expected uint8, got {dtype}$"):
            call(q.to(dtype), fmt)
    for wrong in (q[..., :-1], q[..., :18], torch.cat((q, q), -1), q[0, 0]):
        with pytest.raises(BadTensorShapeError, match=rf"^{name}: expected \[..., K/256, {size}\] for {fmt}, got \["):
            call(wrong, fmt)
    with pytest.raises(BadTensorShapeError, match=rf"; rows of bytes become blocks by .unflatten\(-1, \(-1, {size}\)\)$"):
        call(q.flatten(-2), fmt)
    spread = torch.zeros(3, 4, 2 * size, dtype=torch.uint8)
    for wrong in (q[:, ::2], spread[..., ::2], spread[..., :size], q.transpose(0, 1), q[:, :1].expand(3, 4, size)):
        with pytest.raises(BadTensorStridesError, match=f"^{name}: expected blocks one after the other, the last two strides {size} and 1"):
            call(wrong, fmt)
    if function == "pack_block_weight":
        with pytest.raises(BadTensorShapeError, match=rf"^weight_q: expected 3 dimensions \[rows, K/256, {size}\], got \[4, {size}\]"):
            call(q[0], fmt)


@pytest.mark.parametrize("fmt", K_QUANTS)
def test_whatever_takes_a_format_of_products_says_what_to_do_with_a_k_quant(fmt):
    q = random_super_blocks(3, 1, fmt)
    advice = (
        "K-quants are converted by pack_block_weight or convert_k_quant" if fmt in CONVERTIBLE else r"multiply with dequantize_block\(q, 'q6_k'\)"
    )
    for spelled in (fmt, fmt.upper()):
        for call in (
            lambda spelled=spelled: sm.quantize_block(torch.ones(256), spelled),
            lambda spelled=spelled: sm.TensorDesc((2, 256), spelled),
            lambda spelled=spelled: sm.PackedBlockWeight(spelled, 3, 256, None, None),
        ):
            with pytest.raises(BadParamError, match=f"^(fmt|dtype): expected .*, got '{spelled}'; .*{advice}"):
                call()
    planned = dict(out=torch.empty(3, 2), activation=torch.ones(2, 256))
    with pytest.raises(BadTensorShapeError, match=rf"^weight: expected blocks .*, got \[3, 1, {K_QUANTS[fmt][0]}\]; .*{advice}"):
        sm.create_block_descriptor(sm.Handle("cpu"), weight=q, **planned)
    with pytest.raises(BadTensorShapeError, match=r"^weight_q: expected \[..., K/32, 20\] for q4_1, got "):
        sm.gemm_q4_1(q, torch.ones(2, 256).half())
    with pytest.raises(BadParamError, match="^fmt: expected one of 'q4_0', .*'q6_k', got '.*'; formats are spelled in lower case$"):
        sm.dequantize_block(q, fmt.upper())


def test_only_q4_k_and_q5_k_are_converted():
    for function, names in ((sm.convert_k_quant, "'q4_k', 'q5_k'"), (sm.pack_block_weight, "'q4_0', 'q4_1', 'q5_0', 'q5_1', 'q8_0', 'q4_k', 'q5_k'")):
        with pytest.raises(BadParamError, match=f"^fmt: expected one of {names}, got 'q6_k'; q6_k has a scale for each 16 values") as error:
            function(random_super_blocks(1, 1, "q6_k"), "q6_k")
        assert "by torch" in str(error.value) and "quantize_block(values, 'q8_0')" in str(error.value)
    for fmt in ("q4_0", "q8_k", "", None, 4, ["q4_k"]):
        with pytest.raises(BadParamError, match="^fmt: expected one of 'q4_k', 'q5_k', got "):
            sm.convert_k_quant(random_super_blocks(1, 1, "q4_k"), fmt)
    with pytest.raises(BadParamError, match="got 'Q5_K'; formats are spelled in lower case$"):
        sm.convert_k_quant(random_super_blocks(1, 1, "q5_k"), "Q5_K")


# ---- torch.compile --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", K_QUANTS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_graph_calls_single_operators(fmt, dynamic):
    torch.compiler.reset()
    seen = []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    def both(q):
        converted = sm.convert_k_quant(q, fmt) if fmt in CONVERTIBLE else None
        return sm.dequantize_block(q, fmt, torch.bfloat16), converted and converted.q

    q = random_super_blocks(5, 3, fmt, seed=19)
    value, converted = torch.compile(both, fullgraph=True, backend=backend, dynamic=dynamic)(q)
    assert reference.same_bits(value, sm.dequantize_block(q, fmt, torch.bfloat16))
    assert converted is None or torch.equal(converted, sm.convert_k_quant(q, fmt).q)
    operators = [name for name in seen if name.startswith("scaled_mm.")]
    assert operators == [*(["scaled_mm.convert_k_quant.default"] if fmt in CONVERTIBLE else []), "scaled_mm.dequantize_block.default"]


def test_inductor_compiles_what_loads_packs_and_multiplies():
    torch.compiler.reset()
    q, x = quantize(torch.randn(16, 256, generator=seeded(20)), "q5_k"), torch.randn(3, 256, generator=seeded(21))

    def layer(q, x):
        return sm.dequantize_block(q, "q5_k") + 1, sm.block_linear(x, sm.pack_block_weight(q, "q5_k"))

    value, y = torch.compile(layer, fullgraph=True)(q, x)
    assert torch.equal(value, gguf_dequantize(q, "q5_k") + 1)
    assert torch.equal(y, sm.block_linear(x, sm.pack_block_weight(q, "q5_k")))


def test_the_operators_pass_torch_s_own_checks_and_refuse_as_the_functions_do(device):
    raw = torch.ops.scaled_mm
    for fmt in K_QUANTS:
        torch.library.opcheck(raw.dequantize_block.default, (random_super_blocks(2, 2, fmt, finite=True).to(device), fmt, torch.float16))
    for fmt in CONVERTIBLE:
        torch.library.opcheck(raw.convert_k_quant.default, (random_super_blocks(2, 2, fmt).to(device), fmt))
    for q in (random_super_blocks(2, 2, "q4_k").to(device), random_super_blocks(2, 2, "q4_k").to("meta")):
        with pytest.raises(BadParamError, match="^fmt: expected one of 'q4_k', 'q5_k', got 'q6_k'"):
            raw.convert_k_quant(q, "q6_k")
        with pytest.raises(BadTensorShapeError, match=r"^q: expected \[..., K/256, 176\] for q5_k, got "):
            raw.convert_k_quant(q, "q5_k")
