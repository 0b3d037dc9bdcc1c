"""Checks with tensors on GPUs (`worker.py`): a process for each GPU with NCCL, or several on one GPU with gloo. What is wanted is computed by one
process on a CPU, or for whole models on a GPU. Each raises where it fails."""

from __future__ import annotations

import sys

import torch
from expert_checks import EXPERTS, mixture
from linear_checks import K, N, operands, part

import scaled_mm as sm
from scaled_mm import nn, parallel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU these checks can be tried


def on_gpu(*tensors):
    return tuple(None if tensor is None else tensor.to(DEVICE) for tensor in tensors)


def linear_layers_have_the_bits_of_a_cpu(rank, size):
    static = {"input_scale": torch.tensor([0.31]), "input_zero_point": torch.tensor([-9], dtype=torch.int8)}
    columns = part(K, rank, size)
    for tokens, dtype in ((0, torch.float32), (1, torch.bfloat16), (7, torch.float32), (300, torch.float16)):
        x, weight, scale, bias = operands(tokens, dtype)
        rows = parallel.part_of(tokens, rank, size)
        for inputs in ({}, static):
            want = sm.int8_linear(x, weight, scale, bias, **inputs)
            given = {name: tensor.to(DEVICE) for name, tensor in inputs.items()}
            of_x, of_weight, *rest = on_gpu(x, weight, scale, bias)
            shards = of_x[:, columns], of_weight[:, columns], *rest  # with strides
            for chunks in (1, 3):
                for via in parallel.choice.VIA:
                    assert torch.equal(parallel.all_reduce_linear(*shards, **given, via=via, chunks=chunks).cpu(), want)
                assert torch.equal(parallel.reduce_scatter_linear(*shards, **given, chunks=chunks).cpu(), want[rows])
            made = parallel.RowParallelInt8Linear.from_shard(shards[1].contiguous(), *shards[2:], reduce="all_reduce", **given)
            assert torch.equal(made(shards[0]).cpu(), want)
        q, of_rows = on_gpu(*sm.quantize_int8(x))
        made = parallel.RowParallelInt8Linear.from_shard(shards[1].contiguous(), *shards[2:], reduce="reduce_scatter")
        y = made(nn.QuantizedActivation(q[:, columns], of_rows, x.dtype))
        want = sm.int8_linear(x, weight, scale, bias)
        assert torch.equal(y.cpu(), want[rows]) and torch.equal(parallel.all_gather_rows(y, tokens).cpu(), want)
        gathers = parallel.ColumnParallelInt8Linear.from_shard(*on_gpu(weight[part(N, rank, size)], scale[part(N, rank, size)]), gather_output=True)
        assert torch.equal(gathers(x.to(DEVICE)).cpu(), sm.int8_linear(x, weight, scale))


def gathered_inputs_have_the_bits_of_a_cpu(rank, size):
    """With NCCL also captured in a CUDA graph, and replayed with other inputs."""
    import torch.distributed as dist

    static = {"input_scale": torch.tensor([0.31]), "input_zero_point": torch.tensor([-9], dtype=torch.int8)}
    columns, rows = part(K, rank, size), part(N, rank, size)
    for tokens, dtype in ((0, torch.float32), (1, torch.bfloat16), (7, torch.float32), (300, torch.float16)):
        x, weight, scale, bias = operands(tokens, dtype)
        of_x, *shards = on_gpu(x[:, columns], weight[rows], scale[rows], bias[rows])
        prepared = sm.prepare_weight(shards[0].contiguous().t())
        q, of_rows = on_gpu(*sm.quantize_int8(x))
        for inputs in ({}, static):
            want = sm.int8_linear(x, weight, scale, bias, **inputs)
            given = {name: tensor.to(DEVICE) for name, tensor in inputs.items()}
            for way in parallel.choice.GATHER_INPUT:
                for w in (shards[0], prepared):
                    assert torch.equal(parallel.gather_linear(of_x, w, *shards[1:], **given, gather_input=way).cpu(), want)
                mine = parallel.gather_linear(of_x, *shards, **given, gather_input=way, gather_output=False)
                assert torch.equal(mine.cpu(), want[:, rows])
            for way in (None, *parallel.choice.GATHER_INPUT):
                options = dict(input_is_parallel=True, gather_output=True, gather_input=way)
                made = parallel.ColumnParallelInt8Linear.from_shard(*shards, **given, **options)
                assert torch.equal(made(of_x).cpu(), want)
                y = made(nn.QuantizedActivation(q[:, columns], of_rows, x.dtype))
                assert torch.equal(y.cpu(), sm.int8_linear(x, weight, scale, bias))
                if DEVICE == "cpu" or tokens == 0 or "nccl" not in dist.get_backend_config():
                    continue
                graph, fixed = torch.cuda.CUDAGraph(), of_x.clone()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog queries events in a thread of its own
                    y = made(fixed)
                other = x.flip(0) * 3
                fixed.copy_(other[:, columns])
                graph.replay()
                assert torch.equal(y.cpu(), sm.int8_linear(other, weight, scale, bias, **inputs))


