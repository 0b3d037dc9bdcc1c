"""Checks of models and checkpoints that run on every rank of a group of processes (`worker.py`). Each raises where it fails."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from operands.tiny_models import EXPERTS, MLA, MODELS, SIZES, distance, logits, tiny, tokens, transformers
from safetensors.torch import load_file, save_file

import scaled_mm as sm
from scaled_mm import nn, parallel
from scaled_mm.models import load

WHOLE_VECTORS = 384  # a feed-forward network whose parts on 2, 3 and 4 ranks are multiples of parallel.model.VECTOR


def a_whole_model_has_the_bits_of_one_process(rank, size):
    heads = {
        "num_attention_heads": 12,
        "num_key_value_heads": 12 if size == 4 else size,
        "head_dim": 8,
        "intermediate_size": WHOLE_VECTORS,
        "hidden_size": 96,
    }
    for kind in ("Llama", "Qwen3"):
        config = getattr(transformers, f"{kind}Config")(**{**SIZES, **heads}, attention_bias=True)
        torch.manual_seed(0)
        whole = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, dtype=torch.float32).eval()
        sm.quantize_(whole, sm.Int8Config(), tokens(), progress=False)
        want = [logits(whole, ids) for ids in tokens(2)]
        options = dict(max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)
        text = whole.generate(tokens()[0][:, :5], **options)
        split = parallel.parallelize_(whole)
        down = split.model.layers[0].mlp.down_proj  # 96 x 384: N is divided and the input gathered, if the ranks divide 96
        assert down.weight.shape == (96 // size, WHOLE_VECTORS) and down.input_is_parallel and down.gather_output
        assert all(torch.equal(logits(split, ids), one) for ids, one in zip(tokens(2), want, strict=True))
        assert torch.equal(split.generate(tokens()[0][:, :5], **options), text)
        assert sm.fuse_(split).mlps == [] and distance(logits(split, tokens()[0]), want[0]) < 0.05
        with pytest.raises(sm.BadParamError, match="model: expected a whole one, got model.layers.0.self_attn.q_proj that is split already"):
            parallel.parallelize_(split)
        with pytest.raises(sm.BadParamError, match="without fused modules|save before `parallelize_`"):
            sm.save_pretrained(split, "/nowhere")


def mixtures_have_the_bits_of_one_process(rank, size):
    """Experts alone, with a shared one, and with DeepSeek's attention; whole models and greedy text. 10 experts are not divided evenly."""

    heads = {"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 8, "hidden_size": 96, "intermediate_size": WHOLE_VECTORS}
    deepseek = MODELS["deepseek"][1] | MLA | dict(n_routed_experts=10, num_key_value_heads=12, n_shared_experts=3)
    of_models = [
        ("Mixtral", dict(num_local_experts=10)),
        ("Qwen2Moe", dict(num_experts=10, shared_expert_intermediate_size=WHOLE_VECTORS, **EXPERTS)),
        ("DeepseekV3", deepseek),
        ("DeepseekV3", deepseek | dict(q_lora_rank=None)),
    ]
    for kind, fields in of_models:
        sizes = {**SIZES, **heads, **fields}
        if kind != "Mixtral":
            sizes.pop("head_dim")
        config = getattr(transformers, f"{kind}Config")(**sizes)
        torch.manual_seed(0)
        whole = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, dtype=torch.float32).eval()
        sm.quantize_(whole, progress=False)
        want = [logits(whole, ids) for ids in tokens(2)]
        split = parallel.parallelize_(whole)
        experts = next(module for module in split.modules() if isinstance(module, parallel.ExpertParallelInt8Experts))
        assert experts.down_proj.shape[0] == len(range(10)[parallel.part_of(10, rank, size)]) and experts.global_num_experts == 10
        assert all(torch.equal(logits(split, ids), one) for ids, one in zip(tokens(2), want, strict=True)), kind
        with pytest.raises(sm.BadParamError, match="save before `parallelize_`"):
            sm.save_pretrained(split, "/nowhere")


