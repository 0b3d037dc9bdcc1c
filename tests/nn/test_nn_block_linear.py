"""`BlockLinear`: the bits of `block_linear`, one copy of the weight, and GGUF blocks in every state_dict and pickle."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import scaled_mm as sm
from scaled_mm import nn
from scaled_mm.gguf_formats import WEIGHT_FORMATS

N, K = 70, 96
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def blocks(fmt: str, n: int = N, k: int = K) -> torch.Tensor:
    return sm.quantize_block(torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)), fmt)


def layer(fmt: str, bias: bool = True, **options) -> nn.BlockLinear:
    return nn.BlockLinear.from_blocks(blocks(fmt), fmt, torch.linspace(-1, 1, N) if bias else None, **options)


def activations(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 3, K, generator=torch.Generator().manual_seed(0)).to(dtype)


def bits(layer: nn.BlockLinear) -> torch.Tensor:
    return layer(activations().to(layer.packed.device)).cpu()


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["auto", "w4a8", "w16a16"])
def test_it_has_the_bits_of_block_linear(fmt, dtype, mode):
    made, x = layer(fmt, mode=mode), activations(dtype)
    y = made(x)
    assert torch.equal(y, sm.block_linear(x, sm.pack_block_weight(blocks(fmt), fmt), made.bias, mode=mode))
    assert y.shape == (2, 3, N) and y.dtype is dtype and not y.requires_grad
    assert made(x[0, 0]).shape == (N,)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_of_another_16_bit_dtype_is_added_in_float32(dtype):
    made = nn.BlockLinear.from_blocks(blocks("q4_0"), "q4_0", torch.linspace(-1, 1, N).bfloat16())
    x = activations(dtype)
    assert torch.equal(made(x), sm.block_linear(x, made.packed, made.bias.float()))


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
def test_the_buffers_are_the_only_copy_of_the_weight(fmt):
    made = layer(fmt)
    assert sum(buffer.nbytes for buffer in made.buffers()) == made.packed.nbytes == blocks(fmt).nbytes
    assert {id(buffer) for buffer in made.buffers()} == {id(part) for part in made.packed.fields if part is not None}
    assert [name for name, _ in made.named_parameters()] == ["bias"] and not made.bias.requires_grad


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
def test_copies_pickles_and_state_dicts_keep_its_bits(fmt, tmp_path):
    made = layer(fmt)
    state = made.state_dict()
    assert list(state) == ["weight", "bias"] and torch.equal(state["weight"], blocks(fmt))
    loaded = nn.BlockLinear(K, N, fmt)
    assert loaded.load_state_dict(state) == ([], [])
    assigned = nn.BlockLinear(K, N, fmt, device="meta")
    assigned.load_state_dict(state, assign=True)
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    found = loaded, assigned, copy.deepcopy(made), copy.copy(made), pickle.loads(pickle.dumps(made)), torch.load(file, weights_only=False)
    assert all(torch.equal(bits(one), bits(made)) and one.fmt == fmt for one in found)


def test_a_copy_has_memory_of_its_own():
    made = layer("q8_0")
    before = bits(made)
    copy.deepcopy(made).weight_levels.zero_()
    assert torch.equal(bits(made), before)


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
def test_casts_and_shared_memory_do_not_touch_the_weight(fmt):
    made = layer(fmt)
    before = made.state_dict()["weight"]
    assert made.half().bias.dtype is torch.float16 and made.to(torch.bfloat16).bias.dtype is torch.bfloat16
    made.double().float().share_memory()
    assert torch.equal(made.state_dict()["weight"], before) and made.weight_d.dtype is torch.float16 and made.weight_d.is_shared()


def test_memory_of_a_meta_layer_is_made_and_filled():
    made, state = layer("q5_1").to("meta"), layer("q5_1").state_dict()
    assert made.packed.device.type == "meta" and made(activations().to("meta")).shape == (2, 3, N)
    made.to_empty(device="cpu").load_state_dict(state)
    assert torch.equal(bits(made), bits(layer("q5_1")))


@pytest.mark.parametrize("fmt", ["q4_1", "q8_0"])
def test_it_compiles_as_one_graph(fmt):
    made = layer(fmt)
    compiled = torch.compile(made, fullgraph=True)
    assert torch.equal(compiled(activations()), bits(made))


def test_its_description_has_the_format():
    expected = "in_features=96, out_features=70, fmt=q4_1, bias=False, mode=w4a8"
    assert layer("q4_1", bias=False, mode="w4a8").extra_repr() == expected


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: nn.BlockLinear(33, 4, "q4_0"), sm.BadParamError, "in_features: expected a multiple of 32, got 33"),
        (lambda: nn.BlockLinear(32, 4, "q8_1"), sm.BadParamError, "fmt: expected the format of a weight"),
        (lambda: nn.BlockLinear(32, 4, "q4_0", mode="w8a8"), sm.BadParamError, "mode: expected one of 'auto'"),
        (lambda: nn.BlockLinear.from_blocks(blocks("q4_0"), "q4_1"), sm.BadTensorShapeError, "weight_q: expected"),
        (
            lambda: nn.BlockLinear.from_blocks(blocks("q4_0"), "q4_0", torch.zeros(N - 1)),
            sm.BadTensorShapeError,
            r"bias: expected \[70\], got \[69\]",
        ),
        (lambda: nn.BlockLinear.from_blocks(blocks("q4_0"), "q4_0", torch.zeros(N).double()), sm.BadTensorDtypeError, "bias: expected float16"),
        (
            lambda: nn.BlockLinear.from_blocks(blocks("q4_0"), "q4_0", torch.zeros(N).to("meta")),
            sm.BadTensorDeviceError,
            "bias: expected a tensor on",
        ),
        (lambda: nn.BlockLinear(32, True, "q4_0"), sm.BadParamError, "out_features: expected an integer"),
        (lambda: layer("q4_0")(torch.zeros(3, 64)), sm.BadTensorShapeError, r"x: expected \[..., K\] with K = 96"),
        (lambda: layer("q4_0", mode="w4a16")(activations()), sm.BadTensorDtypeError, "x: expected float16 or bfloat16 in mode 'w4a16'"),
    ],
)
def test_what_it_refuses_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_state_dict_of_another_format_or_without_the_weight_does_not_change_the_weight():
    made = layer("q4_0")
    with pytest.raises(RuntimeError, match=r"weight: expected q4_0 blocks, uint8 \[70, 3, 18\], got torch.uint8 \[70, 3, 20\]"):
        made.load_state_dict(layer("q4_1").state_dict())
    with pytest.raises(RuntimeError, match="weight: expected q4_0 blocks"):
        made.load_state_dict(torch.nn.Linear(K, N).state_dict())
    with pytest.raises(RuntimeError, match='Missing key.*"weight"'):
        made.load_state_dict({"bias": made.bias})
    assert torch.equal(made.state_dict()["weight"], blocks("q4_0"))


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
def test_a_gpu_has_tiles_of_the_same_blocks(fmt):
    on_cpu, on_gpu = layer(fmt), layer(fmt).cuda()
    x = activations(torch.float16).cuda()
    for made in (on_gpu, copy.deepcopy(on_gpu), nn.BlockLinear.from_blocks(blocks(fmt).cuda(), fmt, on_cpu.bias.cuda())):
        assert [name for name, _ in made.named_buffers()] == ["weight_tiles"] and made.packed.constant
        assert torch.equal(made(x), sm.block_linear(x, sm.pack_block_weight(blocks(fmt).cuda(), fmt), made.bias))
    assert torch.equal(on_gpu.state_dict()["weight"].cpu(), blocks(fmt)) and torch.equal(bits(copy.deepcopy(on_gpu).cpu()), bits(on_cpu))
    file = io.BytesIO()
    torch.save(on_gpu, file)
    file.seek(0)
    assert torch.equal(bits(torch.load(file, map_location="cpu", weights_only=False)), bits(on_cpu))


@pytest.mark.gpu
def test_a_weight_that_was_written_to_is_not_read_early():
    made = layer("q4_0").cuda()
    assert made.packed.constant
    made.weight_tiles.zero_()
    assert not made.packed.constant and torch.equal(made(activations().cuda()), made.bias.expand(2, 3, N))


@pytest.mark.gpu
def test_it_compiles_on_a_gpu():
    made, x = layer("q4_1").cuda(), activations(torch.bfloat16).cuda()
    assert torch.equal(torch.compile(made, fullgraph=True)(x), made(x))
