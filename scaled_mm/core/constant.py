"""Whether a weight may be promised to kernels as constant (docs/decisions/0011)."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

from scaled_mm.core import fast


def is_written(b: torch.Tensor) -> bool:
    """Waits until a CUDA tensor's device has done the current stream's work; a CPU has none.

    False where that says nothing of later runs: in a capture, while operators are traced, without data; and for a tensor that is
    not aligned to 16 bytes, which a compiled graph may copy right before the product.
    """
    on_cuda = b.is_cuda
    if torch.compiler.is_compiling() or not (on_cuda or b.is_cpu) or isinstance(b, FakeTensor) or fast.intercepted() or b.data_ptr() % 16:
        return False
    if not on_cuda:
        return True
    with torch.cuda.device(b.device):
        if torch.cuda.is_current_stream_capturing():
            return False
        torch.cuda.current_stream().synchronize()
    return True
