"""What test_core_gguf.py runs in a process of its own, where libcuda.so.1 is the fake driver.

fake_gpu_gguf.py FUNCTION ARGUMENTS...     prints one JSON document
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import random
import sys

import torch
from fake_gpu_core import STREAM, Core, status_of

import scaled_mm as sm
from scaled_mm import TensorDesc
from scaled_mm.core import binding
from scaled_mm.gguf import reference, tiles
from scaled_mm.gguf_formats import FORMATS, WEIGHT_FORMATS
from scaled_mm.kernels.gpu import facts
from scaled_mm.products import codes
from scaled_mm.tables import FASTEST, load_table

TABLE = load_table("sm90").gguf
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def apart(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values at other addresses: rows apart, at an odd address, or from back to front in memory."""
    if layout == "contiguous":
        return tensor.contiguous()
    if layout == "transposed":
        return tensor.t().contiguous().t()
    offset = 3 if layout == "odd" else 1
    wide = torch.zeros((tensor.shape[0], tensor.stride(0) + 5 if tensor.dim() == 3 else tensor.shape[1] + 5), dtype=tensor.dtype)
    if tensor.dim() == 3:  # bytes: blocks of a row stay together
        flat = wide[:, offset : offset + tensor.shape[1] * tensor.shape[2]]
        return flat.copy_(tensor.flatten(1)).unflatten(1, tensor.shape[1:])
    return wide[:, offset : offset + tensor.shape[1]].copy_(tensor)


@dataclasses.dataclass
class Product:
    """One product and what it must be."""

    fmt: str
    out: torch.Tensor  # [N, M], poisoned
    memory: torch.Tensor  # what out is a view of
    weight: torch.Tensor  # blocks, or tiles
    packed: bool
    activation: torch.Tensor
    bias: torch.Tensor | None
    mode: str
    shape: tuple[int, int, int]  # M tokens, N, K

    def descs(self) -> list[TensorDesc | None]:
        _, n, k = self.shape
        aligned = TensorDesc.of(self.weight).alignment
        weight = TensorDesc((n, k), self.fmt, None if self.packed else (self.weight.stride(0), 1), aligned, packed=self.packed)
        activation = TensorDesc.of(self.activation)
        if self.activation.dtype is torch.uint8:
            activation = TensorDesc((self.activation.shape[0], k), "q8_1", (self.activation.stride(0), 1), activation.alignment)
        return [TensorDesc.of(self.out), weight, activation, None if self.bias is None else TensorDesc.of(self.bias)]

    def settled_mode(self) -> str:
        if self.activation.dtype is torch.uint8:
            return "w4a8"
        if self.mode != "auto":
            return self.mode
        if self.activation.dtype is torch.float32:
            return "w16a16"
        mode = next(r.mode for r in TABLE.auto if r.m is None or self.shape[0] <= r.m)
        return "w4a16" if mode == "w16a16" and (self.out.dtype is torch.float32 or not self.packed) else mode

    def expected(self, weight_q: torch.Tensor) -> torch.Tensor:
        q = self.activation
        if q.dtype is not torch.uint8 and self.settled_mode() == "w4a8":
            q = sm.quantize_q8_1(q)
        value = reference.gemm_q8_1(weight_q, q, self.fmt) if q.dtype is torch.uint8 else reference.gemm(weight_q, q, self.fmt)
        return value if self.bias is None else value + self.bias.double()[:, None]


def modes_of(kind) -> list[str]:
    """The modes that activations of this kind take."""
    return ["auto", "w4a8", *([] if kind == "q8_1" else ["w16a16"] if kind is torch.float32 else ["w4a16", "w16a16"])]


