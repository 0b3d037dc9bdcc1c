"""What the GGUF functions refuse: a typed error that names the argument, what was expected and what came."""

from __future__ import annotations

import pytest
import torch
from gguf_data import ALL, BLOCK_BYTES, LAYOUTS, WEIGHTS, gguf_dequantize, gguf_quantize, random_blocks

import scaled_mm as sm
from scaled_mm.errors import (
    BadParamError,
    BadTensorDeviceError,
    BadTensorDtypeError,
    BadTensorShapeError,
    BadTensorStridesError,
    ScaledMMError,
)
from scaled_mm.gguf_formats import FORMATS

NAMES = ", ".join(map(repr, ALL))


def test_the_formats_are_those_of_the_table():
    assert {name: f.block_bytes for name, f in FORMATS.items()} == BLOCK_BYTES
    assert [name for name, f in FORMATS.items() if f.is_weight] == list(WEIGHTS)
    assert {name: (f.bits, f.zero, f.second) for name, f in FORMATS.items()} == {
        name: (f.bits, f.zero or 0, "m" if f.minimum is not None else "s" if f.sum is not None else None) for name, f in LAYOUTS.items()
    }


def test_the_formats_without_an_oracle_are_those_that_the_gguf_package_lacks():
    """Only they may go without it. The package has a name for q8_1, and no arithmetic."""

    def knows(fmt: str) -> bool:
        try:
            gguf_dequantize(random_blocks(1, 1, fmt), fmt), gguf_quantize(torch.ones(1, 32), fmt)
        except (KeyError, NotImplementedError):
            return False
        return True

    assert {fmt: LAYOUTS[fmt].oracle for fmt in ALL} == {fmt: knows(fmt) for fmt in ALL}


def test_a_level_for_0_leaves_room_on_both_sides():
    """Rule "absmax" uses the levels 1 to 2 zero - 1, and divides by zero - 1."""
    for one in FORMATS.values():
        assert one.zero == 0 or (2 <= one.zero <= 2 ** (one.bits - 1) and one.second is None and not one.signed), one


@pytest.mark.parametrize("fmt", ["q6_9", "Q4_0", "", None, 4, ["q4_0"]])
def test_an_unknown_format_is_refused(fmt):
    q = torch.zeros(1, 1, 18, dtype=torch.uint8)
    k_quants = "'q4_k', 'q5_k', 'q6_k'"
    for call, names in (
        (lambda: sm.quantize_block(torch.ones(32), fmt), NAMES),
        (lambda: sm.dequantize_block(q, fmt), f"{NAMES}, {k_quants}"),
        (lambda: sm.pack_block_weight(q, fmt), f"{NAMES}, {k_quants}"),
    ):
        with pytest.raises(BadParamError, match=f"^fmt: expected one of {names}, got ") as error:
            call()
        assert str(error.value).endswith("; formats are spelled in lower case") == (fmt == "Q4_0")


def test_a_format_in_capitals_is_told_how_it_is_spelled():
    with pytest.raises(BadParamError, match=f"^fmt: expected one of {NAMES}, got 'Q8_1'; formats are spelled in lower case$"):
        sm.quantize_block(torch.ones(32), "Q8_1")
    with pytest.raises(BadParamError, match="^dtype: expected a torch.dtype or a GGUF format .*, got 'Q4_0'; formats are spelled in lower case$"):
        sm.TensorDesc((2, 32), "Q4_0")


@pytest.mark.parametrize("rule", ["max", "ABSMAX", None, 0])
def test_an_unknown_rule_is_refused(rule):
    for fmt in ALL:
        with pytest.raises(BadParamError, match="^rule: expected one of 'absmax', 'ggml', got "):
            sm.quantize_block(torch.ones(32), fmt, rule)


@pytest.mark.parametrize("fmt", ALL)
def test_what_cannot_be_quantized_is_refused(device, fmt):
    with pytest.raises(BadParamError, match="^x: expected a tensor, got list"):
        sm.quantize_block([1.0] * 32, fmt)
    with pytest.raises(BadParamError, match="^x: expected a strided tensor, got layout torch.sparse_coo"):
        sm.quantize_block(torch.ones(1, 32, device=device).to_sparse(), fmt)
    for dtype in (torch.float64, torch.int8, torch.uint8):
        with pytest.raises(BadTensorDtypeError, match=f"^x: expected float16, bfloat16 or float32, got {dtype}"):
            sm.quantize_block(torch.ones(32, device=device).to(dtype), fmt)
    for shape in ((), (31,), (33,), (32, 16), (2, 1000)):
        with pytest.raises(BadTensorShapeError, match=r"^x: expected \[..., K\] with K a multiple of 32, got \["):
            sm.quantize_block(torch.ones(shape, device=device), fmt)


