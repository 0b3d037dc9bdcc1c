"""GGUF files that the gguf package wrote: loaded, multiplied, and refused where they are not what they should be."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_data import ORACLE_KNOWS, gguf_dequantize, gguf_quantize, gguf_type, relative_error, seeded

import scaled_mm as sm
from scaled_mm.errors import BadParamError, BadTensorDtypeError


def write(path: Path, tensors: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType | None]], **options) -> Path:
    writer = gguf.GGUFWriter(path, "llama", **options)
    writer.add_block_count(1)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def weight(fmt: str, m: int = 24, k: int = 320) -> torch.Tensor:
    return torch.randn(m, k, generator=seeded(len(fmt) + m))


@pytest.fixture
def model(tmp_path) -> Path:
    """A tensor of each GGUF format, and of each plain type."""
    tensors = {f"blk.0.{fmt}.weight": (gguf_quantize(weight(fmt), fmt).flatten(-2).numpy(), gguf_type(fmt)) for fmt in ORACLE_KNOWS}
    experts = gguf_quantize(torch.randn(3, 4, 64, generator=seeded(1)), "q5_0").flatten(-2).numpy()
    tensors["experts.weight"] = (experts, gguf_type("q5_0"))
    tensors["f32"] = (np.arange(6, dtype=np.float32).reshape(2, 3), None)
    tensors["f16"] = (np.arange(3, dtype=np.float16), None)
    tensors["bf16"] = (torch.tensor([[1.5, -2.0]]).bfloat16().view(torch.uint8).numpy(), gguf.GGMLQuantizationType.BF16)
    for name, kind in (("i8", np.int8), ("i16", np.int16), ("i32", np.int32), ("i64", np.int64), ("f64", np.float64)):
        tensors[name] = (np.array([1, -2, 3], dtype=kind), None)
    return write(tmp_path / "model.gguf", tensors)


@pytest.mark.parametrize("fmt", ORACLE_KNOWS)
def test_a_weight_of_a_file_matches_its_dequantized_product(model, fmt):
    tensor = sm.load_gguf(model)[f"blk.0.{fmt}.weight"]
    assert isinstance(tensor, sm.QuantizedTensor) and tensor.fmt == fmt and tensor.shape == (24, 320)
    assert torch.equal(tensor.q, sm.quantize_block(weight(fmt), fmt, "ggml"))
    dequantized = gguf_dequantize(tensor.q, fmt)
    assert torch.equal(tensor.dequantize(), dequantized)
    x = torch.randn(5, 320, generator=seeded(2)).half()
    y = sm.block_linear(x, tensor.pack(), out_dtype=torch.float32)
    assert relative_error(y, x.double() @ dequantized.double().t()) <= 2e-6
    product = getattr(sm, f"gemm_{fmt}_q8_1")(tensor.q, sm.quantize_q8_1(x))
    assert relative_error(product.t(), x.double() @ dequantized.double().t()) <= 0.02


def test_every_tensor_has_its_name_its_shape_and_its_dtype(model):
    tensors = sm.load_gguf(str(model))
    assert list(tensors)[: len(ORACLE_KNOWS)] == [f"blk.0.{fmt}.weight" for fmt in ORACLE_KNOWS]
    assert tensors["experts.weight"].shape == (3, 4, 64) and tensors["experts.weight"].q.shape == (3, 4, 2, 22)
    assert tensors["f32"].tolist() == [[0, 1, 2], [3, 4, 5]] and tensors["f32"].dtype is torch.float32
    assert tensors["f16"].tolist() == [0, 1, 2] and tensors["f16"].dtype is torch.float16
    assert tensors["bf16"].tolist() == [[1.5, -2.0]] and tensors["bf16"].dtype is torch.bfloat16
    for name in ("int8", "int16", "int32", "int64", "float64"):
        tensor = tensors[name[0] + name[-2:] if name != "int8" else "i8"]
        assert tensor.dtype is getattr(torch, name) and tensor.tolist() == [1, -2, 3]


def test_the_file_is_mapped_and_never_written(model):
    before = model.read_bytes()
    tensors = sm.load_gguf(model)
    with open("/proc/self/maps") as maps:
        assert any(line.rstrip().endswith(str(model)) for line in maps)
    tensors["f32"].zero_()
    tensors["blk.0.q4_0.weight"].q.zero_()
    assert model.read_bytes() == before


def test_some_tensors_can_be_asked_for(model):
    assert list(sm.load_gguf(model, ["f16", "blk.0.q8_0.weight"])) == ["f16", "blk.0.q8_0.weight"]
    assert sm.load_gguf(model, []) == {}
    with pytest.raises(BadParamError, match=r"^names: expected names of tensors in .*model.gguf, got 'nothing'; there are '.*' and 9 more$"):
        sm.load_gguf(model, ["f16", "nothing"])
    with pytest.raises(BadParamError, match="got 'blk.0.q8_0'; there are 'blk.0.q8_0.weight', 'blk"):  # the most like it first
        sm.load_gguf(model, ["blk.0.q8_0"])
    with pytest.raises(BadParamError, match="got 5; there are '"):
        sm.load_gguf(model, [5])
    with pytest.raises(BadParamError, match=r"got \['f16'\]; there are '"):
        sm.load_gguf(model, [["f16"]])
    for names in ("f16", 5):
        with pytest.raises(BadParamError, match=f"^names: expected None or several names of tensors, got {names!r}"):
            sm.load_gguf(model, names)


def test_a_type_that_is_no_gguf_format_here_is_refused_by_name_unless_it_is_not_asked_for(tmp_path):
    other = np.zeros((2, 110), dtype=np.uint8)
    path = write(tmp_path / "q3.gguf", {"a": (np.ones(3, np.float32), None), "output.weight": (other, gguf.GGMLQuantizationType.Q3_K)})
    with pytest.raises(
        BadTensorDtypeError, match=r"^output.weight: expected a tensor of type Q4_0, .*F32.*, got Q3_K; skip_unsupported=True loads the others$"
    ):
        sm.load_gguf(path)
    assert sm.load_gguf(path, ["a"])["a"].tolist() == [1, 1, 1]
    loaded = sm.load_gguf(path, skip_unsupported=True)
    assert list(loaded) == ["a"] and loaded["a"].tolist() == [1, 1, 1]
    assert sm.load_gguf(path, ["output.weight"], skip_unsupported=True) == {}
    other = {name: (other, gguf.GGMLQuantizationType.Q3_K) for name in ("x", "y", "z")}
    with pytest.raises(BadTensorDtypeError, match="^x: .* got Q3_K, and 2 more that are of no such type; skip_unsupported=True loads the others$"):
        sm.load_gguf(write(tmp_path / "three.gguf", other))


def test_what_is_no_gguf_file_is_refused(tmp_path, model):
    (tmp_path / "text").write_bytes(b"this is no such file, though it is long enough")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "cut").write_bytes(model.read_bytes()[:-2000])
    (tmp_path / "cut_early").write_bytes(model.read_bytes()[:40])
    (tmp_path / "version").write_bytes(b"GGUF" + (77).to_bytes(4, "little") + model.read_bytes()[8:])
    for name in ("text", "empty", "cut", "cut_early", "version"):
        with pytest.raises(BadParamError, match=f"^path: expected a GGUF file, got .*{name}") as error:
            sm.load_gguf(tmp_path / name)
        assert str(error.value).endswith("; the file may be truncated") == name.startswith("cut")
    with pytest.raises(FileNotFoundError):
        sm.load_gguf(tmp_path / "missing")
    with pytest.raises(BadParamError, match="^path: expected a path, got a NoneType"):
        sm.load_gguf(None)


def test_a_file_of_the_other_byte_order_is_refused(tmp_path):
    path = write(tmp_path / "big.gguf", {"a": (np.ones(3, np.float32), None)}, endianess=gguf.GGUFEndian.BIG)
    with pytest.raises(BadParamError, match="^path: expected a little-endian GGUF file"):
        sm.load_gguf(path)


def test_without_the_gguf_package_the_error_says_how_to_get_it(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match="^load_gguf: expected the package gguf, which is not installed; pip install gguf"):
        sm.load_gguf(model)
