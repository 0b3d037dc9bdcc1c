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
from scaled_mm.core.operators import Product
from scaled_mm.products import codes
from scaled_mm.products.gemm import GEMM
from scaled_mm.products.grouped import GROUPED

M, N, K = 4, 8, 16


def load(path: str):
    loader = importlib.machinery.ExtensionFileLoader("scaled_mm_fast", path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("scaled_mm_fast", loader))
    loader.exec_module(module)
    tensors, allocate = (torch.Tensor, torch.nn.Parameter), lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype)
    mode = torch.is_inference_mode_enabled
    assert module.bind(*tensors, fast.increment_version, mode, workspace_of_one_call, allocate, torch.int8, ())
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
    status = module.calculate(plan.value, codes.GEMM, 0, STREAM, None, (out, a, b, a_scale, b_scale, *[None] * 5))
    if status is NotImplemented:
        return "left"
    expected = reference.scaled_mm(a, b, a_scale, b_scale.clone(), out_dtype=torch.float32)
    assert before is None or out._version == before + 1
    return "right" if status is None and torch.equal(out, expected) else "wrong"


def workspace_of_one_call(size: int, device: int) -> torch.Tensor:
    asked.append(size)
    return torch.empty(size, dtype=torch.int8)


asked: list[int] = []


def run(core: Core, module, product: Product, **operands: torch.Tensor) -> str:
    """What a call, planned and forgotten, comes to: right, left to the operator, or a status."""
    inputs = tuple(operands.get(name) for name in product.spec.input_names)
    shape = product.spec.out_shape(*inputs)
    out = torch.full(shape, float("nan"))
    status = module.run(core.handle.value, product.spec.code, 0, False, 0, (out, *inputs))
    if status is NotImplemented:
        return "left"
    expected = getattr(reference, product.spec.name)(**operands, out_dtype=torch.float32)
    return f"status {status}" if status is not None else "right" if torch.equal(out, expected) else "wrong"


def makes(core: Core, module, product: Product, **operands: torch.Tensor) -> str:
    """The outcome of a call for which the extension allocates out: right, wrong, left (to Python), or a status."""
    inputs = tuple(operands.get(name) for name in product.spec.input_names)
    made = module.multiply(core.handle.value, product.spec.code, 0, False, torch.float32, product.spec.matrix_dimensions, 0, inputs)
    if not isinstance(made, torch.Tensor):
        return "left" if made is NotImplemented else f"status {made}"
    expected = getattr(reference, product.spec.name)(**operands, out_dtype=torch.float32)
    return "right" if torch.equal(made, expected) and made.stride() == expected.stride() else "wrong"


def runs(core: Core, module) -> dict:
    a, b, scale = torch.randint(-9, 9, (M, K), dtype=torch.int8), torch.randint(-9, 9, (2, N, K), dtype=torch.int8).transpose(1, 2), torch.ones(1)
    zero = torch.full((M,), 3, dtype=torch.int32)
    plain = dict(a=a, b=b[0], a_scale=scale, b_scale=scale)
    grouped = dict(a=a, b=b, a_scale=scale, b_scale=scale, expert_offsets=torch.tensor([1, M], dtype=torch.int32))
    answer = {"plain": run(core, module, GEMM, **plain), "plain workspaces": len(asked)}
    answer["zero points"] = run(core, module, GEMM, **plain, a_zero_point=zero)
    answer["workspaces"] = asked[:]
    answer["grouped"] = run(core, module, GROUPED, **grouped)
    answer["made"] = {
        "plain": makes(core, module, GEMM, **plain),
        "zero points": makes(core, module, GEMM, **plain, a_zero_point=zero),
        "grouped": makes(core, module, GROUPED, **grouped),
        "no rows": makes(core, module, GEMM, **{**plain, "a": a[:0]}),
        "no columns": makes(core, module, GEMM, **{**plain, "b": b[0][:, :0]}),
        "another K": makes(core, module, GEMM, **{**plain, "a": a[:, 1:]}),
        "a batch": makes(core, module, GEMM, **{**plain, "a": a.expand(2, M, K)}),
        "a batch of b": makes(core, module, GEMM, **{**plain, "b": b}),
        "no b": makes(core, module, GEMM, **{**plain, "b": None}),
        "negated": makes(core, module, GEMM, **{**plain, "b_scale": torch._neg_view(scale)}),
    }
    answer["without offsets"] = (
        "left"
        if module.run(core.handle.value, GROUPED.spec.code, 0, False, 0, (torch.empty(M, N), a, b, scale, scale, *[None] * 6)) is NotImplemented
        else "run"
    )
    try:
        module.run(core.handle.value, 0, 0, False, 0, [a, b])
    except TypeError as error:
        answer["a list"] = str(error)
    answer["twelve"] = "left" if module.run(core.handle.value, 0, 0, False, 0, (a,) * 12) is NotImplemented else "run"
    return answer


class Extension:
    """Stands in for the extension where there is no stream: writes sevens past torch's dispatcher."""

    calls, constant_b = 0, []

    def run(self, handle, code, device, constant_b, option, tensors):
        Extension.calls += 1
        Extension.constant_b.append(constant_b)
        torch.from_numpy(tensors[0].detach().numpy()).fill_(7.0)


def pretend_to_be_cuda() -> None:
    fast.module = Extension()
    fast.handle_address = lambda device: 0
    torch.Tensor.get_device = lambda self: 0


def main(kernels: str, extension: str) -> dict:
    core, module = Core(kernels), load(extension)
    ran = runs(core, module)
    complex_scale = torch.rand(N, dtype=torch.complex64)
    answer = {
        "runs": ran,
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
