"""`quantize_`: a model's linear layers and experts, quantized in place."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from scaled_mm.core import checks
from scaled_mm.errors import BadParamError
from scaled_mm.models.blocks import activation_of, blocks_of, check_in_memory, experts_of, linears_of, replace
from scaled_mm.models.calibration import Call, FloatBlock, Group, record_calls, tensors_of
from scaled_mm.models.config import Int8Config
from scaled_mm.models.data import check_ids, token_batches
from scaled_mm.models.decided import ANEW, Decided, fingerprint_of
from scaled_mm.models.int8_layers import int8_experts, int8_linear_of
from scaled_mm.models.offload import map_or_explain, offload_folder
from scaled_mm.models.progress import progress_bar
from scaled_mm.models.report import LayerReport, QuantizationReport
from scaled_mm.models.saving import refuse_own_saving
from scaled_mm.models.search import STATIC_MAY_LOSE, Choice, Static, choose, quantile, rule_of
from scaled_mm.models.smoothing import LARGEST, Fold, fold_of
from scaled_mm.models.weight_reads import not_only_called, read_by, stay_float
from scaled_mm.rowwise.arithmetic import FLOATS

Calibration = Sequence[str] | Sequence[torch.Tensor] | Callable[[torch.nn.Module], object]


@torch.no_grad()
def quantize_(
    model: torch.nn.Module,
    config: Int8Config | None = None,
    calibration: Calibration | None = None,
    *,
    tokenizer: Callable | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    resume: str | os.PathLike | None = None,
    offload: str | os.PathLike | None = None,
) -> QuantizationReport:
    """Replaces the linear layers and experts inside of a transformer's layers by int8 ones, in place, and returns a report.

    model: with one list of decoder or encoder layers, as those of transformers; float16, bfloat16 or float32, on any device.
    config: see `Int8Config`. Routers, the output head and the embedding stay as they are.
    calibration: texts, with `tokenizer`, a callable like those of transformers; tensors of token ids, [tokens] or [batch, tokens]; or a function that
        runs the model passed to it, without a KV cache. Padding tokens count like others. None: inputs are quantized dynamically, without smoothing;
        activation="static" is refused. Linear layers that the data does not reach stay float; without data those stay float whose weights the model
        reads itself, if it runs on token ids alone.
    device: where decoder layers are computed, one at a time and in float32; default: where the model is. The rest of the model stays where it is,
        so the GPU needs memory for one decoder layer only.
    progress: whether to show a progress bar on stderr.
    resume: the path of a file that the decisions are written to after each layer. If it exists, its layers are not searched again. It must be of the
        same model, config and calibration data.
    offload: a folder that the int8 weights are written to, a file for each layer, and mapped from into memory, which the system can free. The model
        uses these files from then on. With float weights that are mapped as well, as transformers loads them on a CPU, a model may be larger than
        the memory, which has to hold one layer in float32 and the calibration data's activations.

    Linear layers that read the same tensor (q, k, v; gate, up) get one scheme, because vLLM and SGLang fuse them. Overrides that differ within such a
    group are followed; `save_pretrained` refuses such a model. Every candidate (dynamic; static with the scale of absmax, of percentiles, of the
    least squared error; each with and without smoothing) is run with the operators of the quantized model, and its error relative to each token
    decides. All layers see the float model's activations. Experts get dynamic scales. A static scale whose error is above 1.5 times that of a dynamic
    one is used with activation="static" only, with a warning that reports the error.

    Returns a `QuantizationReport`. Raises a ScaledMMError subclass that names the argument, before the model is changed, except if a file of offload
    cannot be written after all.
    """
    config = Int8Config() if config is None else config
    if not isinstance(config, Int8Config):
        raise BadParamError(f"config: expected an Int8Config, got a {type(config).__name__}")
    if not isinstance(model, torch.nn.Module):
        raise BadParamError(f"model: expected a torch.nn.Module, got a {type(model).__name__}")
    if tokenizer is not None and not callable(tokenizer):
        raise BadParamError(f"tokenizer: expected a function like transformers' tokenizers, got a {type(tokenizer).__name__}")
    where = None if device is None else checks.usable_device(checks.device(device))
    for name, value in ("resume", resume), ("offload", offload):
        if value is not None and not isinstance(value, (str, os.PathLike)):
            raise BadParamError(f"{name}: expected a path, got a {type(value).__name__}")
    prefix, blocks = blocks_of(model)
    names = [f"{prefix}.{index}.{name}" for index, block in enumerate(blocks) for name in (*linears_of(block), *experts_of(block))]
    if not names:
        raise BadParamError(f"model: expected torch.nn.Linear layers or experts in {prefix}, got a {type(model).__name__} without")
    config.check_some_left(names, prefix)
    for index, block in enumerate(blocks):
        if isinstance(block, (torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer)):
            raise BadParamError(f"model: expected layers that call their linear layers, got {type(block).__name__}, which reads their weights itself")
        for experts in experts_of(block).values():
            activation_of(experts)
        _check_weights(f"{prefix}.{index}", block, calibration is not None)
    folder = None if offload is None else offload_folder(offload, prefix, blocks)
    if calibration is None:
        config = _without_calibration(config)
        calls, inputs, arguments = None, None, []
        chosen = {(block, name): f"{prefix}.{index}.{name}" for index, block in enumerate(blocks) for name in linears_of(block)}
        read = stay_float(model, {place: name for place, name in chosen.items() if config.of(name) is not None})
    else:
        read = set()
        calls, inputs = _recorded(model, blocks, calibration, tokenizer)
        arguments = [tensor for call in calls[0] for tensor in tensors_of((call.hidden, call.rest, call.options))]
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    shared = {parameter for parameter, count in uses.items() if count > 1}
    decided = Decided(config, fingerprint_of(model, config, arguments), resume)
    parts = [_Block(f"{prefix}.{index}", block, config, decided, shared, read) for index, block in enumerate(blocks)]
    with progress_bar(progress, len(blocks), "calibrating") as advance:
        for index, (block, of_block) in enumerate(zip(blocks, parts)):
            if calls is not None:
                work = FloatBlock(block, next(block.parameters()).device if where is None else where)
                inputs = of_block.decide(work, calls[index], inputs)
                calls[index] = []
            of_block.describe()
            decided.save()
            advance(of_block.name)
    refuse_own_saving(model)
    for of_block in parts:  # after all decisions: an error before leaves the model as it was
        of_block.apply()
        if folder is not None:
            map_or_explain(of_block.block, folder / f"{of_block.name}.safetensors")
    _warn(decided.report)
    return decided.report


def _check_weights(name: str, block: torch.nn.Module, calibrated: bool) -> None:
    """BadParamError for weights without data, and for those that are not finite, whose scales no checkpoint could hold.

    calibrated: values of linear layers are checked later, with their inputs.
    """

    def check(inner: str, weight: torch.Tensor, values: bool) -> None:
        if weight.is_meta:
            raise BadParamError(f"model: expected weights, got {name}.{inner} on the meta device")
        if weight.dtype not in FLOATS:
            raise BadParamError(f"model: expected weights in float16, bfloat16 or float32, got {name}.{inner} in {weight.dtype}")
        if values and weight.numel() and not all(bool(torch.isfinite(one)) for one in weight.detach().aminmax()):
            raise BadParamError(f"model: expected finite weights, got NaN or infinity in {name}.{inner}")

    for inner, linear in linears_of(block).items():
        if "forward" in vars(linear):
            raise BadParamError(f"model: expected layers with torch.nn.Linear's forward, got {name}.{inner} with another, as accelerate sets it")
        check(f"{inner}.weight", linear.weight, not calibrated)
        if linear.bias is not None:
            check(f"{inner}.bias", linear.bias, True)
    for inner, experts in experts_of(block).items():
        for which in ("gate_up_proj", "down_proj"):
            check(f"{inner}.{which}", getattr(experts, which), True)


def _recorded(model, blocks, calibration, tokenizer) -> tuple[list[list[Call]], list[torch.Tensor]]:
    """(the calls of each layer, the first layer's inputs)."""
    if callable(calibration):
        calls = record_calls(model, blocks, lambda: calibration(model), skips=False)
    else:
        if isinstance(calibration, str) or not isinstance(calibration, Sequence) or not calibration:
            raise BadParamError(f"calibration: expected texts, tensors of token ids or a function, not empty, got a {type(calibration).__name__}")
        batches = list(token_batches(calibration, tokenizer))
        check_in_memory(model)
        for index, batch in enumerate(batches):
            check_ids(f"calibration[{index}]", model, batch)
        body, where = getattr(model, "base_model", model), next(model.parameters()).device  # without transformers' output head
        calls = record_calls(model, blocks, lambda: [body(batch.to(where)) for batch in batches], skips=True)
        if len(calls[0]) != len(batches):
            raise BadParamError(
                f"model: expected one call of each layer for a batch, got {len(calls[0])} for {len(batches)}; pass a function that runs it"
            )
    return calls, [call.hidden for call in calls[0]]


def _without_calibration(config: Int8Config) -> Int8Config:
    changes = {pattern: fields and {**fields, "smooth": None} for pattern, fields in config.overrides.items()}
    if "static" in (config.activation, *(fields.get("activation") for fields in changes.values() if fields)):
        raise BadParamError("calibration: expected data for activation='static', got None")
    changes = {pattern: fields and {**fields, "activation": "dynamic"} for pattern, fields in changes.items()}
    return dataclasses.replace(config, activation="dynamic", smooth=None, overrides=changes)


class _Block:
    """One layer of the model: what each linear layer in it gets, and its replacement."""

    def __init__(self, name: str, block: torch.nn.Module, config: Int8Config, decided: Decided, shared: set[int], read: set[torch.nn.Module]):
        """shared: ids of parameters that several modules have. Folding into one would change the others. read: linear layers that
        stay float, because the model reads their weights itself."""
        self.name, self.block, self.config, self.decided, self.shared = name, block, config, decided, shared
        linears = {inner: module for inner, module in linears_of(block).items() if module not in read}
        self.linears = {inner: module for inner, module in linears.items() if self._config(inner) is not None}
        self.chosen: dict[str, Choice] = {}
        self.folds: list[tuple[Fold, torch.Tensor]] = []
        self.statistics: dict[str, tuple[float, float]] = {}

    def _config(self, inner: str) -> Int8Config | None:
        return self.config.of(f"{self.name}.{inner}")

    def decide(self, work: FloatBlock, calls: list[Call], hidden: list[torch.Tensor]) -> list[torch.Tensor]:
        """Chooses for every group of linear layers; returns the outputs of the float layer."""
        groups, outputs = work.observe(calls, hidden)
        read = {name for group in groups for name in group.names}
        self.linears = {name: linear for name, linear in self.linears.items() if name in read}  # others may be read without a call
        names = {(work.block, name): f"{self.name}.{name}" for name in self.linears}
        if error := read_by(lambda: work(calls[0], hidden[0]), list(names)):
            raise not_only_called(lambda: work(calls[0], hidden[0]), names, error) from error
        for group in groups:
            names = [name for name in group.names if name in self.linears]
            if not names:
                continue
            configs = [self._config(name) for name in names]
            together = all(one == configs[0] for one in configs)
            fold = None
            if together and configs[0].smooth is not None:
                fold = fold_of(work, group, groups, calls[0], hidden[0], outputs[0])
                if fold is not None and any(id(tensor) in self.shared for tensor in fold.tensors(self.block)):
                    fold = None
            for members in [names] if together else [[name] for name in names]:
                self._choose(work, group, members, fold)
        return outputs

    def _choose(self, work: FloatBlock, group: Group, names: list[str], fold: Fold | None) -> None:
        config, dtype = self._config(names[0]), self.linears[names[0]].weight.dtype
        earlier = self.decided.earlier.get(f"{self.name}.{names[0]}")
        if earlier is None:
            weights = {name: work.block.get_submodule(name).weight for name in names}
            choice = choose(config, group.x, weights, dtype, fold)
            if not all(map(math.isfinite, choice.errors.values())):
                raise BadParamError(f"model: expected finite weights and inputs of {', '.join(f'{self.name}.{name}' for name in names)}")
            if choice.exponents is not None and not fold.is_exact(self.block, choice.exponents):
                choice = choose(config, group.x, weights, dtype, None)
        else:
            choice = self._earlier(earlier, group, fold)
        self.chosen.update(dict.fromkeys(names, choice))
        magnitudes = group.x.abs().reshape(-1)
        self.statistics.update(dict.fromkeys(names, (float(magnitudes.max()), quantile(magnitudes, config.percentile))))
        if choice.exponents is not None:
            self.folds.append((fold, choice.exponents))
            self.decided.report.exponents[f"{self.name}.{names[0]}"] = choice.exponents.tolist()

    def _earlier(self, layer: LayerReport, group: Group, fold: Fold | None) -> Choice:
        """A decision from the file. Raises BadParamError for what `quantize_` does not decide with this config on this model."""
        config, e = self.config.of(layer.name), self.decided.exponents.get(layer.name)
        if e is not None and len(e) == group.x.shape[1] and max(map(abs, e), default=0) <= LARGEST:
            e = torch.tensor(e, dtype=torch.int32, device=group.x.device)
        static, name = layer.scheme == "static", ("smooth " if layer.smooth else "") + (layer.rule or "dynamic")
        float32, scale, zero = torch.finfo(torch.float32), layer.input_scale, layer.input_zero_point
        folded = isinstance(e, torch.Tensor) and fold is not None and fold.is_exact(self.block, e)
        fits = {  # by the field
            "scheme": layer.scheme != "float" and config.activation in ("auto", layer.scheme),
            "rule": (layer.rule == rule_of(config) if config.activation == "static" else bool(layer.rule)) if static else not layer.rule,
            "smooth": not layer.smooth or (fold is not None and config.smooth is not None),
            "exponents": folded if layer.smooth else e is None,
            "errors": {"dynamic", name} <= set(layer.errors),
            "input_scale": scale is not None and float32.tiny <= scale <= float32.max if static else scale is None,
            "input_zero_point": (zero is not None) == (static and not config.symmetric),
        }
        if wrong := [field for field, right in fits.items() if not right]:
            values = {"exponents": self.decided.exponents.get(layer.name), **dataclasses.asdict(layer)}
            raise BadParamError(
                f"resume: expected a decision of quantize_ on {layer.name} in {self.decided.path}, got {wrong[0]} {values[wrong[0]]!r:.80}; {ANEW}"
            )
        return Choice(name, Static(layer.rule, scale, zero) if static else None, e, layer.errors)

    def describe(self) -> None:
        """Adds a line for each linear layer and for experts to the report."""
        for inner in linears_of(self.block):
            self.decided.report.layers.append(self._line(inner) if inner in self.linears else LayerReport(f"{self.name}.{inner}", "float"))
        for inner in experts_of(self.block):
            self.decided.report.layers.append(LayerReport(f"{self.name}.{inner}", "float" if self._config(inner) is None else "dynamic"))

    def apply(self) -> None:
        """Folds factors and replaces the modules, which are freed."""
        for fold, e in self.folds:
            fold.apply(self.block, e)
        for inner, linear in self.linears.items():
            replace(self.block, inner, int8_linear_of(linear, self._static(inner), self._config(inner).symmetric))
        for inner, experts in experts_of(self.block).items():
            if self._config(inner) is not None:
                replace(self.block, inner, int8_experts(experts))
        self.linears, self.folds = {}, []

    def _static(self, inner: str) -> Static | None:
        return self.chosen[inner].static if inner in self.chosen else None

    def _line(self, inner: str) -> LayerReport:
        choice, static = self.chosen.get(inner), self._static(inner)
        report = LayerReport(f"{self.name}.{inner}", "dynamic" if static is None else "static")
        if choice is not None:
            report.smooth, report.errors, report.error = choice.exponents is not None, choice.errors, choice.errors[choice.name]
            report.absmax, report.threshold = self.statistics[inner]
        if static is not None:
            report.rule, report.input_scale, report.input_zero_point = static.rule, static.scale, static.zero_point
        return report


def _warn(report: QuantizationReport) -> None:
    for pattern in Int8Config.from_fields(report.config).unmatched([layer.name for layer in report.layers]):
        warnings.warn(f"config: {pattern!r} of ignore or overrides matches no linear layer or experts of the report", stacklevel=3)
    worse = []
    for layer in report.layers:
        dynamic = [error for name, error in layer.errors.items() if name.endswith("dynamic")]
        if layer.scheme == "static" and layer.error > STATIC_MAY_LOSE * min(dynamic):
            worse.append((layer.error / max(min(dynamic), 1e-30), layer, min(dynamic)))
    if worse:
        ratio, layer, dynamic = max(worse, key=lambda entry: entry[0])
        warnings.warn(
            f"static scales: {len(worse)} of {len(report.layers)} layers have more than {STATIC_MAY_LOSE:g} times the error of dynamic ones;"
            f" the worst, {layer.name} ({layer.rule}): {layer.error:.3g} instead of {dynamic:.3g}, {ratio:.0f} times. activation='auto' avoids them",
            stacklevel=3,
        )
