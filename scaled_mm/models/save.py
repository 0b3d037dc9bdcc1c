"""`save_pretrained`: a quantized model as a checkpoint that vLLM, SGLang, transformers and `from_pretrained` read."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import torch

from scaled_mm.errors import BadParamError, ScaledMMError
from scaled_mm.models.disk import Names
from scaled_mm.models.load import check_readable
from scaled_mm.models.scheme import FORMATS, Scheme, write
from scaled_mm.nn.block_linear import BlockLinear
from scaled_mm.nn.experts import Int8Experts
from scaled_mm.nn.linear import Int8Linear
from scaled_mm.nn.mlp import GatedMLP
from scaled_mm.nn.norm import RMSNorm

# Linear layers that vLLM and SGLang compute as one, with one scheme and, if static, one input scale.
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"))


@torch.no_grad()
def save_pretrained(model: torch.nn.Module, path: str | os.PathLike, format: str = "compressed-tensors", *, tokenizer=None) -> None:
    """Writes a quantized model of transformers: config.json, safetensors, and the tokenizer if one is given.

    model: from `quantize_`, `from_pretrained` or `convert_`.
    path: a folder, created if necessary. model*.safetensors and their index, config.json and generation_config.json in it are replaced. Other
        *.safetensors, pytorch_model*.bin and adapter_config.json are refused, because a reader might load them.
    format: "compressed-tensors" (vLLM, SGLang, transformers), or "w8a8_int8" (SGLang), which holds dynamic symmetric layers only. transformers 5.24
    reads dense models; int8 experts it cannot read. Int8 layers that transformers would merge on disk (q, k, v of NomicBert; all experts of a layer
    of GraniteMoe) are stored one by one with their names in the model, which vLLM and SGLang may not know.

    Scales are stored in the model's dtype if that is exact, otherwise in float32. Raises BadParamError before a file is written. Its reasons, besides
    the arguments: q, k, v or gate, up of a decoder layer differ in scheme or static scale (vLLM and SGLang would apply one of them to all); or
    `from_pretrained` could not read the model, because its class is not in transformers or it has tensors that its class lacks.
    """
    if format not in FORMATS:
        raise BadParamError(f"format: expected {' or '.join(map(repr, FORMATS))}, got {format!r}")
    if not isinstance(path, (str, os.PathLike)):
        raise BadParamError(f"path: expected a folder, got a {type(path).__name__}")
    if tokenizer is not None and not callable(getattr(tokenizer, "save_pretrained", None)):
        raise BadParamError(f"tokenizer: expected a tokenizer of transformers, got a {type(tokenizer).__name__}")
    if not hasattr(model, "config") or not hasattr(model, "save_pretrained"):
        raise BadParamError(f"model: expected a model of transformers, got a {type(model).__name__}")
    if any(isinstance(module, (RMSNorm, GatedMLP)) for module in model.modules()):
        raise BadParamError("model: expected one without fused modules; save before `fuse_`")
    if any(isinstance(module, BlockLinear) for module in model.modules()):
        raise BadParamError("model: expected one without packed layers of a GGUF file; the file is their checkpoint")
    if any(isinstance(module, (Int8Linear, Int8Experts)) and module.is_shard for module in model.modules()):
        raise BadParamError("model: expected a whole one; save before `parallelize_`")
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    names = Names(model)
    if not names.linears and not names.experts:
        raise BadParamError("model: expected one with int8 layers, got none; `quantize_` makes them")
    _check_together(model, names.linears)
    schemes, kept, tensors = _contents(model, names)
    quantization = write(format, schemes, kept)
    config = model.config.to_dict()
    config = {**config, "quantization_config": quantization, "architectures": [type(model).__name__], "dtype": _dtype(model)}
    if getattr(model, "all_tied_weights_keys", None) and not _tied(model):  # a reader would tie an output head that has weights of its own
        config["tie_word_embeddings"] = False
    configs = {"config.json": json.dumps(_plain(config), indent=2) + "\n"}
    if getattr(model, "generation_config", None) is not None:  # as it is: transformers' own saving refuses some that it has loaded
        configs["generation_config.json"] = model.generation_config.to_json_string()
    _check_readable(configs, tensors)
    folder = check_folder(path)
    _write(configs, tensors, folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def check_savable(model: torch.nn.Module) -> None:
    """BadParamError for a model, quantized or not, whose tensors `save_pretrained` could not name."""
    names = Names(model)
    for name in model.state_dict():
        if name.rpartition(".")[0] not in names.float_experts | names.experts:
            names.of_tensor(name)


def _check_together(model: torch.nn.Module, linears: dict[str, Int8Linear]) -> None:
    parents = {name.rpartition(".")[0] for name in linears}
    for parent in sorted(parents):
        for children in TOGETHER:
            module = model.get_submodule(parent)
            layers = {child: getattr(module, child, None) for child in children}
            facts = {child: _fact(layer) for child, layer in layers.items() if isinstance(layer, torch.nn.Module)}
            if len(set(facts.values())) > 1:
                described = ", ".join(f"{child} {fact}" for child, fact in facts.items())
                raise BadParamError(f"model: expected one scheme and one input scale for {', '.join(facts)} of {parent}, got {described}")


def _fact(layer: torch.nn.Module) -> str:
    if not isinstance(layer, Int8Linear):
        return "not quantized"
    if layer.input_scale is None:
        return str(Scheme(False, layer.symmetric))
    zero = "" if layer.input_zero_point is None else f", zero point {int(layer.input_zero_point)}"
    return f"{Scheme(True, layer.symmetric)} {float(layer.input_scale):.9g}{zero}"


def _check_readable(configs: dict[str, str], tensors: dict[str, torch.Tensor]) -> None:
    """BadParamError for a checkpoint that `from_pretrained` would refuse, before a file is written."""
    with tempfile.TemporaryDirectory() as temporary:
        for name, text in configs.items():
            (Path(temporary) / name).write_text(text)
        try:
            check_readable(Path(temporary), tensors)
        except ScaledMMError as error:
            reason = str(error).replace(f"{temporary}{os.sep}", "").replace(temporary, "the checkpoint")
            raise BadParamError(f"model: expected one whose checkpoint from_pretrained reads, got: {reason}") from None


def _contents(model: torch.nn.Module, names: Names) -> tuple[dict[str, Scheme], list[str], dict[str, torch.Tensor]]:
    """(the scheme of each int8 layer, the linear layers that are not int8, all tensors), by names on disk.

    Linear layers are also listed with their names in the model, where these differ: transformers looks up these, vLLM the names on disk."""
    dtype = _dtype(model)
    schemes: dict[str, Scheme] = {}
    plain: dict[str, torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    quantized = tuple(f"{name}." for name in (*names.linears, *names.experts))
    tied = _tied(model)
    for name, tensor in model.state_dict().items():
        if not name.startswith(quantized) and name not in tied:
            plain[name] = tensor
    kept = []
    for name, module in model.named_modules():
        # Routers of transformers 5 are modules of their own, but linear layers in vLLM and SGLang.
        if isinstance(module, torch.nn.Linear) or (name.endswith(".gate") and hasattr(module, "weight") and module.weight.dim() == 2):
            kept.extend(dict.fromkeys((names.of_module(name), name)))
    for name in names.float_experts:
        kept.extend(names.of_experts(name))
    tensors.update(names.tensors_on_disk(plain))
    for name, layer in names.linears.items():
        disk = names.of_module(name)
        schemes[disk] = schemes[name] = Scheme(layer.input_scale is not None, layer.symmetric)
        tensors.update({f"{disk}.{key}": _stored(value, key, dtype) for key, value in layer.state_dict().items()})
    for name, experts in names.experts.items():
        for disk, (which, expert, half) in names.of_experts(name).items():
            schemes[disk] = Scheme()
            rows = slice(None) if which == "down_proj" else slice(half * experts.intermediate_dim, (half + 1) * experts.intermediate_dim)
            tensors[f"{disk}.weight"] = getattr(experts, which)[expert, rows]
            tensors[f"{disk}.weight_scale"] = _stored(getattr(experts, f"{which}_scale")[expert, rows], "weight_scale", dtype)
    return schemes, kept, tensors


def _tied(model: torch.nn.Module) -> set[str]:
    """The names of parameters that are another one: transformers' list of them is of before someone replaced one."""
    pairs, tensors = dict(getattr(model, "all_tied_weights_keys", None) or {}), dict(model.named_parameters(remove_duplicate=False))
    return {name for name, source in pairs.items() if name in tensors and tensors[name] is tensors.get(source)}