def test_the_raw_operators_refuse_as_the_functions_do(device):
    raw, x = torch.ops.scaled_mm, torch.ones(3, 32, device=device)
    for made in (x, x.to("meta")):
        with pytest.raises(BadParamError, match=f"^fmt: expected one of {NAMES}, got 'q6_9'"):
            raw.quantize_block(made, "q6_9", "absmax")
        with pytest.raises(BadParamError, match="^rule: expected one of 'absmax', 'ggml', got 'max'"):
            raw.quantize_block(made, "q4_0", "max")
        with pytest.raises(BadTensorDtypeError, match="^x: expected float16, bfloat16 or float32, got torch.int8"):
            raw.quantize_block(made.to(torch.int8), "q4_0", "absmax")
        with pytest.raises(BadTensorShapeError, match=r"^x: expected \[..., K\] with K a multiple of 32, got \[3, 31\]"):
            raw.quantize_block(made[:, 1:], "q4_0", "absmax")
        q = raw.quantize_block(made, "q4_0", "absmax")
        with pytest.raises(BadTensorShapeError, match=r"^q: expected \[..., K/32, 20\] for q4_1, got "):
            raw.dequantize_block(q, "q4_1", torch.float32)
        with pytest.raises(BadTensorDtypeError, match="^q: expected uint8, got torch.int8"):
            raw.dequantize_block(q.to(torch.int8), "q4_0", torch.float32)
        with pytest.raises(BadTensorDtypeError, match="^dtype: expected torch.float32, .*, got torch.float64"):
            raw.dequantize_block(q, "q4_0", torch.float64)


def test_a_packed_weight_goes_to_a_device_and_nowhere_else():
    packed = sm.pack_block_weight(torch.zeros(2, 1, 18, dtype=torch.uint8), "q4_0")
    for wrong in ("foo", None, torch.float16, 1.5):
        with pytest.raises(BadParamError, match="^device: expected a device such as cuda:0 or cpu, got "):
            packed.to(wrong)
    assert packed.to("cpu").device == packed.to(torch.device("cpu")).device == torch.device("cpu")
    assert packed.to("meta").device.type == "meta"


BLOCK_TAKERS = {
    "dequantize_block": ("q", lambda q, fmt: sm.dequantize_block(q, fmt)),
    "pack_block_weight": ("weight_q", lambda q, fmt: sm.pack_block_weight(q, fmt)),
    "gemm_q8_1": ("weight_q", lambda q, fmt: getattr(sm, f"gemm_{fmt}_q8_1")(q, random_blocks(2, 4, "q8_1"))),
    "gemm": ("weight_q", lambda q, fmt: getattr(sm, f"gemm_{fmt}")(q, torch.ones(2, 128).half())),
}


@pytest.mark.parametrize("fmt", WEIGHTS)
@pytest.mark.parametrize("function", BLOCK_TAKERS)
def test_what_are_no_blocks_is_refused(fmt, function):
    name, call = BLOCK_TAKERS[function]
    size = BLOCK_BYTES[fmt]
    q = random_blocks(3, 4, fmt, finite=True)
    call(q, fmt)
    with pytest.raises(BadParamError, match=f"^{name}: expected a tensor, got None"):
        call(None, fmt)
    for dtype, hint in ((torch.int8, ""), (torch.float16, "; sm.quantize_block makes blocks"), (torch.float32, "; sm.quantize_block makes blocks")):
        with pytest.raises(BadTensorDtypeError, match=f"^{name}: expected uint8, got {dtype}{hint}$"):
            call(q.to(dtype), fmt)
    for wrong in (q[..., :-1], q[..., :2], torch.cat((q, q), -1), q.flatten(-2)[:, None, :-2]):
        with pytest.raises(BadTensorShapeError, match=rf"^{name}: expected \[..., K/32, {size}\] for {fmt}, got \["):
            call(wrong, fmt)
    with pytest.raises(BadTensorShapeError, match=f"^{name}: expected "):
        call(q[0, 0], fmt)
    hint = rf"; rows of bytes become blocks by .unflatten\(-1, \(-1, {size}\)\)$"
    with pytest.raises(BadTensorShapeError, match=rf"^{name}: expected \[..., K/32, {size}\] for {fmt}, got \[3, {4 * size}\]{hint}"):
        call(q.flatten(-2), fmt)
    call(q.flatten(-2).unflatten(-1, (-1, size)), fmt)
    with pytest.raises(BadTensorShapeError, match=rf"got \[3, {4 * size - 1}\]$"):  # no rows of whole blocks
        call(q.flatten(-2)[:, 1:], fmt)
    spread = torch.zeros(3, 4, 2 * size, dtype=torch.uint8)
    for wrong in (q[:, ::2], spread[..., ::2], spread[..., :size], q.transpose(0, 1), q[:, :1].expand(3, 4, size)):
        with pytest.raises(BadTensorStridesError, match=f"^{name}: expected blocks one after the other, the last two strides {size} and 1"):
            call(wrong, fmt)


