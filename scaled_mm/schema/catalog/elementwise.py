"""Activations and normalizations. The package has kernels for RMSNorm and gated activations, whose outputs models quantize. Other solutions call
torch."""

from __future__ import annotations

from collections.abc import Iterator

from scaled_mm.schema.catalog.entry import Entry
from scaled_mm.schema.catalog.gemm import HALF_NORM

_TOKENS = [{"T": 1}, {"T": 16}, {"T": 512}]
_NOTE = "torch's own kernels: the package has none of its own"
_OURS = "the package's row-wise operator"

_SILU = """import torch


def run(x):
    wide = x.double()
    return (wide / (1 + torch.exp(-wide))).to(torch.bfloat16)
"""

_GELU = '''import torch


def run(x):
    """x * Phi(x) with the exact error function, not the tanh approximation."""
    wide = x.double()
    return (wide * 0.5 * (1 + torch.erf(wide / 2**0.5))).to(torch.bfloat16)
'''

_SILU_AND_MUL = """import torch


def run(x):
    gate, up = x.double().chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(torch.bfloat16)
"""

_RMSNORM = """import torch


def run(x, weight, epsilon):
    wide = x.double()
    return (wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()).to(torch.bfloat16)
"""

_ADD_RMS_NORM = '''import torch


def run(x, residual, weight, epsilon):
    """(rmsnorm of the sum, the sum). The sum is rounded to bfloat16 before normalization."""
    total = (x.double() + residual.double()).to(torch.bfloat16)
    wide = total.double()
    y = wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()
    return y.to(torch.bfloat16), total
'''


def entries() -> Iterator[Entry]:
    for hidden in (4096, 14336, 28672):
        yield _activation("silu", hidden, "silu(x) = x * sigmoid(x)", _SILU, "torch.nn.functional.silu(x)", "x * torch.sigmoid(x)")
        yield _activation(
            "gelu",
            hidden,
            "gelu(x) = x * Phi(x), exact",
            _GELU,
            "torch.nn.functional.gelu(x)",
            "(x.float() * 0.5 * (1 + torch.erf(x.float() * 0.5**0.5))).to(x.dtype)",
        )
    for hidden in (14336, 28672):
        yield Entry(
            name=f"silu_and_mul_h{hidden}",
            op_type="silu_and_mul",
            description="silu of the first half of the last dimension times the second half.",
            axes={"T": None, "H": hidden, "H2": 2 * hidden},
            inputs={"x": ("bfloat16", ["T", "H2"])},
            outputs={"y": ("bfloat16", ["T", "H"])},
            reference=_SILU_AND_MUL,
            ours="import scaled_mm\n\n\ndef run(x):\n    return scaled_mm.silu_and_mul(x)\n",
            plain="import torch\n\n\ndef run(x):\n    gate, up = x.float().chunk(2, dim=-1)\n"
            "    return (gate * torch.sigmoid(gate) * up).to(x.dtype)\n",
            note=_OURS,
            compare=HALF_NORM,
            constraints=["H2 == 2 * H"],
            workloads=_TOKENS,
        )
    for hidden in (4096, 8192):
        yield Entry(
            name=f"rmsnorm_h{hidden}",
            op_type="rmsnorm",
            description="x / sqrt(mean(x^2) + epsilon) * weight.",
            axes={"T": None, "H": hidden},
            inputs={"x": ("bfloat16", ["T", "H"]), "weight": ("bfloat16", ["H"]), "epsilon": ("float32", None)},
            outputs={"y": ("bfloat16", ["T", "H"])},
            reference=_RMSNORM,
            ours="import scaled_mm\n\n\ndef run(x, weight, epsilon):\n    return scaled_mm.rms_norm(x, weight, epsilon)\n",
            plain="import torch\n\n\ndef run(x, weight, epsilon):\n    wide = x.float()\n"
            "    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight.float()).to(x.dtype)\n",
            note=_OURS,
            compare=HALF_NORM,
            scalars={"epsilon": 1e-5},
            workloads=_TOKENS,
        )
        yield Entry(
            name=f"add_rms_norm_h{hidden}",
            op_type="add_rms_norm",
            description="Returns the rmsnorm of the sum of x and a residual, and the sum.",
            axes={"T": None, "H": hidden},
            inputs={"x": ("bfloat16", ["T", "H"]), "residual": ("bfloat16", ["T", "H"]), "weight": ("bfloat16", ["H"]), "epsilon": ("float32", None)},
            outputs={"y": ("bfloat16", ["T", "H"]), "total": ("bfloat16", ["T", "H"])},
            reference=_ADD_RMS_NORM,
            ours="import scaled_mm\n\n\ndef run(x, residual, weight, epsilon):\n    return scaled_mm.add_rms_norm(x, residual, weight, epsilon)\n",
            plain="import torch\n\n\ndef run(x, residual, weight, epsilon):\n    total = x + residual\n    wide = total.float()\n"
            "    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight.float()\n    return y.to(x.dtype), total\n",
            note=_OURS,
            compare=HALF_NORM,
            scalars={"epsilon": 1e-5},
            workloads=_TOKENS,
        )


def _activation(op_type: str, hidden: int, description: str, reference: str, ours: str, plain: str) -> Entry:
    return Entry(
        name=f"{op_type}_h{hidden}",
        op_type=op_type,
        description=f"{description}.",
        axes={"T": None, "H": hidden},
        inputs={"x": ("bfloat16", ["T", "H"])},
        outputs={"y": ("bfloat16", ["T", "H"])},
        reference=reference,
        ours=f"import torch\n\n\ndef run(x):\n    return {ours}\n",
        plain=f"import torch\n\n\ndef run(x):\n    return {plain}\n",
        note=_NOTE,
        compare=HALF_NORM,
        workloads=_TOKENS,
    )
