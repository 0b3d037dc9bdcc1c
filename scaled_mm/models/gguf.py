"""`from_gguf`: a GGUF file as a model of transformers whose linear layers multiply with the file's own blocks."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from scaled_mm.core import checks
from scaled_mm.errors import BadParamError, BadTensorDtypeError, lacks_memory
from scaled_mm.gguf.dequantize import dequantize_block
from scaled_mm.gguf.gguf_file import QuantizedTensor, open_gguf, shown, supported
from scaled_mm.gguf.quantize import quantize_block
from scaled_mm.gguf_formats import WEIGHT_FORMATS
from scaled_mm.gguf_k_quants import K_QUANTS
from scaled_mm.models.blocks import replace
from scaled_mm.models.fuse import trial
from scaled_mm.models.gguf_source import GgufSource
from scaled_mm.models.progress import progress_bar
from scaled_mm.models.saving import refuse_own_saving
from scaled_mm.models.source import load_model
from scaled_mm.nn.block_linear import BlockLinear

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_AGAIN = "q8_0"  # the format of weights that are quantized again
_CHUNK = 1 << 24  # values that are dequantized at a time
_SAVING = "model: expected one without packed weights, which transformers cannot save; the checkpoint of this model is its GGUF file"


@dataclasses.dataclass
class GgufLayer:
    """One linear layer. name: of the module. tensor: its name in the file, "" if the file has none. fmt: the GGUF format of a packed layer; "" for a
    dense one. reason: why a layer is dense. tied: whether it is the output head and has a copy of the embedding's blocks. stored: the format in the
    file of a packed layer; a K-quant was converted to `fmt`, q6_k quantized again."""

    name: str
    tensor: str
    fmt: str = ""
    reason: str = ""
    tied: bool = False
    stored: str = ""

    @property
    def kind(self) -> str:
        """The format, "q4_k as q4_1" of a converted one, or "dense"."""
        return f"{self.stored} as {self.fmt}" if self.stored != self.fmt else self.fmt or "dense"


@dataclasses.dataclass
class GgufReport:
    """layers: all linear layers, in the order of the model. packed_bytes: of the packed weights. dense_bytes: of all other parameters.
    unused: tensors of the file that transformers' model has no place for."""

    layers: list[GgufLayer]
    packed_bytes: int = 0
    dense_bytes: int = 0
    unused: list[str] = dataclasses.field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """How many layers have each format ("q4_k as q4_1" if converted), and how many are "dense"."""
        return dict(Counter(layer.kind for layer in self.layers))

    def to_dict(self) -> dict[str, object]:
        """The report as plain values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.counts().items())
        lines = [f"linear layers: {counts}; {self.packed_bytes / 1e6:.1f} MB packed, {self.dense_bytes / 1e6:.1f} MB dense"]
        lines += [f"{layer.name} is dense: {layer.reason}" for layer in self.layers if layer.reason]
        return "\n".join(lines + ([f"not used: {', '.join(map(shown, self.unused))}"] if self.unused else []))


@torch.no_grad()
def from_gguf(
    path: str | os.PathLike,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    mode: str = "auto",
    requantize: bool = False,
    report: Callable[[GgufReport], object] | None = None,
    progress: bool = True,
) -> torch.nn.Module:
    """A causal language model of transformers from a GGUF file, in evaluation mode, with `nn.BlockLinear` in place of its linear layers.

    path: a GGUF file of an architecture that transformers loads. dtype: of the embedding, norms, and dense layers: float16, bfloat16 or float32,
    which is the default. device: default: the CPU. mode: of the layers, see `block_linear`.
    requantize: whether weights in q6_k are quantized again to q8_0, and packed; otherwise their layers stay dense. This adds an error of 5.3e-3 of
    the norm of normal weights, 6.8e-3 of that of their cubes.
    report: called once with a `GgufReport`: the layers that are packed, and why others are dense; `report=print` shows it. progress: whether to show
    a progress bar on stderr; transformers shows its own.

    transformers dequantizes the whole file first. Then a linear layer is packed if its tensor has a format of `pack_block_weight` (q4_k and q5_k are
    converted, see `convert_k_quant`), or q6_k with requantize, and its dequantized blocks, cast to dtype, have the bits of the weight that
    transformers loaded: in the order of the file, or with the rows of each head put in transformers' order, as q and k of llama-type models need.
    All other layers stay dense, experts too. The embedding is dense.
    If the output head is tied to the embedding, it gets a copy of the embedding's blocks, and the model says tie_word_embeddings=False: a later
    change of the embedding does not reach the head.
    The peak of memory is that of transformers' loader, which holds all weights in dtype. Each dense weight is freed when its layer is packed.

    Warns of tensors in the file that transformers' model has no place for, such as biases that its class does not have.

    Returns the model. It has no gradients, and cannot be saved: the file is its checkpoint.
    Raises ImportError without the packages gguf, transformers or accelerate; OSError if the file cannot be opened; BadParamError naming `path` for a
    file that is malformed, that is one part of several, that lacks a tensor of its model, or that transformers cannot load, and for a model that
    reads the weights of its linear layers itself (Mamba); BadParamError (mode, device, requantize), DeviceNotSupportedError, or BadTensorDtypeError
    (dtype).
    """
    dtype = torch.float32 if dtype is None else dtype
    if dtype not in _FLOATS:
        raise BadTensorDtypeError(f"dtype: expected float16, bfloat16 or float32, got {dtype}")
    if not isinstance(path, (str, os.PathLike)) or Path(path).suffix != ".gguf":
        raise BadParamError(f"path: expected a file NAME.gguf, got {path!r}")
    if not isinstance(requantize, bool):
        raise BadParamError(f"requantize: expected True or False, got {requantize!r}")
    where = checks.device("cpu" if device is None else device)
    BlockLinear(0, 0, "q4_0", False, mode=mode)  # refuses a mode before anything is read
    if mode == "w4a16" and dtype is torch.float32:
        raise BadParamError("mode: expected auto, w4a8 or w16a16 with dtype float32, got w4a16")
    checks.usable_device(where)
    source = GgufSource(path, "path")  # checks the file before transformers reads it
    _check_packages()
    model = load_model(path, dtype=dtype, argument="path", gguf=source)
    if source.names is None:
        raise BadParamError(f"path: expected an architecture whose tensor names transformers tells, got {source.arch!r} in {source.path}")
    packer = _Packer(model, source.names, supported(open_gguf(path)), where, mode, requantize)
    if words := source.unused_in_words(model):
        warnings.warn(words, stacklevel=3)
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    layers = []
    with progress_bar(progress, len(names), "packing") as advance:
        for name in names:
            layers.append(packer.pack(name))
            advance(name)
    if any(layer.tied for layer in layers):
        _untie(model)
    refuse_own_saving(model, _SAVING)
    model = model.to(where).requires_grad_(False)  # packed layers have no gradients: none at all, rather than some
    try:
        trial(model)
    except Exception as error:
        if lacks_memory(error):
            raise  # not the model's fault
        raise BadParamError(
            f"path: expected a model whose linear layers can be replaced, got a {type(model).__name__}, which transformers loads dequantized; "
            f"with packed layers {type(error).__name__}: {error}"
        ) from error
    if report is not None:
        packed = sum(module.packed.nbytes for module in model.modules() if isinstance(module, BlockLinear))
        report(GgufReport(layers, packed, sum(parameter.nbytes for parameter in model.parameters()), source.unused))
    return model


class _Packer:
    """Packs the linear layers of a model, one at a time."""

    def __init__(
        self,
        model: torch.nn.Module,
        names: Mapping[str, str],
        tensors: dict[str, QuantizedTensor | torch.Tensor],
        device: torch.device,
        mode: str,
        requantize: bool,
    ):
        self.model, self.tensors, self.device, self.mode, self.requantize = model, tensors, device, mode, requantize
        self.in_file = {ours: theirs for theirs, ours in names.items()}
        self.uses: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.uses.setdefault(id(parameter), []).append(name)

    def pack(self, name: str) -> GgufLayer:
        """Replaces a linear layer if the blocks of its tensor have its weight."""
        linear = self.model.get_submodule(name)
        if type(linear) is not torch.nn.Linear:
            return GgufLayer(name, self.in_file.get(f"{name}.weight", ""), reason=f"its class is {type(linear).__name__}")
        shared = [other for other in self.uses[id(linear.weight)] if other != f"{name}.weight"]
        embedding = self.model.get_input_embeddings()
        tied = bool(shared) and linear is self.model.get_output_embeddings() and linear.weight is embedding.weight and len(shared) == 1
        tensor = self.in_file.get(shared[0] if tied else f"{name}.weight", "")
        if shared and not tied:
            return GgufLayer(name, tensor, reason=f"its weight is also {', '.join(shared)}")
        if not tensor:
            return GgufLayer(name, "", reason="transformers names no tensor of the file for it")
        found = self.tensors.get(tensor)
        if not isinstance(found, QuantizedTensor):
            return GgufLayer(name, tensor, reason=f"{tensor} is of {_kind(found)}")
        again = found.fmt not in WEIGHT_FORMATS and not K_QUANTS[found.fmt].converted
        if again and not self.requantize:
            return GgufLayer(name, tensor, reason=f"{tensor} is of {_kind(found)}; requantize=True (--requantize) packs it as {_AGAIN}")
        order = self._order(found, linear.weight)
        if order is None:
            return GgufLayer(name, tensor, reason=f"transformers loaded a weight that the blocks of {tensor} do not have")
        q, fmt = found.q[order].to(self.device), found.fmt
        if again:
            q, fmt = quantize_block(dequantize_block(q, fmt), _AGAIN), _AGAIN
            if not bool(torch.isfinite(q[..., :2].contiguous().view(torch.float16)).all()):
                return GgufLayer(name, tensor, reason=f"{tensor} is of {found.fmt}, and too large or not finite for {fmt}")
        bias = None if linear.bias is None else linear.bias.to(self.device)
        layer = BlockLinear.from_blocks(q, fmt, bias, mode=self.mode)
        replace(self.model, name, layer.eval())
        return GgufLayer(name, tensor, layer.fmt, tied=tied, stored=found.fmt)

    def _order(self, found: QuantizedTensor, weight: torch.Tensor) -> torch.Tensor | slice | None:
        """The order of the file's rows in the weight, or None if no known one gives its bits."""
        if found.shape != weight.shape:
            return None
        return next((order for order in self._orders(weight.shape[0]) if _has_bits(found.q[order], found.fmt, weight)), None)

    def _orders(self, rows: int) -> Iterator[torch.Tensor | slice]:
        """The file's order; then, for the heads of queries and of keys, the inverse of llama.cpp's order, in which the halves of a head alternate."""
        yield slice(None)
        config = self.model.config.get_text_config()
        for heads in dict.fromkeys(getattr(config, field, None) for field in ("num_attention_heads", "num_key_value_heads")):
            if isinstance(heads, int) and heads > 0 and rows % (2 * heads) == 0:
                yield torch.arange(rows, device="cpu").view(heads, -1, 2).transpose(1, 2).reshape(-1)


def _kind(found: QuantizedTensor | torch.Tensor | None) -> str:
    if found is None:
        return "a type without blocks that products take"
    return found.fmt if isinstance(found, QuantizedTensor) else str(found.dtype).removeprefix("torch.")


def _has_bits(q: torch.Tensor, fmt: str, weight: torch.Tensor) -> bool:
    bits = {2: torch.int16, 4: torch.int32}[weight.itemsize]
    step = max(1, _CHUNK // max(1, weight.shape[1]))
    parts = (slice(start, start + step) for start in range(0, weight.shape[0], step))
    return all(torch.equal(dequantize_block(q[part], fmt).to(weight.dtype).view(bits), weight[part].contiguous().view(bits)) for part in parts)


def _check_packages() -> None:
    for package in ("transformers", "accelerate"):
        if importlib.util.find_spec(package) is None:
            hint = f'from_gguf: expected the package {package}, which is not installed; pip install ".[models]"'
            raise ImportError(hint, name=package)


def _untie(model: torch.nn.Module) -> None:
    """Keeps tie_weights of transformers from giving the packed output head the weight of the embedding."""
    model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}
