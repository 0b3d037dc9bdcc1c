"""`from_pretrained`: a W8A8 checkpoint as a model of transformers with int8 layers."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from scaled_mm.core import checks
from scaled_mm.errors import BadParamError, BadTensorDtypeError, BadTensorShapeError, ScaledMMError
from scaled_mm.models.blocks import activation_of, replace
from scaled_mm.models.disk import Names
from scaled_mm.models.saving import refuse_own_saving
from scaled_mm.models.scheme import Scheme, Schemes, read
from scaled_mm.nn.experts import Int8Experts
from scaled_mm.nn.linear import Int8Linear

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@torch.no_grad()
def from_pretrained(
    path: str | os.PathLike,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    tp: object = None,
    tp_attention: bool = True,
) -> torch.nn.Module:
    """The model of a W8A8 checkpoint, dense or with experts, whose linear layers are `nn.Int8Linear` and experts `nn.Int8Experts`.

    path: a folder, or a name on the Hugging Face hub. Formats: compressed-tensors with int8 weights of each channel or tensor and inputs of each
    token (dynamic) or of the tensor (static), symmetric or not; w8a8_int8 of SGLang.
    dtype: of what is not quantized; default: the checkpoint's. Tensors that transformers keeps in float32 get float32, unless the checkpoint has them
    in this dtype. device: default: the CPU.
    tp: a `DeviceMesh` with one dimension or a process group: the model is split over its ranks as by `parallel.parallelize_`, whose limits hold, and
    each rank reads its part of the split tensors only. A collective: all ranks must call it.
    tp_attention: False: attention stays whole on every rank, so the number of ranks need not divide its heads.

    Every tensor's presence, shape and dtype is checked before a tensor is loaded. Raises BadParamError, BadTensorShapeError or BadTensorDtypeError
    that names the file, and the tensor or the key of the config; with tp on all ranks, also if configs, names and shapes of tensors, or tensors that
    all ranks read differ.
    """
    if tp is not None:
        from scaled_mm.parallel.load import load_split

        return load_split(path, dtype, device, tp, tp_attention)
    where = checks.device("cpu" if device is None else device)
    checks.usable_device(where)
    checkpoint = opened(path, dtype)
    checkpoint.fill(where)
    return checkpoint.finished(where)


_WEIGHT_ZERO_POINT = ".weight_zero_point"
#: (dimension, part) of a parameter by its name in the model, for those that are loaded in part.
Cuts = Mapping[str, tuple[int, slice]]


class Checkpoint:
    """A checkpoint whose tensors were checked, and its model: with int8 modules, on the meta device until they are filled."""

    def __init__(self, folder: Path, model: torch.nn.Module):
        self.folder, self.model, self._files = folder, model, _Files(folder)
        self._plan = _plan(model, self._files)
        self._check_zero_points_of_weights()
        self._keep_wide()

    def _check_zero_points_of_weights(self) -> None:
        """Some writers store them for symmetric weights, too. No scheme that is read has others than 0."""
        for name, path in self._files.file_of.items():
            if name.endswith(_WEIGHT_ZERO_POINT) and bool((found := self._files.load(name)).any()):
                values = f"{found.min().item()} to {found.max().item()}"
                raise BadParamError(f"{path}: {name}: expected only 0, since int8 weights are symmetric, got {values}")

    def tensors(self) -> list[tuple[str, str, list[int]]]:
        """(name, dtype, shape) of all tensors on disk."""
        return self._files.described()

    def fill(self, device: torch.device, cuts: Cuts | None = None) -> None:
        """Loads the tensors into the model's parameters and buffers. cuts: parameters of which a part is loaded, into a module of that size."""
        for name, pieces in self._plan.items():
            _assign(self.model, name, self._files, pieces, device, (cuts or {}).get(name))

    def finished(self, device: torch.device | str | None) -> torch.nn.Module:
        """The model, once it is filled."""
        model = self.model
        self._tie()
        left = [name for name, tensor in model.named_parameters() if tensor.is_meta]
        if left:
            raise BadParamError(f"{self.folder}: expected the tensors of {', '.join(left[:3])}, got none")
        refuse_own_saving(model)
        return model.to("cpu" if device is None else device).eval()

    def _keep_wide(self) -> None:
        """Casts to float32 what transformers keeps in float32 in models of 16 bits, unless the file has it in the model's dtype."""
        from transformers.core_model_loading import build_glob_alternation

        kept = self.model._get_dtype_plan(self.model.config.dtype)
        if not kept:
            return
        pattern = build_glob_alternation(list(kept))[0]
        for name, pieces in self._plan.items():
            parent, _, child = name.rpartition(".")
            tensor = getattr(self.model.get_submodule(parent), child)
            if tensor.is_floating_point() and pattern.search(name) and self._files.kind(pieces[0][0])[1] is not tensor.dtype:
                tensor.data = tensor.float()

    def _tie(self) -> None:
        """Ties weights, but for those that the checkpoint has with other values, as transformers does."""
        model, tied = self.model, getattr(self.model, "all_tied_weights_keys", None) or {}
        for name, source in list(tied.items()):
            if name in self._plan and source in self._plan and not torch.equal(model.get_parameter(name), model.get_parameter(source)):
                del tied[name]
                model.config.tie_word_embeddings = False
        model.tie_weights(recompute_mapping=False)


