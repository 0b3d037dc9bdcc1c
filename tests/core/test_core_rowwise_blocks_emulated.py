"""The device code of rope, of groupwise INT8 quantization and of the GGUF quantizers, run by coroutines (emulated/gpu.h), against the torch
operations on the CPU: no GPU needed."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from pathlib import Path

import pytest
import torch
from core.test_core_block_scaled_emulated import cuda_include

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.gguf_formats import FORMATS, RULES
from scaled_mm.jit import toolchain
from scaled_mm.jit.paths import csrc_dir, include_dir
from scaled_mm.kernels.dtypes import C_DTYPES

HERE = Path(__file__).resolve().parent
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
NAN, INF = float("nan"), float("inf")
DIMS = ("token", "weight")  # scaledMMInt8BlockDim_t


def code(dtype: torch.dtype) -> int:
    return C_DTYPES[str(dtype).removeprefix("torch.")]


def ints(*values: int):
    return (ctypes.c_int64 * len(values))(*values)


def pointers(*tensors: torch.Tensor | None):
    return (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))


def strides(*tensors: torch.Tensor):
    return ints(*(0 if size == 1 else stride for t in tensors for size, stride in zip(t.shape, t.stride())))


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    cxx, include = toolchain.find_cxx(), cuda_include()
    if cxx is None or include is None:
        pytest.skip("needs a C++ compiler and the headers of a CUDA toolkit")
    target = tmp_path_factory.mktemp("emulated") / "blocks.so"
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-Wall", "-Wno-unknown-pragmas"]
    includes = [f"-I{HERE / 'emulated'}", f"-I{HERE}", f"-I{csrc_dir()}", f"-I{include_dir()}", f"-isystem{include}"]
    subprocess.run([str(cxx), *flags, *includes, str(HERE / "rowwise_blocks_emulated.cpp"), "-o", str(target)], check=True, timeout=600)
    return ctypes.CDLL(str(target))


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    return reference.same_bits(got, expected) if got.is_floating_point() else torch.equal(got, expected)


def unaligned(t: torch.Tensor) -> torch.Tensor:
    return torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape)


def spaced(t: torch.Tensor) -> torch.Tensor:
    return torch.stack((t, torch.full_like(t, NAN)), -1).flatten(-2)[..., ::2]


def difficult(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Several magnitudes, with zeros of both signs, and a few elements that are subnormal, huge, infinite or NaN."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.empty(shape).uniform_(-12, 8, generator=generator))
    special = torch.tensor([0.0, -0.0, NAN, INF, -INF, 6e-8, -1e-39, 65504.0, -3e38])
    chosen = torch.rand(shape, generator=generator) < 0.05
    return torch.where(chosen, special[torch.randint(len(special), shape, generator=generator)], x).to(dtype)


# ---- rope -------------------------------------------------------------------------------------------------------------


def rope(library, query, key, cos, sin, interleaved: bool, multiprocessors: int = 1) -> tuple[int, torch.Tensor, torch.Tensor]:
    """The pairs of a thread, and what the kernel writes."""
    out, out_key = (torch.full(t.shape, 77, dtype=t.dtype) for t in (query, key))
    tokens, heads, d = query.shape
    pairs = library.emulate_rope(
        code(query.dtype),
        interleaved,
        multiprocessors,
        ints(tokens, heads, key.shape[1], d, cos.shape[1]),
        pointers(query, key, out, out_key, cos, sin),
        strides(query, key, out, out_key, cos, sin),
        (ctypes.c_int * 2)(code(cos.dtype), code(sin.dtype)),
    )
    return pairs, out, out_key


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rope(library, dtype, interleaved):
    angle_dtypes = itertools.cycle(itertools.product(FLOATS, FLOATS))
    for tokens, heads, d in itertools.product((1, 3), ((1, 1), (32, 8), (3, 0), (0, 2)), (2, 6, 16, 128, 130, 144)):
        query, key = (difficult((tokens, h, d), dtype, d + h) for h in heads)
        for width, (of_cos, of_sin) in zip((d, d // 2), angle_dtypes):
            cos, sin = difficult((tokens, width), of_cos, 1), difficult((tokens, width), of_sin, 2)
            expected = sm.rope(query, key, cos, sin, interleaved=interleaved)
            pairs, *got = rope(library, query, key, cos, sin, interleaved)
            assert pairs == (8 if d % 16 == 0 else 1)
            assert all(map(same, got, expected)), (tokens, heads, d, width)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rope_takes_any_strides(library, dtype, interleaved):
    query, key, cos, sin = (
        difficult((5, 4, 32), dtype, 1),
        difficult((5, 2, 32), dtype, 2),
        difficult((5, 32), dtype, 3),
        difficult((5, 16), dtype, 4),
    )
    both = torch.cat((query, key), 1)
    of_heads = query.transpose(0, 1).contiguous().transpose(0, 1)  # [heads, tokens, D] in memory
    cases = {
        "parts of one tensor": (both[:, :4], both[:, 4:], cos, cos, 8),
        "heads before tokens": (of_heads, key, sin, sin, 8),
        "spaced query": (spaced(query), key, cos, cos, 1),
        "unaligned key": (query, unaligned(key), cos, cos, 1),
        "unaligned cos": (query, key, unaligned(cos), cos, 1),
        "spaced sin": (query, key, sin, spaced(sin), 1),
        "one angle for all tokens": (query, key, cos[:1].expand(5, 32), sin[:1].expand(5, 16).repeat(1, 2), 8),
    }
    for name, (*operands, expected_pairs) in cases.items():
        pairs, *got = rope(library, *operands, interleaved)
        assert pairs == expected_pairs, name
        assert all(map(same, got, sm.rope(*operands, interleaved=interleaved))), name


def test_rope_of_many_tokens_and_of_long_heads(library):
    for tokens, heads, d, multiprocessors in ((16, (40, 8), 128, 1), (17, (5, 3), 2048, 100), (2, (2, 1), 2064, 100), (2, (1, 1), 300, 100)):
        query, key = (difficult((tokens, h, d), torch.bfloat16, h) for h in heads)
        cos, sin = difficult((tokens, d // 2), torch.float32, 1), difficult((tokens, d // 2), torch.float32, 2)
        for interleaved in (False, True):
            _, *got = rope(library, query, key, cos, sin, interleaved, multiprocessors)
            assert all(map(same, got, sm.rope(query, key, cos, sin, interleaved=interleaved))), (tokens, d)


# ---- groupwise INT8 ---------------------------------------------------------------------------------------------------


def int8_block(
    library, x: torch.Tensor, dim: str, padding: int = 0, truncates: bool = False, block: int = 128, expert_offsets: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    b, n, k = x.shape
    poisoned = torch.full((b, n, k + padding), 77, dtype=torch.int8)
    q = poisoned[..., :k]
    scale = torch.full((b, n if dim == "token" else -(-n // block), -(-k // block)), -7.0)
    function = DIMS.index(dim) + 2 * truncates + 4 * (block == 64)
    sizes = ints(b, n, k, 0 if expert_offsets is None else expert_offsets.numel())
    flags = library.emulate_int8_block(code(x.dtype), function, sizes, pointers(x, q, scale, expert_offsets), strides(x, q, scale))
    assert flags >= 0 and (poisoned[..., k:] == 77).all(), "wrote past the end of a row"
    return q, scale


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_groupwise_quantization(library, dtype, dim):
    for rows, k in ((1, 1), (3, 128), (5, 129), (2, 700), (130, 264), (257, 16)):
        plain = torch.randn(1, rows, k, generator=torch.Generator().manual_seed(k)).to(dtype)
        ties = (torch.arange(rows * k).view(1, rows, k) % 509 - 254).to(dtype) * 0.5  # and scales of 1 where a block has a 127
        for x in (plain, ties, plain * 0, difficult((1, rows, k), dtype, k), unaligned(plain), spaced(plain)):
            got, padded = int8_block(library, x, dim), int8_block(library, x, dim, padding=3)
            assert all(map(same, got, sm.quantize_int8_block(x, dim))), (rows, k)
            assert all(map(same, padded, got))
            assert all(map(same, int8_block(library, x, dim, truncates=True), sm.quantize_int8_block(x, dim, rounding="truncate"))), (rows, k)
            small = int8_block(library, x, dim, padding=3, block=64)
            assert all(map(same, small, sm.quantize_int8_block(x, dim, block_size=64))), (rows, k)


@pytest.mark.parametrize("block", [64, 128])
def test_rows_of_no_expert_are_not_quantized(library, block):
    x = torch.randn(1, 30, 300, generator=torch.Generator().manual_seed(0))
    q, scale = sm.quantize_int8_block(x[0], block_size=block)
    for end in (0, 13, 30, 31):
        offsets = torch.tensor([2, 2, end], dtype=torch.int32)
        got, scales = (t[0] for t in int8_block(library, x, "token", block=block, expert_offsets=offsets))
        assert same(got[:end], q[:end]) and same(scales[:end], scale[:end])
        assert (got[end:] == 77).all() and (scales[end:] == -7).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_groupwise_quantization_of_a_batch_with_any_strides(library, dtype):
    x = difficult((3, 140, 160), dtype, 5)
    for view in (x, x.transpose(1, 2), x.transpose(0, 1)[:5], x[::2], x[:1].expand(2, 140, 160), x[..., 1:]):
        assert all(map(same, int8_block(library, view, "weight"), sm.quantize_int8_block(view, "weight")))


# ---- GGUF -------------------------------------------------------------------------------------------------------------


def gguf_quantize(library, x: torch.Tensor, fmt: str, rule: str, shift: int = 0) -> torch.Tensor:
    """shift: of the output's address, from one that is aligned."""
    rows, k = x.shape
    size = rows * k // 32 * FORMATS[fmt].block_bytes
    memory = torch.full((size + 64,), 77, dtype=torch.uint8)
    first = shift + -memory.data_ptr() % 16
    q = memory[first : first + size]
    flags = library.emulate_gguf_quantize(code(x.dtype), FORMATS[fmt].code, RULES.index(rule), ints(rows, k), pointers(x, q), strides(x))
    assert flags >= 0 and (flags & 2 != 0) == (shift == 0)
    assert (memory[:first] == 77).all() and (memory[first + size :] == 77).all(), "wrote beside the blocks"
    return q.view(rows, k // 32, FORMATS[fmt].block_bytes)


def inputs():
    """(what they are, [rows, 32 or more]): of one magnitude, of every exponent, constant, one-sided; zeros, NaN and infinities."""
    generator = torch.Generator().manual_seed(1)
    plain = torch.randn(9, 96, generator=generator)
    yield from {"normal": plain, "positive": plain.abs() + 3, "negative": -plain.abs() - 3, "few values": (plain * 2).round() / 2}.items()
    for exponent in (-149, -140, -128, -126, -24, -14, 0, 15, 20, 127):
        yield f"around 2^{exponent}", torch.randn(6, 32, generator=generator, dtype=torch.float64).mul(2.0**exponent).float()
    yield "constant", torch.tensor([1.0, -3.0, 1e-45, -1e-38, 3e38, 65504.0]).view(6, 1).repeat(1, 32)
    yield "of both extremes", torch.cat((plain[:, :30], torch.tensor([3.4e38, -3.4e38]).repeat(9, 1)), 1)
    for seed in range(3):
        yield f"difficult {seed}", difficult((16, 64), torch.float32, seed)
    zeros = torch.zeros(6, 32)
    zeros[0, 3], zeros[1], zeros[2, ::2], zeros[3] = -0.0, -0.0, -0.0, 2.5
    zeros[4, 31], zeros[5, 30], zeros[5, 2] = -4.0, -4.0, 4.0
    yield "zeros of both signs", zeros
    for value in (NAN, -NAN, INF, -INF):
        x = torch.randn(32, 32, generator=generator)
        x[torch.arange(32), torch.arange(32)] = value  # at every place
        yield f"one {value}", x
    nan = torch.tensor([0xFFC00000 - 2**32], dtype=torch.int32).view(torch.float32)
    yield "negative NaN", torch.cat((torch.ones(31), nan)).view(1, 32)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_gguf_quantizers(library, fmt, dtype):
    for name, values in inputs():
        x = values.to(dtype)
        for rule in RULES if FORMATS[fmt].has_rules else RULES[:1]:
            assert torch.equal(gguf_quantize(library, x, fmt, rule), sm.quantize_block(x, fmt, rule)), (name, rule)


@pytest.mark.parametrize("fmt", FORMATS)
def test_gguf_quantizers_round_ties_as_the_definition(library, fmt):
    for scale in (1.0, 0.0123, 1.0 / 3.0):
        steps = torch.cat([torch.arange(32 * i, 32 * i + 32) for i in range(-4, 4)]).view(-1, 32) / 2
        x = steps * scale
        x[:, 0] = torch.tensor([127.0, 7.0, 8.0, 15.0, 16.0, -16.0, 31.0, 0.0]) * scale
        near = torch.stack([torch.nextafter(x, torch.full_like(x, end)) for end in (-INF, INF)] + [x]).view(-1, 32)
        for rule in RULES:
            assert torch.equal(gguf_quantize(library, near, fmt, rule), sm.quantize_block(near, fmt, rule))


@pytest.mark.parametrize("fmt", FORMATS)
def test_gguf_quantizers_take_every_number_of_blocks_and_any_strides(library, fmt):
    for rows, k in ((1, 32), (1, 64), (7, 32), (3, 96), (1, 2048), (13, 160), (66, 32)):
        x = difficult((rows, k), torch.bfloat16, k)
        expected = sm.quantize_block(x, fmt, "ggml")
        for view, shift in ((x, 0), (x, 2), (x, 1), (unaligned(x), 0), (spaced(x), 0), (x.t().contiguous().t(), 0)):
            assert torch.equal(gguf_quantize(library, view, fmt, "ggml", shift), expected), (rows, k, shift)