@pytest.mark.parametrize("function", BLOCK_TAKERS)
def test_a_tensor_of_a_gguf_file_is_told_to_give_its_blocks(function):
    name, call = BLOCK_TAKERS[function]
    tensor = sm.QuantizedTensor("q4_0", random_blocks(3, 4, "q4_0", finite=True))
    with pytest.raises(BadParamError, match=f"^{name}: expected a tensor, got a QuantizedTensor; give its .q, and its .fmt$"):
        call(tensor, "q4_0")
    with pytest.raises(
        BadParamError, match="^packed: expected what pack_block_weight returns, got a QuantizedTensor; give its .q, and its .fmt, to pack_"
    ):
        sm.block_linear(torch.ones(2, 128), tensor)
    call(tensor.q, tensor.fmt)
    sm.block_linear(torch.ones(2, 128), sm.pack_block_weight(tensor.q, tensor.fmt))


@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8, "float32", None])
def test_a_dtype_that_values_cannot_have_is_refused(dtype):
    with pytest.raises(BadTensorDtypeError, match="^dtype: expected torch.float32, torch.float16, torch.bfloat16, got "):
        sm.dequantize_block(random_blocks(1, 1, "q4_0"), "q4_0", dtype)


def test_activations_are_no_weight():
    with pytest.raises(BadParamError, match="^fmt: expected the format of a weight, one of 'q4_0', .* got 'q8_1'"):
        sm.pack_block_weight(random_blocks(2, 2, "q8_1"), "q8_1")


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_operands_that_do_not_go_together_are_refused(fmt):
    weight_q, activation_q = random_blocks(3, 4, fmt), random_blocks(2, 4, "q8_1")
    gemm_q8_1, gemm = getattr(sm, f"gemm_{fmt}_q8_1"), getattr(sm, f"gemm_{fmt}")
    with pytest.raises(BadTensorShapeError, match=r"^activation_q: expected K = 128 as in weight_q \[M, K\] = \[3, 128\], got K = 96"):
        gemm_q8_1(weight_q, activation_q[:, :3])
    with pytest.raises(BadTensorShapeError, match=r"^activation_q: expected \[..., K/32, 36\] for q8_1, got \[2, 4, 34\]"):
        gemm_q8_1(weight_q, random_blocks(2, 4, "q8_0"))
    with pytest.raises(BadTensorStridesError, match="^activation_q: expected blocks one after the other"):
        gemm_q8_1(weight_q, random_blocks(2, 8, "q8_1")[:, ::2])
    with pytest.raises(BadTensorDtypeError, match="^activation_q: expected uint8, got torch.float32; sm.quantize_q8_1 makes them$"):
        gemm_q8_1(weight_q, torch.ones(2, 128))
    for two in (weight_q[0], weight_q[None]):
        with pytest.raises(BadTensorShapeError, match=r"^weight_q: expected 3 dimensions \[rows, K/32, "):
            gemm_q8_1(two, activation_q)
    with pytest.raises(BadTensorShapeError, match="^activation: expected K = 128 as in weight_q .* got K = 96"):
        gemm(weight_q, torch.ones(2, 96).half())
    with pytest.raises(BadTensorShapeError, match=r"^activation: expected 2 dimensions \[N, K\], got \[128\]"):
        gemm(weight_q, torch.ones(128).half())
    for dtype, hint in ((torch.float32, "; sm.block_linear takes float32"), (torch.float64, ""), (torch.uint8, "")):
        with pytest.raises(BadTensorDtypeError, match=f"^activation: expected float16 or bfloat16, got {dtype}{hint}$"):
            gemm(weight_q, torch.ones(2, 128, dtype=dtype))
    with pytest.raises(BadParamError, match="^activation: expected a tensor, got None"):
        gemm(weight_q, None)