def feed_forward_networks_are_split_alone(rank, size):
    """The sizes of SmolLM2-135M, whose 9 heads allow 3 ranks only; its feed-forward networks 2, 4 and 8."""

    heads = dict(num_attention_heads=9, num_key_value_heads=3, hidden_size=576, intermediate_size=1536)
    config = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=2, tie_word_embeddings=True, **heads)
    torch.manual_seed(0)
    whole = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    sm.quantize_(whole, progress=False)
    want = [logits(whole, ids) for ids in tokens(2)]
    if size != 3:
        with pytest.raises(sm.BadParamError, match="group: expected a number of ranks that divides the [93] heads of .*attention=False"):
            parallel.parallelize_(whole)
    split = parallel.parallelize_(whole, attention=size == 3)
    attention = split.model.layers[1].self_attn.o_proj
    assert split.model.layers[1].mlp.up_proj.weight.shape == (1536 // size, 576) and attention.out_features == (192 if size == 3 else 576)
    assert all(torch.equal(logits(split, ids), one) for ids, one in zip(tokens(2), want, strict=True))


def compiled_models_have_the_bits_of_eager_ones(rank, size):
    """Linear layers in one graph; models, dense and with experts, with the graph breaks of transformers only."""
    x = torch.randn(6, 48, generator=torch.Generator().manual_seed(0))
    weight, scale = sm.quantize_int8(torch.randn(8, 48, generator=torch.Generator().manual_seed(1)), dim="channel")
    mine = parallel.part_of(48, rank, size)
    for reduce in ("all_reduce", "reduce_scatter"):
        layer = parallel.RowParallelInt8Linear.from_shard(weight[:, mine].contiguous(), scale, reduce=reduce)
        assert torch.equal(torch.compile(layer, fullgraph=True)(x[:, mine]), layer(x[:, mine]))
        torch._dynamo.reset()
    heads = {"num_attention_heads": 12, "num_key_value_heads": 12, "hidden_size": 96, "intermediate_size": WHOLE_VECTORS}
    for kind, fields in {"Llama": {}, "Qwen2Moe": dict(num_experts=10, shared_expert_intermediate_size=WHOLE_VECTORS, **EXPERTS)}.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**{**SIZES, **heads, **fields})
        model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, dtype=torch.float32).eval()
        sm.quantize_(model, progress=False)
        want = logits(model, tokens()[0])
        split = torch.compile(parallel.parallelize_(model), backend="aot_eager")
        assert torch.equal(logits(split, tokens()[0]), want)
        torch._dynamo.reset()


def checkpoints_are_read_in_parts(rank, size):
    """Dense, with biases and static scales, and with experts: the logits of the whole checkpoint, and each rank reads its part only."""

    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32, "rope_theta": 1e4}
    for kind, fields in {
        "Llama": dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, rope_parameters=rope),
        "Qwen2Moe": dict(num_experts=10, shared_expert_intermediate_size=WHOLE_VECTORS, **EXPERTS),
    }.items():
        folder, mesh = (
            a_checkpoint(rank, kind, "static" if kind == "Llama" else "dynamic", **fields),
            torch.distributed.init_device_mesh("cpu", (size,)),
        )
        with counted_bytes(load._Files) as of_whole:
            whole = sm.from_pretrained(folder)
        with counted_bytes(load._Files) as of_rank:
            split = sm.from_pretrained(folder, tp=mesh)
        assert all(torch.equal(logits(split, ids), logits(whole, ids)) for ids in tokens(2))
        gathers = whole.config.hidden_size % size == 0
        o_proj = split.model.layers[1].self_attn.o_proj
        assert type(o_proj) is (parallel.ColumnParallelInt8Linear if gathers else parallel.RowParallelInt8Linear)
        weights = sum(module.weight.numel() for module in whole.modules() if isinstance(module, nn.Int8Linear))
        experts = [module for module in whole.modules() if isinstance(module, nn.Int8Experts)]
        kept = sum(len(range(10)[parallel.part_of(10, rank, size)]) / 10 * 3 * module.down_proj.numel() for module in experts)
        saved = weights * (1 - 1 / size) + sum(3 * module.down_proj.numel() for module in experts) - kept
        assert of_rank[0] <= of_whole[0] - saved  # scales and biases are read in part too
        undivided = sm.from_pretrained(folder, tp=mesh, tp_attention=False)
        assert type(undivided.model.layers[1].self_attn.o_proj) is nn.Int8Linear
        assert torch.equal(logits(undivided, tokens()[0]), logits(whole, tokens()[0]))