def make(seed: int) -> tuple[Product, torch.Tensor]:
    """A random product, and its weight as blocks."""
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    n, m, k = r.choice([0, 1, 5, 63, 64, 65, 130]), r.choice([0, 1, 8, 9, 16, 33, 65]), r.choice([0, 32, 96, 256, 288])
    fmt, packed = r.choice(list(WEIGHT_FORMATS)), r.choice([True, False])
    weight_q = sm.quantize_block(torch.randn(n, k, generator=g), fmt)
    weight = tiles.from_blocks(weight_q, FORMATS[fmt]) if packed else apart(weight_q, r.choice(["contiguous", "apart", "odd"]))
    x, kind = torch.randn(m, k, generator=g), r.choice(["q8_1", *FLOATS])
    if kind == "q8_1":
        activation = apart(sm.quantize_q8_1(x), r.choice(["contiguous", "apart", "odd"]))
    else:
        activation = apart(x.to(kind), r.choice(["contiguous", "apart", "transposed"]))
    mode = r.choice(modes_of(kind))
    dtype = r.choice(FLOATS)
    memory = torch.full((m + 3, n + 2) if (turned := r.choice([True, False])) else (n + 3, m + 2), torch.nan, dtype=dtype)
    out = memory[1 : m + 1, 2:].t() if turned else memory[1 : n + 1, 2:]
    bias = r.choice([None, torch.float32, dtype])
    bias = None if bias is None else torch.randn(2 * n, generator=g).to(bias)[::2]
    return Product(fmt, out, memory, weight, packed, activation, bias, mode, (m, n, k)), weight_q


class BlockCore(Core):
    """The C core's functions of GGUF products, on a fake GPU."""

    PRODUCT = codes.GGUF_GEMM

    def plan(self, descs: list[TensorDesc | None], mode: str, kernel: str | None = None) -> ctypes.c_void_p:
        return self.create_from(descs, kernel, binding.GGUF_MODES.index(mode))

    def launch(self, descriptor, product: Product, workspace: torch.Tensor | None = None, size: int | None = None, **changed) -> None:
        tensors = {"out": product.out, "weight": product.weight, "activation": product.activation, "bias": product.bias, **changed}
        self.calculate(descriptor, tensors["out"], tensors, workspace, size)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm().clamp_min(1e-300))