def _stored(value: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor:
    if key not in ("weight_scale", "input_scale"):
        return value
    rounded = value.to(dtype)
    return rounded if torch.equal(rounded.float(), value) else value  # a scale that came as float32 stays float32


def _dtype(model: torch.nn.Module) -> torch.dtype:
    """The dtype of the model's other parameters."""
    quantized = {id(p) for m in model.modules() if isinstance(m, (Int8Linear, Int8Experts)) for p in m.parameters()}
    return next((p.dtype for p in model.parameters() if id(p) not in quantized and p.is_floating_point()), torch.bfloat16)


# Files that `save_pretrained` writes and replaces, and files that a reader might load besides or instead.
OWN = ("model*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json")
FOREIGN = ("*.safetensors", "pytorch_model*.bin", "adapter_config.json")


def check_folder(path: str | os.PathLike, argument: str = "path") -> Path:
    """The folder for a model, created if necessary. Raises BadParamError if it cannot be written to, or has weights of another model."""
    try:
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=folder, prefix=".saving").cleanup()
        own = {file for pattern in OWN for file in folder.glob(pattern)}
        others = sorted(file.name for pattern in FOREIGN for file in folder.glob(pattern) if file not in own)
    except (OSError, TypeError, ValueError) as error:
        raise BadParamError(f"{argument}: expected a folder that can be written to, got {os.fspath(path)!r}: {error}") from None
    for file in sorted(own):
        if file.is_dir():
            raise BadParamError(f"{argument}: expected a file or none, got the folder {file}")
    if others:
        raise BadParamError(f"{argument}: expected a folder without the weights of another model, got {folder} with {', '.join(others[:3])}")
    return folder


