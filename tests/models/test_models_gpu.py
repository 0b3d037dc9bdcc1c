"""Quantized models on a GPU: the bits of the CPU in every module, the same decisions, the same greedy text."""

from __future__ import annotations

import copy

import pytest
import torch
from operands.tiny_models import distance, logits, tiny, tokens

import scaled_mm as sm
from scaled_mm import nn

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["llama with biases", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_int8_module_has_the_bits_of_the_cpu(name, dtype):
    model = tiny(name, dtype)
    sm.quantize_(model, sm.Int8Config(), tokens(), progress=False)
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Int8Linear):
            inputs = (torch.randn(2, 5, module.in_features, generator=generator).to(dtype),)
        elif isinstance(module, nn.Int8Experts):
            ids = torch.randint(0, module.num_experts, (5, 2), generator=generator)
            inputs = torch.randn(5, module.hidden_dim, generator=generator).to(dtype), ids, torch.rand(5, 2, generator=generator)
        else:
            continue
        on_gpu = copy.deepcopy(module).cuda()
        for _ in range(2):  # the second call has the prepared weight
            assert torch.equal(on_gpu(*(tensor.cuda() for tensor in inputs)).cpu(), module(*inputs))


def test_a_weight_that_is_written_to_is_prepared_again():
    model = tiny("llama").cuda()
    sm.quantize_(model, progress=False)
    layer = model.model.layers[0].mlp.down_proj
    x = torch.randn(3, 96, device="cuda")
    before = layer(x)
    with torch.no_grad():
        layer.weight.neg_()
    assert torch.equal(layer(x), -before)


@pytest.mark.parametrize("where", ["model", "device"])
def test_the_gpu_decides_what_the_cpu_decides(where):
    """Errors differ in their last digits, because float products do."""
    on_cpu, on_gpu = tiny("llama"), tiny("llama").to("cuda" if where == "model" else "cpu")
    reports = [
        sm.quantize_(on_cpu, sm.Int8Config(), tokens(), progress=False),
        sm.quantize_(on_gpu, sm.Int8Config(), tokens(), progress=False, device="cuda"),
    ]
    assert reports[0].exponents == reports[1].exponents
    for ours, theirs in zip(*(report.layers for report in reports)):
        assert (ours.name, ours.scheme, ours.rule, ours.smooth) == (theirs.name, theirs.scheme, theirs.rule, theirs.smooth)
        assert ours.error == pytest.approx(theirs.error, rel=1e-3)
    for (name, cpu), gpu in zip(on_cpu.state_dict().items(), on_gpu.state_dict().values()):
        same = torch.equal if cpu.dtype is torch.int8 else lambda a, b: torch.allclose(a, b, rtol=1e-5)
        assert same(cpu, gpu.cpu()), name


@pytest.mark.parametrize("fused", [False, True])
def test_logits_stay_near_and_greedy_text_is_that_of_the_cpu(fused):
    model, ids = tiny("llama"), tokens()[0]
    sm.quantize_(model, sm.Int8Config(), tokens(), progress=False)
    if fused:
        sm.fuse_(model)
    on_gpu = copy.deepcopy(model).cuda()
    assert distance(logits(on_gpu, ids.cuda()).cpu(), logits(model, ids)) < 1e-3
    options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert torch.equal(on_gpu.generate(ids.cuda(), **options).cpu(), model.generate(ids, **options))


def test_a_quantized_model_compiles_as_one_graph_by_inductor():
    model, ids = tiny("llama", torch.bfloat16), tokens()[0].cuda()
    sm.quantize_(model, sm.Int8Config(), tokens(), progress=False)
    model = model.cuda()
    compiled = torch.compile(model, fullgraph=True)
    assert distance(logits(compiled, ids), logits(model, ids)) < 0.02
