"""From a GGUF file to a product: load a quantized weight, pack it, multiply, and compare with the dequantized product.

    python examples/gguf_to_product.py [MODEL.gguf] [--tensor NAME] [--tokens 4] [--device cuda:0]

K-quants (q4_k, q5_k) are converted to a format that products read; q6_k weights, which no product reads, are left out.
Without a file argument, the example writes a small file to a temporary folder. It needs the package gguf (pip install gguf) and uses a GPU if
there is one. Exit status 1: the error exceeds the bound in docs/design/gguf-formats.md, or the file has no weight to multiply. Exit status 2:
the product could not be computed.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path

import torch

import scaled_mm as sm
from scaled_mm.cli import common

BOUND = 2e-6


def write_small_file(folder: Path) -> Path:
    """Writes a file with one layer in each of three formats, and one norm, like a converted model."""
    import gguf

    path, generator = folder / "small.gguf", torch.Generator().manual_seed(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    for name, fmt, rows, k in (("attn_q", "q4_0", 256, 512), ("ffn_up", "q5_1", 384, 512), ("ffn_down", "q8_0", 512, 384)):
        q = sm.quantize_block(torch.randn(rows, k, generator=generator), fmt, rule="ggml")  # uint8 [rows, k/32, bytes of a block]
        writer.add_tensor(f"blk.0.{name}.weight", q.flatten(-2).numpy(), raw_dtype=gguf.GGMLQuantizationType[fmt.upper()])
    writer.add_tensor("output_norm.weight", torch.ones(512).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def multiply(name: str, tensor: sm.QuantizedTensor, tokens: int, device: torch.device) -> float:
    """Prints a line about one weight. Returns ||y - x W^T|| / ||x W^T|| with W dequantized and the product in float64."""
    if tensor.q.dim() != 3:
        print(f"{name}: {tensor.fmt} {list(tensor.shape)}, no matrix, left out")
        return 0.0
    if tensor.fmt == "q6_k":
        print(f"{name}: q6_k {list(tensor.shape)}, which no product reads, left out; multiply with sm.dequantize_block by torch")
        return 0.0
    if tensor.fmt in ("q4_k", "q5_k"):
        exact, tensor = tensor.dequantize(), sm.convert_k_quant(tensor.q, tensor.fmt)
        print(f"{name}: a K-quant, converted with a relative error of {float((tensor.dequantize() - exact).norm() / exact.norm()):.1e}")
    rows, k = tensor.shape
    q = tensor.q.to(device)
    packed = sm.pack_block_weight(q, tensor.fmt)  # once per weight; the blocks may be freed afterwards
    x = torch.randn(tokens, k, generator=torch.Generator().manual_seed(1)).to(device).half()  # the same on every run
    y = sm.block_linear(x, packed, out_dtype=torch.float32, mode="w4a16")  # [tokens, rows]
    want = x.double() @ sm.dequantize_block(q, tensor.fmt).double().t()
    error = float((y.double() - want).norm() / want.norm())
    print(f"{name}: {tensor.fmt} [{rows}, {k}], {tokens} tokens on {device}, relative error {error:.1e}")
    return error


def run(args: argparse.Namespace) -> int:
    device = common.device_of(args.device)  # a missing device is refused before anything is read
    with tempfile.TemporaryDirectory() as folder:
        path = args.file or write_small_file(Path(folder))
        names = None if args.tensor is None else [args.tensor]
        tensors = sm.load_gguf(path, names, skip_unsupported=names is None)
        quantized = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, sm.QuantizedTensor)}
        print(f"{path.name}: {len(quantized)} of {len(tensors)} tensors of supported types are quantized")
        errors = [multiply(name, tensor, args.tokens, device) for name, tensor in quantized.items()]
    return 0 if errors and max(errors) <= BOUND else 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, help="a GGUF file; default a small one that is written first")
    parser.add_argument("--tensor", help="the tensor to multiply with; default every quantized matrix of a format that the package has")
    parser.add_argument("--tokens", type=common.integer(1), default=4)
    parser.add_argument("--device", help="cuda:0, cpu, ...; default the first GPU, or the CPU when there is none")
    args = parser.parse_args(argv)
    try:
        if importlib.util.find_spec("gguf") is None:
            raise ImportError("expected the package gguf, which is not installed; pip install gguf")
        return run(args)
    except (sm.ScaledMMError, OSError, ImportError) as error:  # one line: an argument is invalid, or something is missing
        print(f"gguf_to_product.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