def opened(path: str | os.PathLike, dtype: torch.dtype | None) -> Checkpoint:
    """A checkpoint that was checked, of which no tensor is loaded. See `from_pretrained`."""
    folder = _folder(path)
    return Checkpoint(folder, _int8_skeleton(folder, dtype))


def check_readable(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises what `from_pretrained` would, if the tensors were written to a folder that has the configs."""
    _plan(_int8_skeleton(folder, None, shapes_only=True), _Unwritten(folder, tensors))


def _int8_skeleton(folder: Path, dtype: torch.dtype | None, shapes_only: bool = False) -> torch.nn.Module:
    source = folder / "config.json"
    config = _json(source)
    schemes = read(config.get("quantization_config"), str(source))
    model = _skeleton(folder, config, dtype, shapes_only)
    _place_int8(model, schemes, str(source))
    return model


def _folder(path: str | os.PathLike) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise BadParamError(f"path: expected a folder or a name on the hub, got {path!r}")
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.exists() or len(folder.parts) != 2:
        raise BadParamError(f"path: expected a folder with a checkpoint, or a name on the hub like owner/model, got {path}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path)))
    except Exception as error:  # the hub's own errors, of which some are no subclass of another's
        raise BadParamError(f"path: there is no folder {path}, and the hub gives none, {type(error).__name__}: {error}") from error


def _json(path: Path) -> dict:
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        raise BadParamError(f"path: expected a folder with {path.name}, there is none in {path.parent}") from None
    except OSError as error:
        raise BadParamError(f"{path}: expected a file that can be read ({error.strerror})") from None
    except ValueError as error:
        raise BadParamError(f"{path}: expected JSON: {error}") from None
    except RecursionError:
        raise BadParamError(f"{path}: expected JSON that is nested less, got more than Python reads") from None
    if not isinstance(document, dict):
        raise BadParamError(f"{path}: expected a JSON object, got a {type(document).__name__}")
    return document


def _skeleton(folder: Path, config: dict, dtype: torch.dtype | None, shapes_only: bool) -> torch.nn.Module:
    """The float model with parameters on the meta device, and with its buffers. shapes_only: buffers on the meta device too, and another dtype; then
    nothing changes for other threads meanwhile."""
    import transformers
    from accelerate import init_empty_weights

    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    cls = getattr(transformers, name, None) if name else None
    if not isinstance(cls, type) or not issubclass(cls, transformers.PreTrainedModel):
        raise BadParamError(f"{folder / 'config.json'}: expected the name of a model class of transformers in architectures, got {names}")
    with _bad_file(folder / "config.json", f"a config that transformers {transformers.__version__} knows"):
        parsed = transformers.AutoConfig.from_pretrained(folder)
        expected = getattr(cls, "config_class", None)
        if isinstance(expected, type) and not isinstance(parsed, expected):
            raise BadParamError(f"{folder / 'config.json'}: expected model_type {expected.model_type} for {name}, got {parsed.model_type}")
    if hasattr(parsed, "quantization_config"):
        del parsed.quantization_config
    dtype = dtype or getattr(parsed, "dtype", None) or torch.float32
    if dtype not in _FLOATS:
        raise BadTensorDtypeError(f"dtype: expected float16, bfloat16 or float32, got {dtype}")
    on_meta = torch.device("meta") if shapes_only else init_empty_weights(include_buffers=False)
    with _SKELETONS, _bad_file(folder / "config.json", f"a config of {name}"), on_meta:
        model = cls._from_config(copy.deepcopy(parsed), dtype=torch.get_default_dtype() if shapes_only else dtype)
        wide = model if shapes_only or dtype is torch.float32 else cls._from_config(parsed, dtype=torch.float32)
    for buffer, computed in zip(model.buffers(), wide.buffers()):  # in float32, as transformers' loader computes them: rotary angles of GPT-J
        buffer.copy_(computed)
    if (folder / "generation_config.json").is_file() and hasattr(model, "generation_config"):
        with _bad_file(folder / "generation_config.json", "a generation config"):
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model


@contextmanager
def _bad_file(path: Path, expected: str) -> Iterator[None]:
    """BadParamError for whatever transformers raises about a file: the classes of its errors, and of its configs' values, are many."""
    try:
        yield
    except (ScaledMMError, MemoryError):
        raise
    except Exception as error:
        raise BadParamError(f"{path}: expected {expected}, {type(error).__name__}: {error}") from error


def _place_int8(model: torch.nn.Module, schemes: Schemes, source: str) -> None:
    """Puts int8 modules, on the meta device, in the place of linear layers and experts that have a scheme."""
    names = Names(model)
    for name, experts in names.float_experts.items():
        found = {disk: schemes.of(disk) for disk in names.of_experts(name)}
        if set(found.values()) == {None}:
            continue
        if set(found.values()) != {Scheme()}:
            other = next(f"{disk}: {scheme}" for disk, scheme in found.items() if scheme != Scheme())
            raise BadParamError(f"{source}: expected dynamic symmetric int8 for all linear layers of the experts {name}, got {other}")
        replace(model, name, Int8Experts(*experts.down_proj.shape, activation=activation_of(experts), device="meta"))
    for name, linear in [(name, module) for name, module in model.named_modules() if type(module) is torch.nn.Linear]:
        scheme = schemes.of(names.of_module(name))
        if scheme is not None and linear is not model.get_output_embeddings():
            options = dict(static=scheme.static, symmetric=scheme.symmetric, device="meta", dtype=linear.weight.dtype)
            replace(model, name, Int8Linear(linear.in_features, linear.out_features, linear.bias is not None, **options))


class _Files:
    """The tensors of a checkpoint's safetensors files."""

    def __init__(self, folder: Path):
        from safetensors import SafetensorError, safe_open

        index = folder / "model.safetensors.index.json"
        names = _file_names(index) if index.is_file() else ["model.safetensors"]
        where = _json(index)["weight_map"] if index.is_file() else {}
        self.file_of: dict[str, Path] = {}
        self.open: dict[Path, object] = {}
        for name in names:
            path = folder / name
            if not path.is_file():
                raise BadParamError(f"{folder}: expected the file {name}, there is none")
            try:
                self.open[path] = safe_open(path, "pt")
            except SafetensorError as error:
                raise BadParamError(f"{path}: expected a complete safetensors file: {error}") from None
            self.file_of.update({key: path for key in self.open[path].keys() if where.get(key, name) == name})
        self.folder = folder

    def expect(self, name: str, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...]) -> None:
        """Checks a tensor without loading it."""
        if name not in self.file_of:
            raise BadParamError(f"{self.folder}: expected the tensor {name}, there is none in {', '.join(path.name for path in self.open)}")
        path, (shape, stored) = self.file_of[name], self.kind(name)
        if shape not in shapes:
            raise BadTensorShapeError(f"{path}: {name}: expected {' or '.join(str(list(one)) for one in shapes)}, got {list(shape)}")
        if stored not in dtypes:
            expected, got = " or ".join(map(str, dtypes)).replace("torch.", ""), str(stored).removeprefix("torch.")
            raise BadTensorDtypeError(f"{path}: {name}: expected {expected}, got {got}")

    def kind(self, name: str) -> tuple[tuple[int, ...], torch.dtype | str]:
        """(shape, dtype) of a tensor; a dtype that no model has as safetensors calls it."""
        piece = self.open[self.file_of[name]].get_slice(name)
        return tuple(piece.get_shape()), _DTYPES.get(piece.get_dtype(), piece.get_dtype())

    def load(self, name: str, cut: tuple[int, slice] | None = None) -> torch.Tensor:
        """A tensor, or of one with several values a part: (dimension, slice)."""
        file = self.open[self.file_of[name]]
        if cut is not None:
            part = file.get_slice(name)
            if math.prod(part.get_shape()) != 1:
                return part[(slice(None),) * cut[0] + (cut[1],)].contiguous()
        return file.get_tensor(name)

    def described(self) -> list[tuple[str, str, list[int]]]:
        """(name, dtype, shape) of all tensors, in order of name."""
        slices = {name: self.open[path].get_slice(name) for name, path in self.file_of.items()}
        return [(name, part.get_dtype(), list(part.get_shape())) for name, part in sorted(slices.items())]


