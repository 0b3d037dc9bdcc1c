"""Whether a weight may be marked as constant for kernels (docs/decisions/0011)."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

from scaled_mm.core import fast
from scaled_mm.core.checks import has_address


def is_written(b: torch.Tensor) -> bool:
    """Synchronizes the current stream of a CUDA tensor's device; then b is written. True at once for a CPU tensor.

    False if that proves nothing about later runs: during graph capture, while operators are traced, and for tensors without data. False also
    for a tensor that is not aligned to 16 bytes, because a compiled graph may copy it right before the product.
    """
    on_cuda = b.is_cuda
    if torch.compiler.is_compiling() or not (on_cuda or b.is_cpu) or isinstance(b, FakeTensor) or fast.intercepted():
        return False
    if not has_address(b) or b.data_ptr() % 16:
        return False
    if not on_cuda:
        return True
    with torch.cuda.device(b.device):
        if torch.cuda.is_current_stream_capturing():
            return False
        torch.cuda.current_stream().synchronize()
    return True