def products(kernels: str, count: str) -> dict:
    """Random products through create and calculate, compared with the formula in float64; the choice with the table's own."""
    core, rows, modes = BlockCore(kernels), {}, {}
    for seed in range(int(count)):
        product, weight_q = make(seed)
        m, n, k = product.shape
        forced = random.Random(seed).choice([None, None, *(row.name for row in TABLE.rows)])
        descriptor = core.plan(product.descs(), product.mode, forced)
        choice, settled = core.choice(descriptor), product.settled_mode()
        served = "w4a16" if settled == "w16a16" and not product.packed else settled  # unpacked weights stay exact
        selection = TABLE.select(m, n, k, mode=served, minima=FORMATS[product.fmt].second == "m")
        if forced is None:
            assert (choice.row.decode(), choice.bucket) == (selection.row.name, selection.bucket_index), f"{seed}: {choice.row}, not {selection}"
            assert choice.reason.decode().startswith(f"GGUF {settled} bucket {choice.bucket} of "), choice.reason
        else:
            assert choice.row.decode() == forced and choice.reason.decode().startswith("forced by name")
        size = core.workspace_size(descriptor)
        quantizes = settled == "w4a8" and product.activation.dtype is not torch.uint8 and n * m > 0
        assert size == (m * (k // 32) * 36 + 20 if quantizes else 0), (seed, size)
        workspace = torch.zeros(size + 16, dtype=torch.uint8) if size else None
        core.launch(descriptor, product, workspace, size)
        assert size == 0 or not workspace[size:].any()
        expected = product.expected(weight_q)
        assert relative_error(product.out, expected) <= {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[product.out.dtype], seed
        assert int((~product.memory.isnan()).sum()) == n * m, f"{seed}: written outside of out"
        rows[choice.row.decode()] = rows.get(choice.row.decode(), 0) + 1
        modes[f"{product.mode} {settled}"] = modes.get(f"{product.mode} {settled}", 0) + 1
        core.destroy(descriptor)
    assert core.asked == [], core.asked
    return {"rows": rows, "modes": modes}


def buckets(kernels: str) -> dict:
    """The row that the library's table chooses for 8 tokens, by activation and mode, and for 6 by format."""
    core, answer = BlockCore(kernels), {}
    for kind in ("q8_1", *FLOATS):
        for mode in modes_of(kind):
            descs = [TensorDesc((64, 8), torch.float32), TensorDesc((64, 256), "q4_0"), TensorDesc((8, 256), kind), None]
            answer[f"{str(kind).removeprefix('torch.')} {mode}"] = core.choice(core.plan(descs, mode)).row.decode()
    for fmt in WEIGHT_FORMATS:
        descs = [TensorDesc((64, 6), torch.float32), TensorDesc((64, 256), fmt), TensorDesc((6, 256), torch.float16), None]
        answer[f"6 {fmt}"] = core.choice(core.plan(descs, "w4a16")).row.decode()
    return answer


def fastest(kernels: str, path: str) -> dict:
    """The core and the Python table choose the same kernel config, by the same predicted time, where a bucket of a mode takes the fastest."""
    core, table, dice, chosen = BlockCore(kernels), load_table(path).gguf, random.Random(7), {}
    gpu = facts("NVIDIA H200", "sm90", int(os.environ.get("FAKE_SMS", 132)))
    others = [(20, 64, 0), (4000, 9000, 0), (2**19, 2**28, 32), (32, 2**24, 2**24)]
    tokens = lambda: dice.choice([dice.randrange(1, 70), dice.randrange(9, 17), dice.randrange(1, 5000)])  # noqa: E731
    sizes = [(tokens(), dice.randrange(1, 30000), 32 * dice.choice([dice.randrange(128), dice.randrange(900)])) for _ in range(2500)]
    buckets = set()
    for m, n, k in (*others, *sizes):
        mode = "w16a16" if (m, n, k) in others else dice.choice(("w4a16", "w16a16"))
        fmt, dtype = dice.choice(list(WEIGHT_FORMATS)), dice.choice([kind for kind in FLOATS if mode in modes_of(kind)])
        descs = [TensorDesc((n, m), torch.float16), TensorDesc((n, k), fmt, packed=True), TensorDesc((m, k), dtype), None]
        descriptor = core.plan(descs, mode)
        choice, selection = core.choice(descriptor), table.select(m, n, k, mode=mode, gpu=gpu, minima=FORMATS[fmt].second == "m")
        assert (choice.row.decode(), choice.bucket) == (selection.row.name, selection.bucket_index), (m, n, k, mode, choice.reason, selection)
        buckets.add(choice.bucket)
        if table.buckets[choice.bucket].kernel == FASTEST:
            us = table.predicted_us(selection.row, m, n, k, gpu)
            assert f"is the fastest by prediction, {us:.2f} us" in (reason := choice.reason.decode()) or us >= 100, (us, reason)
            chosen[choice.row.decode()] = chosen.get(choice.row.decode(), 0) + 1
        core.destroy(descriptor)
    return {"rows": chosen, "buckets": sorted(buckets)}


def stand_ins(kernels: str) -> list[tuple[str, str | None]]:
    """(kernel config, the better one that is not there) of a product of 1 token and one of 200, whose weight rounds."""
    core, found = BlockCore(kernels), []
    for m in (1, 200):
        choice = core.choice(
            core.plan(
                [TensorDesc((4096, m), torch.float16), TensorDesc((4096, 4096), "q4_0", packed=True), TensorDesc((m, 4096), torch.float16), None],
                "auto",
            )
        )
        found.append((choice.row.decode(), choice.better and choice.better.decode()))
    return found


def told(kernels: str) -> dict:
    """Whether a launch was told that the weight is constant, of a descriptor whose weight was and of one whose weight was not."""
    core, loaded = BlockCore(kernels), ctypes.CDLL(kernels)
    constant, stream = (
        kind.in_dll(loaded, f"host_kernels_last_{name}") for kind, name in ((ctypes.c_bool, "constant_b"), (ctypes.c_void_p, "stream"))
    )
    product, _ = next(
        made for seed in range(10**6) if (made := make(seed))[0].packed and made[0].settled_mode() == "w4a16" and min(made[0].shape) > 0
    )
    answer = {}
    for flag in (True, False):
        descs = product.descs()
        descs[1] = dataclasses.replace(descs[1], constant=flag)
        core.launch(core.plan(descs, product.mode), product)
        answer[str(flag)] = [constant.value, stream.value == STREAM]
    return answer


def refusals(kernels: str) -> dict:
    """Status and message of what create, check and calculate refuse."""
    core = BlockCore(kernels)
    q = lambda rows, k=256, fmt="q4_0", **more: TensorDesc((rows, k), fmt, **more)  # noqa: E731
    floats = lambda *shape, dtype=torch.float32, **more: TensorDesc(shape, dtype, **more)  # noqa: E731
    good = dict(out=floats(64, 9), weight=q(64), activation=q(9, fmt="q8_1"), bias=None)

    def create(mode: str = "auto", kernel: str | None = None, **changed):
        return lambda: core.plan([*{**good, **changed}.values()], mode, kernel)

    answer = {
        "fine": status_of(create()),
        "no weight": status_of(create(weight=None)),
        "weight of q8_1": status_of(create(weight=q(64, fmt="q8_1"))),
        "weight of floats": status_of(create(weight=floats(64, 256))),
        "K of 48": status_of(create(weight=q(64, 48))),
        "blocks apart": status_of(create(weight=q(64, strides=(288, 2)))),
        "tiles of odd addresses": status_of(create(weight=q(64, packed=True, alignment=8))),
        "weight of three": status_of(create(weight=floats(1, 64, 256))),
        "activation of q8_0": status_of(create(activation=q(9, fmt="q8_0"))),
        "activation of int8": status_of(create(activation=floats(9, 256, dtype=torch.int8))),
        "another K": status_of(create(activation=q(9, 288, fmt="q8_1"))),
        "packed activations": status_of(create(activation=q(9, fmt="q8_1", packed=True))),
        "out of int32": status_of(create(out=floats(64, 9, dtype=torch.int32))),
        "out transposed": status_of(create(out=floats(9, 64))),
        "out that overlaps": status_of(create(out=floats(64, 9, strides=(1, 1)))),
        "bias of another dtype": status_of(create(bias=floats(64, dtype=torch.float16))),
        "bias of another size": status_of(create(bias=floats(63))),
        "bias of two dimensions": status_of(create(bias=floats(1, 64))),
        "w4a16 of q8_1": status_of(create("w4a16")),
        "w4a16 of float32": status_of(create("w4a16", activation=floats(9, 256))),
        "a row of another table": status_of(create(kernel="generic_64x64x64")),
    }
    product, _ = next(
        made
        for seed in range(10**6)
        if (made := make(seed))[0].mode == "w4a8"
        and made[0].activation.dtype in FLOATS
        and made[0].packed
        and made[0].bias is not None
        and min(made[0].shape) > 1
    )
    descriptor = core.plan(product.descs(), "w4a8")
    size = core.workspace_size(descriptor)
    workspace = torch.zeros(size + 16, dtype=torch.uint8)
    # The weight with `size` bytes behind it: a workspace that starts in the weight lies in no other tensor.
    room = torch.cat([product.weight.view(-1), torch.zeros(size, dtype=torch.uint8)])
    count = product.weight.numel()
    product = dataclasses.replace(product, weight=room[:count].view(product.weight.shape))
    run = lambda *arguments, **changed: status_of(lambda: core.launch(descriptor, product, *arguments, **changed))  # noqa: E731
    answer |= {
        "no data of weight": run(workspace, size, weight=None),
        "no bias": run(workspace, size, bias=None),
        "odd tiles": run(workspace, size, weight=product.weight.view(-1)[8:]),
        "odd activation": run(workspace, size, activation=torch.zeros(9, dtype=torch.uint8)[1:]),
        "out in the weight": run(workspace, size, weight=product.memory),
        "no workspace": run(),
        "small workspace": run(workspace, size - 1),
        "unaligned workspace": run(workspace[8:], size),
        "workspace in the weight": run(room, size),
        "workspace in the last powers": run(room[count - 64 :], size),
        "launched": run(workspace, size),
    }

    def compare(**changed) -> list[str]:
        descs = dict(zip(("out", "weight", "activation", "bias"), product.descs())) | changed
        return status_of(lambda: core.check(descriptor, list(descs.values())))

    _, n, k = product.shape
    answer |= {
        "the same": compare(),
        "the same, constant": compare(weight=TensorDesc((n, k), product.fmt, constant=True, packed=True)),
        "blocks for tiles": compare(weight=TensorDesc((n, k), product.fmt)),
        "another format": compare(weight=TensorDesc((n, k), "q8_0" if product.fmt != "q8_0" else "q4_0", packed=True)),
        "a bias less": compare(bias=None),
    }
    answer["size"] = size
    return answer


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
