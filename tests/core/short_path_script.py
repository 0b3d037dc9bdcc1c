"""Runs in a process with the fake driver: the Python short path (csrc/python) over the C core. Prints one JSON document."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import json
import sys
import warnings

import torch
from fake_gpu_core import STREAM, Core, TensorDesc

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.core import fast

M, N, K = 4, 8, 16


def load(path: str):
    loader = importlib.machinery.ExtensionFileLoader("scaled_mm_fast", path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("scaled_mm_fast", loader))
    loader.exec_module(module)
    assert module.bind(torch.Tensor, torch.nn.Parameter, fast.increment_version, torch.is_inference_mode_enabled)
    return module


def calculate(core: Core, module, b_scale: torch.Tensor, watched: bool = False, made_in_inference_mode: bool = False) -> str:
    """What a product with this scale comes to: right, wrong, or left to the operator. watched: autograd asks for out's gradient."""
    a, b = torch.randint(-9, 9, (M, K), dtype=torch.int8), torch.randint(-9, 9, (N, K), dtype=torch.int8).t()
    a_scale = torch.ones(M)
    with torch.inference_mode(made_in_inference_mode):
        out = torch.full((M, N), float("nan"))
    tensors = dict(out=out, a=a, b=b, a_scale=a_scale, b_scale=b_scale)
    plan = core.create(**{name: TensorDesc.of(tensor) for name, tensor in tensors.items()})
    if watched:
        out.requires_grad_()
    before = None if out.is_inference() else out._version
    status = module.calculate(plan.value, 0, STREAM, None, out, a, b, a_scale, b_scale, None, None, None, None, None)
    if status is NotImplemented:
        return "left"
    expected = reference.scaled_mm(a, b, a_scale, b_scale.clone(), out_dtype=torch.float32)
    assert before is None or out._version == before + 1
    return "right" if status is None and torch.equal(out, expected) else "wrong"


class Extension:
    """Stands in for the extension where there is no stream: writes sevens past torch's dispatcher."""

    calls, constant_b = 0, []

    def run(self, handle, device, constant_b, out, *operands):
        Extension.calls += 1
        Extension.constant_b.append(constant_b)
        torch.from_numpy(out.detach().numpy()).fill_(7.0)


def pretend_to_be_cuda() -> None:
    fast.module = Extension()
    fast._handle_address = lambda device: 0
    torch.Tensor.get_device = lambda self: 0


def main(kernels: str, extension: str) -> dict:
    core, module = Core(kernels), load(extension)
    complex_scale = torch.rand(N, dtype=torch.complex64)
    answer = {
        "plain": calculate(core, module, torch.rand(N)),
        "an output that wants a gradient": calculate(core, module, torch.rand(N), watched=True),
        "an output of inference mode, outside": calculate(core, module, torch.rand(N), made_in_inference_mode=True),
        "negated with gaps": calculate(core, module, complex_scale.conj().imag),
        "negated and packed": calculate(core, module, complex_scale.conj().imag.as_strided((N,), (1,))),
        "negated by name": calculate(core, module, torch._neg_view(torch.rand(N))),
    }
    with torch.inference_mode():
        answer["an output of inference mode, inside"] = calculate(core, module, torch.rand(N), made_in_inference_mode=True)
    a, b, one = torch.zeros(M, K, dtype=torch.int8), torch.zeros(N, K, dtype=torch.int8).t(), torch.ones(1)
    pretend_to_be_cuda()
    out = torch.ones(M, N)
    before = out._version
    sm.scaled_mm(a, b, one, one, out=out)
    answer["calls"], answer["version moved"] = Extension.calls, out._version > before
    prepared = sm.prepare_weight(b)
    weights = (dataclasses.replace(prepared), prepared)
    for weight in weights:
        sm.scaled_mm(a, weight, one, one, out=out)
    answer["constant b: a tensor, a weight that is not, one that is"] = Extension.constant_b
    warnings.simplefilter("ignore")

    def traced(a, b, one):
        out = torch.empty(M, N)
        sm.scaled_mm(a, b, one, one, out=out)
        return out + 0

    graph = str(torch.jit.trace(traced, (a, b, one), check_trace=False).graph)
    answer["traced"] = "scaled_mm::scaled_mm_out" in graph
    answer["calls while tracing"] = Extension.calls - answer["calls"] - len(weights)
    return answer


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