def checkpoints_that_cannot_be_split_are_refused_on_all(rank, size):
    folder, group = a_checkpoint(rank, "Llama", "dynamic"), torch.distributed.group.WORLD
    other, permuted = Path(shared_folder("other")), Path(shared_folder("permuted"))
    if rank == 1:
        for copied in (other, permuted):
            shutil.copytree(folder, copied)
        tensors = load_file(folder + "/model.safetensors")
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()  # the same bytes in another order
        save_file(tensors, permuted / "model.safetensors", metadata={"format": "pt"})
        (other / "config.json").write_text(json.dumps(json.loads((other / "config.json").read_text()) | {"rms_norm_eps": 1e-3}))
    for message, at in (
        ("path: expected a folder with a checkpoint", f"{folder}/none" if rank == 1 else folder),
        ("path: expected the same config rms_norm_eps on all . ranks, got 1e-06, 0.001", str(other) if rank == 1 else folder),
        ("path: expected the same content on all", str(permuted) if rank == 1 else folder),
        ("attention that computes each head by itself", a_checkpoint(rank, "DiffLlama", "dynamic", attn_implementation="sdpa")),
    ):
        with pytest.raises(sm.BadParamError, match=message):
            sm.from_pretrained(at, tp=group)
    with pytest.raises(sm.BadParamError, match="tp_attention: expected the same .*on all"):
        sm.from_pretrained(folder, tp=group, tp_attention=rank != 1)
    with pytest.raises(sm.BadParamError, match="group: expected a process group, a DeviceMesh or None, got int"):
        sm.from_pretrained(folder, tp=size)


def a_checkpoint(rank: int, kind: str, activation: str, attn_implementation: str | None = None, **fields) -> str:
    """A folder with a small quantized model whose heads 2, 3 and 4 ranks can divide, which rank 0 has written."""

    folder = shared_folder(kind)
    if rank == 0:
        heads = {"num_attention_heads": 12, "num_key_value_heads": 12, "hidden_size": 96, "intermediate_size": WHOLE_VECTORS}
        config = getattr(transformers, f"{kind}Config")(**{**SIZES, **heads, **fields})
        torch.manual_seed(0)
        made = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, dtype=torch.bfloat16, attn_implementation=attn_implementation).eval()
        sm.quantize_(made, sm.Int8Config(activation=activation), tokens(), progress=False)
        sm.save_pretrained(made, folder)
    torch.distributed.barrier()
    return folder


def shared_folder(name: str) -> str:
    """A folder for all ranks, beside the results."""
    return str(Path(sys.argv[3]) / name)


@contextlib.contextmanager
def counted_bytes(files):
    """[bytes that `files.load` returns]."""
    count, load = [0], files.load

    def counting(*args):
        tensor = load(*args)
        count[0] += tensor.numel() * tensor.element_size()
        return tensor

    files.load = counting
    try:
        yield count
    finally:
        files.load = load


def models_that_cannot_be_split_are_refused(rank, size):

    with pytest.raises(sm.BadParamError, match="model: expected int8 experts, got float ones in model.layers.0.mlp.experts"):
        parallel.parallelize_(tiny("qwen3_moe"))
    model = tiny("llama")
    with pytest.raises(sm.BadParamError, match="model: expected an Int8Linear model.layers.0.self_attn.q_proj, got Linear"):
        parallel.parallelize_(model)
    sm.quantize_(model, progress=False)
    if size in (3, 4):  # 4 heads of query, 2 of key and value
        with pytest.raises(sm.BadParamError, match=r"a number of ranks that divides the \d heads of model.layers.0.self_attn.[qk]_proj, got"):
            parallel.parallelize_(model)
    assert type(model.model.layers[0].mlp.down_proj) is nn.Int8Linear
    heads = {"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 8, "hidden_size": 96}
    config = transformers.LlamaConfig(**{**SIZES, **heads})
    model, eager = (transformers.LlamaForCausalLM._from_config(copy.deepcopy(config), attn_implementation=name) for name in ("sdpa", "eager"))
    sm.quantize_(model, progress=False)
    for message, made in (
        ("model: expected a torch.nn.Module, got NoneType", None if rank == 1 else model),
        ("model: expected attn_implementation='sdpa'", eager),
    ):
        with pytest.raises(sm.BadParamError, match=message):
            parallel.parallelize_(made)
    for kind in ("DiffLlama", "Olmo2"):
        config = getattr(transformers, f"{kind}Config")(**{**SIZES, **heads})
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
        sm.quantize_(model, progress=False)
        before = logits(model, tokens()[0])
        with pytest.raises(sm.BadParamError, match="model: expected attention that computes each head by itself, got"):
            parallel.parallelize_(model)
        assert torch.equal(logits(model, tokens()[0]), before)
        if rank == 1:
            model.model.norm.weight.data.mul_(2)
        with pytest.raises(sm.BadParamError, match="model: expected the same on all"):
            parallel.parallelize_(model)
