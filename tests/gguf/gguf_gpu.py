"""What the tests of GGUF products on a GPU share: operands, the formula in float64, one row of a table."""

from __future__ import annotations

import torch
from gguf_data import planned_weight, seeded

import scaled_mm as sm
from scaled_mm.errors import ScaledMMError
from scaled_mm.gguf import reference
from scaled_mm.tables import available_tables, load_table

BOUND = 2e-6
ROUNDING = {torch.float32: BOUND, torch.float16: 2.0**-11 + BOUND, torch.bfloat16: 2.0**-8 + BOUND}  # of a sum that is cast
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# Activations that are not quantized yet, and the modes that they have.
CALLS = (*((dtype, "w4a8") for dtype in FLOATS), (torch.float16, "w4a16"), (torch.bfloat16, "w4a16"))


def gemm(fmt: str):
    return getattr(sm, f"gemm_{fmt}")


def gemm_q8_1(fmt: str):
    return getattr(sm, f"gemm_{fmt}_q8_1")


def operands(fmt: str, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight as blocks, activations in float32), on the GPU."""
    g = seeded(m + n + k)
    return sm.quantize_block(torch.randn(m, k, generator=g), fmt).cuda(), torch.randn(n, k, generator=g).cuda()


def weight_of(weight_q: torch.Tensor, fmt: str, packed: bool):
    return sm.pack_block_weight(weight_q, fmt) if packed else weight_q


def expected(weight_q: torch.Tensor, fmt: str, activation: torch.Tensor, mode: str = "w4a8", bias: torch.Tensor | None = None) -> torch.Tensor:
    """float64 [M, N] on the CPU, by formulas that share nothing with the kernels. Activations that mode quantizes are quantized here."""
    if activation.dtype is torch.uint8 or mode == "w4a8":
        q = activation if activation.dtype is torch.uint8 else sm.quantize_q8_1(activation)
        value = reference.gemm_q8_1(weight_q.cpu(), q.cpu(), fmt)
    else:
        value = reference.gemm(weight_q.cpu(), activation.cpu(), fmt)
    return value if bias is None else value + bias.cpu().double()[:, None]


def activation_of(kind, x: torch.Tensor) -> torch.Tensor:
    return sm.quantize_q8_1(x) if kind == "q8_1" else x.to(kind)


def compute(
    handle: sm.Handle, fmt: str, weight, activation, m: int, n: int, *, bias=None, mode="auto", out_dtype=torch.float32, kernel=None
) -> torch.Tensor:
    """[M, N] by a descriptor, whose output and workspace are poisoned."""
    out = torch.full((m, n), torch.nan, dtype=out_dtype, device="cuda")
    planned = dict(out=out, weight=planned_weight(weight, fmt), activation=activation, bias=bias)
    with sm.create_block_descriptor(handle, **planned, mode=mode, kernel=kernel) as descriptor:
        workspace = torch.full((descriptor.workspace_size,), 255, dtype=torch.uint8, device="cuda") if descriptor.workspace_size else None
        descriptor.calculate(out, weight, activation, bias, workspace=workspace)
    return out


def moved(blocks: torch.Tensor, gap: int, offset: int) -> torch.Tensor:
    """The same blocks, rows `gap` bytes further apart, beginning at an address of this remainder."""
    rows, row = blocks.shape[0], blocks.shape[1] * blocks.shape[2]
    memory = torch.full((offset + rows * (row + gap),), 0xFF, dtype=torch.uint8, device="cuda")
    return memory[offset:].view(rows, row + gap)[:, :row].unflatten(1, blocks.shape[1:]).copy_(blocks)


def rows_here() -> list[tuple[str, str]]:
    """(arch, row) of every table whose kernels this GPU runs."""
    found = []
    for arch, _ in available_tables() if torch.cuda.is_available() else ():
        try:
            sm.Handle("cuda", arch=arch).destroy()
        except ScaledMMError:
            continue
        found += [(arch, row.name) for row in load_table(arch).gguf.rows]
    return found


def native_rows() -> list[str]:
    return [row.name for row in load_table(sm.Handle("cuda").arch).gguf.rows]


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """float64 on the CPU: float32 activations as mode w16a16 rounds them, with a power of two for each token."""
    x = x.cpu().double()
    finite = x.abs().nan_to_num(0.0, 0.0).amax(1, keepdim=True) if x.shape[1] else x.new_zeros(x.shape[0], 1)
    up = torch.where(finite > 0, 15 - torch.frexp(finite).exponent, 15).clamp(max=126).double()
    return (x * 2.0**up).float().half().double() / 2.0**up