class _Unwritten(_Files):
    """Tensors of which a file will be made."""

    def __init__(self, folder: Path, tensors: Mapping[str, torch.Tensor]):
        self.folder, self.tensors, path = folder, tensors, folder / "model.safetensors"
        self.open, self.file_of = {path: None}, dict.fromkeys(tensors, path)

    def kind(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return tuple(self.tensors[name].shape), self.tensors[name].dtype


def _file_names(index: Path) -> list[str]:
    """The files that an index names. They must be in its folder."""
    names = _json(index).get("weight_map")
    names = list(names.values()) if isinstance(names, dict) else []
    if not names or not all(isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors") for name in names):
        raise BadParamError(f"{index}: expected a weight_map of tensors to safetensors files of the same folder")
    return sorted(set(names))


_DTYPES = {
    "I8": torch.int8,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I32": torch.int32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

_SKELETONS = threading.Lock()  # accelerate and transformers change torch for the whole process while they make a model

# Sources of one parameter: [(name on disk, index to write to)]; without indices, (), they follow one another along the first dimension.
Pieces = list[tuple[str, tuple]]


def _plan(model: torch.nn.Module, files: _Files) -> dict[str, Pieces]:
    """Which tensors make each parameter; checks all of them, and that none is left over."""
    names = Names(model)
    plan: dict[str, Pieces] = {}
    quantized = tuple(f"{name}." for name in (*names.linears, *names.experts))
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    kept = {name: experts for name, experts in names.float_experts.items() if names.each_expert(name) is not None}
    of_kept = {f"{name}.{which}" for name in kept for which in ("gate_up_proj", "down_proj")}
    plain = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(quantized) and name not in of_kept}
    for name, tensor in plain.items():
        rows = names.of_tensor(name)
        if name in tied and not any(disk in files.file_of for disk in rows):
            continue
        for disk, part in rows.items():
            shape = (part.stop - part.start, *tensor.shape[1:]) if tensor.dim() else ()
            files.expect(disk, (shape,), (tensor.dtype,) if not tensor.is_floating_point() else (*_FLOATS, torch.float64))
        plan[name] = [(disk, ()) for disk in rows]
    for name, layer in names.linears.items():
        disk = names.of_module(name)
        n, k = layer.out_features, layer.in_features
        plan[f"{name}.weight"] = _int8(files, f"{disk}.weight", n, k)
        plan[f"{name}.weight_scale"] = _scale(files, disk, n)
        if layer.bias is not None:
            files.expect(f"{disk}.bias", ((n,),), _FLOATS)
            plan[f"{name}.bias"] = [(f"{disk}.bias", ())]
        if layer.input_scale is not None:
            files.expect(f"{disk}.input_scale", ((1,), ()), _FLOATS)
            plan[f"{name}.input_scale"] = [(f"{disk}.input_scale", ())]
        if layer.input_zero_point is not None:
            files.expect(f"{disk}.input_zero_point", ((1,), ()), (torch.int8, torch.int32))
            plan[f"{name}.input_zero_point"] = [(f"{disk}.input_zero_point", ())]
    for name, experts in (names.experts | kept).items():
        _, hidden, inner = experts.down_proj.shape
        for disk, (which, expert, half) in names.of_experts(name).items():
            n, k = (hidden, inner) if which == "down_proj" else (inner, hidden)
            rows = (expert, slice(half * n, (half + 1) * n))
            if name in kept:
                files.expect(f"{disk}.weight", ((n, k),), _FLOATS)
                plan.setdefault(f"{name}.{which}", []).append((f"{disk}.weight", rows))
                continue
            plan.setdefault(f"{name}.{which}", []).extend((piece, rows) for piece, _ in _int8(files, f"{disk}.weight", n, k))
            plan.setdefault(f"{name}.{which}_scale", []).extend((piece, rows) for piece, _ in _scale(files, disk, n))
    used = {piece for pieces in plan.values() for piece, _ in pieces}
    unknown = [name for name in files.file_of if name not in used and not _may_be_left(model, name)]
    if unknown:
        raise BadParamError(f"{files.file_of[unknown[0]]}: expected no tensor {unknown[0]} ({len(unknown)} such), for which the model has no place")
    return plan


def _may_be_left(model: torch.nn.Module, name: str) -> bool:
    """Tensors that a checkpoint may contain and the loader ignores: tied weights, buffers that the model computes, zero points of symmetric
    weights."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    buffers = {buffer for buffer, _ in model.named_buffers()}
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    if any(re.search(pattern, name) for pattern in ignored):
        return True
    return name in tied or name in buffers or name.endswith(("rotary_emb.inv_freq", _WEIGHT_ZERO_POINT, "position_ids"))


def _int8(files: _Files, name: str, n: int, k: int) -> Pieces:
    files.expect(name, ((n, k),), (torch.int8,))
    return [(name, ())]


def _scale(files: _Files, disk: str, n: int) -> Pieces:
    files.expect(f"{disk}.weight_scale", ((n, 1), (n,), (1,), ()), _FLOATS)
    return [(f"{disk}.weight_scale", ())]


def _assign(model: torch.nn.Module, name: str, files: _Files, pieces: Pieces, device: torch.device, cut: tuple[int, slice] | None) -> None:
    parent, _, child = name.rpartition(".")
    module = model.get_submodule(parent)
    target = getattr(module, child)
    if not pieces[0][1]:
        if len(pieces) == 1:
            tensor = _loaded(files, pieces[0][0], child, cut)
        else:
            tensor = torch.cat([_loaded(files, piece, child) for piece, _ in pieces])
            tensor = tensor if cut is None else tensor[(slice(None),) * cut[0] + (cut[1],)]
        tensor = tensor.to(target.dtype)
        if target.numel() == 1 or tensor.numel() == target.numel():
            tensor = tensor.reshape(target.shape)
        tensor = tensor.expand(target.shape).contiguous().to(device)  # one scale for all channels
    else:
        first, last = (0, target.shape[0]) if cut is None else (cut[1].start, cut[1].stop)  # experts are cut along the first dimension
        tensor = torch.empty(target.shape, dtype=target.dtype, device=device)
        for piece, (expert, rows) in pieces:
            if first <= expert < last:
                value = _loaded(files, piece, child)
                tensor[expert - first, rows] = value.reshape(-1, 1).to(target.dtype) if child.endswith("_scale") else value
    if isinstance(target, torch.nn.Parameter):
        setattr(module, child, torch.nn.Parameter(tensor, requires_grad=False))
    else:
        module._buffers[child] = tensor


def _loaded(files: _Files, piece: str, child: str, cut: tuple[int, slice] | None = None) -> torch.Tensor:
    """A tensor of the files. child: the name of its parameter; values of scales and zero points are checked."""
    tensor = files.load(piece, cut)
    if child == "input_zero_point" and not -128 <= (value := int(tensor)) <= 127:
        raise BadParamError(f"{files.file_of[piece]}: {piece}: expected a value from -128 to 127, got {value}")
    if child.endswith("_scale"):
        scale = tensor.float()
        if not bool((torch.isfinite(scale) & (scale > 0)).all()):
            raise BadParamError(f"{files.file_of[piece]}: {piece}: expected finite positive scales, got {float(scale.min())} to {float(scale.max())}")
    return tensor