@pytest.mark.parametrize("letter, actual", [("M", 3), ("N", 2), ("K", 128)])
def test_sizes_that_are_not_those_of_the_operands_are_refused(letter, actual):
    weight_q, activation_q = random_blocks(3, 4, "q4_0"), random_blocks(2, 4, "q8_1")
    x = torch.ones(2, 128).half()
    for call in (lambda **s: sm.gemm_q4_0_q8_1(weight_q, activation_q, **s), lambda **s: sm.gemm_q4_0(weight_q, x, **s)):
        with pytest.raises(BadTensorShapeError, match=f"^{letter}: expected {actual}, the one of the operands, got {actual + 1}"):
            call(**{letter: actual + 1})
        for wrong in (float(actual), True, "3"):
            with pytest.raises(BadParamError, match=f"^{letter}: expected an integer or None, got "):
                call(**{letter: wrong})


def test_a_layer_refuses_what_it_cannot_compute():
    packed = sm.pack_block_weight(random_blocks(3, 2, "q4_0", finite=True), "q4_0")
    x = torch.ones(2, 64).half()
    with pytest.raises(BadParamError, match="^packed: expected what pack_block_weight returns, got a Tensor"):
        sm.block_linear(x, packed.unpack())
    with pytest.raises(BadParamError, match="^mode: expected one of 'auto', 'w4a8', 'w4a16', 'w16a16', got 'w8a8'"):
        sm.block_linear(x, packed, mode="w8a8")
    with pytest.raises(BadParamError, match="^x: expected a tensor, got None"):
        sm.block_linear(None, packed)
    with pytest.raises(BadTensorDtypeError, match="^x: expected float16, bfloat16 or float32, got torch.float64"):
        sm.block_linear(x.double(), packed)
    with pytest.raises(BadTensorDtypeError, match="^x: expected float16 or bfloat16 in mode 'w4a16', got torch.float32"):
        sm.block_linear(x.float(), packed, mode="w4a16")
    for shape in ((2, 32), (64, 2), ()):
        with pytest.raises(BadTensorShapeError, match=r"^x: expected \[..., K\] with K = 64 as packed has, got \["):
            sm.block_linear(torch.ones(shape), packed)
    with pytest.raises(BadTensorDtypeError, match="^out_dtype: expected torch.float16, torch.bfloat16, torch.float32, got torch.int32"):
        sm.block_linear(x, packed, out_dtype=torch.int32)
    with pytest.raises(BadTensorDtypeError, match="^bias: expected torch.float16 as out_dtype, or torch.float32, got torch.bfloat16"):
        sm.block_linear(x, packed, torch.ones(3).bfloat16())
    for shape in ((4,), (3, 1), (1,), (1, 1, 3)):
        with pytest.raises(BadTensorShapeError, match=r"^bias: expected \[3\] or \[1, 3\], got \["):
            sm.block_linear(x, packed, torch.ones(shape))
    with pytest.raises(BadParamError, match="^bias: expected a tensor, got list"):
        sm.block_linear(x, packed, [1.0, 2.0, 3.0])


def test_operands_on_other_devices_are_refused_before_anything_is_computed():
    weight_q = random_blocks(3, 2, "q4_0")
    with pytest.raises(BadTensorDeviceError, match="^activation_q: expected a tensor on cpu, as weight_q, got one on meta"):
        sm.gemm_q4_0_q8_1(weight_q, random_blocks(2, 2, "q8_1").to("meta"))
    with pytest.raises(BadTensorDeviceError, match="^x: expected a tensor on cpu, as packed, got one on meta"):
        sm.block_linear(torch.ones(1, 64, device="meta"), sm.pack_block_weight(weight_q, "q4_0"))


def test_every_refusal_is_one_of_the_package():
    with pytest.raises(ScaledMMError):
        sm.quantize_block(torch.ones(5), "q4_0")
    with pytest.raises(ValueError, match="multiple of 32"):
        sm.quantize_block(torch.ones(5), "q4_0")