def gathered_rows_with_a_nan_arrive(rank, size):
    x, weight, scale, _ = operands(5)
    x[1, 2], x[3, K - 1] = float("nan"), float("-inf")
    shards = on_gpu(x[:, part(K, rank, size)], weight[part(N, rank, size)], scale[part(N, rank, size)])
    want = sm.int8_linear(x, weight, scale)
    for way in parallel.choice.GATHER_INPUT:
        found = parallel.gather_linear(*shards, gather_input=way).cpu()
        assert torch.equal(found[[0, 2, 4]], want[[0, 2, 4]]) and found[[1, 3]].isnan().all()


def rows_with_a_nan_arrive_on_every_rank(rank, size):
    x, weight, scale, _ = operands(5)
    x[1, 2], x[3, K - 1] = float("nan"), float("-inf")
    columns = part(K, rank, size)
    found = parallel.all_reduce_linear(*on_gpu(x[:, columns], weight[:, columns], scale)).cpu()
    want = sm.int8_linear(x, weight, scale)
    assert torch.equal(found[[0, 2, 4]], want[[0, 2, 4]]) and found[[1, 3]].isnan().all() and want[[1, 3]].isnan().all()


def a_descriptor_has_the_bits_of_a_cpu(rank, size):
    """With NCCL also captured in a CUDA graph, and replayed with other inputs."""
    import torch.distributed as dist

    columns = part(K, rank, size)
    with sm.Handle(DEVICE) as handle:
        for tokens, chunks in ((64, 1), (7, None), (100, 3)):
            x, weight, scale, bias = operands(tokens, torch.bfloat16)
            rows = parallel.part_of(tokens, rank, size)
            out = torch.empty(rows.stop - rows.start, N, dtype=torch.bfloat16, device=DEVICE)
            shards = on_gpu(x[:, columns].contiguous(), weight[:, columns].contiguous(), scale, bias)
            given = dict(out=out, **dict(zip(("x_shard", "weight_shard", "weight_scale", "bias"), shards)))
            with parallel.create_reduce_scatter_linear_descriptor(handle, **given, chunks=chunks) as descriptor:
                workspace = torch.full((descriptor.workspace_size,), 77, dtype=torch.uint8, device=DEVICE)
                descriptor.calculate(**given, workspace=workspace)
                assert torch.equal(out.cpu(), sm.int8_linear(x, weight, scale, bias)[rows])
                if DEVICE == "cpu" or "nccl" not in dist.get_backend_config():
                    continue
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog queries events in a thread of its own
                    descriptor.calculate(**given, workspace=workspace)
                other = x.flip(0) * 3
                shards[0].copy_(other[:, columns])
                out.zero_()
                graph.replay()
                assert torch.equal(out.cpu(), sm.int8_linear(other, weight, scale, bias)[rows])


def experts_have_the_bits_of_a_cpu(rank, size):
    for tokens, dtype, block in ((0, torch.float32, False), (1, torch.bfloat16, False), (40, torch.bfloat16, True), (40, torch.float32, False)):
        x, w13, w13_scale, w2, w2_scale, weights, ids = mixture(tokens, dtype, EXPERTS, block)
        want = sm.fused_experts(x, w13, w13_scale, w2, w2_scale, weights, ids, block_scales=block)
        mine, options = parallel.part_of(EXPERTS, rank, size), dict(global_num_experts=EXPERTS, block_scales=block)
        shards = on_gpu(w13[mine], w13_scale[mine], w2[mine], w2_scale[mine])
        x, weights, ids = on_gpu(x, weights, ids)
        assert torch.equal(parallel.all_reduce_experts(x, *shards, weights, ids, **options).cpu(), want)
        for rows in (part(tokens, rank, size), slice(0, tokens if rank == 0 else 0)):
            assert torch.equal(parallel.all_to_all_experts(x[rows], *shards, weights[rows], ids[rows], **options).cpu(), want[rows])


def models_have_the_bits_of_one_process(rank, size):
    """Dense and with experts: quantized and split, and read in parts from a checkpoint. Heads of 64, for torch's flash attention."""
    from operands.tiny_models import EXPERTS, SIZES, logits, tokens, transformers

    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 256, "intermediate_size": 96}
    for kind, fields in {"Llama": {}, "Qwen2Moe": dict(num_experts=10, shared_expert_intermediate_size=48, **EXPERTS)}.items():
        config = getattr(transformers, f"{kind}Config")(**{**SIZES, **heads, **fields})
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, dtype=torch.bfloat16).eval()
        sm.quantize_(model, progress=False)
        folder = f"{sys.argv[3]}/{kind}"
        if rank == 0:
            sm.save_pretrained(model, folder)
        torch.distributed.barrier()
        model, ids = model.to(DEVICE), tokens()[0].to(DEVICE)
        want = logits(model, ids)
        text = dict(max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)
        written = model.generate(ids[:, :5], **text)
        for split in (parallel.parallelize_(model), sm.from_pretrained(folder, device=DEVICE, tp=torch.distributed.group.WORLD)):
            assert torch.equal(logits(split, ids), want)
            assert torch.equal(split.generate(ids[:, :5], **text), written)