def _write(configs: dict[str, str], tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Writes configs, and tensors in files of at most 5 GB, of which one is in memory at a time: the model may be offloaded."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    plan = split_torch_state_dict_into_shards({name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()})
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving") as temporary:  # a full disk leaves the old files
        plain = Path(temporary) / "plain"  # has the permissions of a new file; safetensors' files only their owner may read
        plain.touch()
        mode = plain.stat().st_mode
        plain.unlink()
        for name, inside in plan.filename_to_tensors.items():
            save_file(_apart({one: _alone(tensors[one]) for one in inside}), Path(temporary) / name, metadata={"format": "pt"})
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            configs = {**configs, "model.safetensors.index.json": json.dumps(index, indent=2) + "\n"}
        for name, text in configs.items():
            (Path(temporary) / name).write_text(text)
        for old in [file for pattern in OWN for file in folder.glob(pattern)]:
            old.unlink()
        for written in Path(temporary).iterdir():
            written.chmod(mode)
            written.replace(folder / written.name)


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, contiguous and with a storage of its own: an expert is a part of a larger one."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, those of modules that share a parameter copied: safetensors refuses shared memory."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        found[name] = tensor.clone() if tensor.numel() and tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return found


def _plain(value: object) -> object:
    """Values for JSON: dtypes as their names."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
