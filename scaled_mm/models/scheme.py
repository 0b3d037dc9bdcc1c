"""`quantization_config` of a checkpoint's config.json: which modules are int8, and how their inputs are quantized.

Formats: compressed-tensors (llm-compressor, vLLM) and w8a8_int8 (SGLang). Only the keys that every reader knows are written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from scaled_mm.errors import BadParamError
from scaled_mm.models.config import check_pattern, matches

FORMATS = ("compressed-tensors", "w8a8_int8")
VERSION = "0.17.0"  # the oldest version of compressed-tensors that reads this config


EXPERTS = r"re:.*\.experts\..*"  # vLLM asks for gate_proj, up_proj and down_proj of experts, whatever their names on disk are


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How the inputs of an int8 layer are quantized. static: one scale from the checkpoint. symmetric: without zero points."""

    static: bool = False
    symmetric: bool = True

    def __str__(self) -> str:
        return f"{'static' if self.static else 'dynamic'}{'' if self.symmetric else ' asymmetric'}"


@dataclasses.dataclass(frozen=True)
class Group:
    """targets: names, "re:" patterns, or class names of modules."""

    targets: tuple[str, ...]
    scheme: Scheme


@dataclasses.dataclass(frozen=True)
class Schemes:
    """The groups of a checkpoint and the patterns of modules that are not quantized."""

    groups: tuple[Group, ...]
    ignore: tuple[str, ...]

    def of(self, name: str) -> Scheme | None:
        """The scheme of the linear layer `name`, as the checkpoint calls it; None: not quantized. Precedence: ignore, exact name, pattern, class
        name; of several patterns the first in the alphabet, as compressed-tensors chooses."""
        if any(matches(pattern, name) for pattern in self.ignore) or "Linear" in self.ignore:
            return None
        targets = sorted(((target, group.scheme) for group in self.groups for target in group.targets), key=lambda pair: pair[0])
        for applies in (lambda t: t == name, lambda t: t.startswith("re:") and matches(t, name), lambda t: t == "Linear"):
            for target, scheme in targets:
                if applies(target):
                    return scheme
        return None


def read(config: object, source: str) -> Schemes:
    """The schemes of a `quantization_config`. source: the file, for messages. Raises BadParamError for what is not int8 W8A8."""
    if not isinstance(config, Mapping):
        raise BadParamError(f"{source}: expected a quantization_config, got {config!r}; a model that is not quantized goes through `quantize_` first")
    method = config.get("quant_method")
    ignore = tuple(_patterns(config.get("ignore") or (), f"{source}: quantization_config.ignore"))
    if method == "w8a8_int8":
        return Schemes((Group(("Linear",), Scheme()),), ignore)
    if method != "compressed-tensors":
        raise BadParamError(f"{source}: expected quant_method {' or '.join(FORMATS)}, got {method!r}")
    if config.get("format") not in ("int-quantized", "naive-quantized"):
        raise BadParamError(f"{source}: expected the format int-quantized or naive-quantized, got {config.get('format')!r}")
    if config.get("kv_cache_scheme") is not None:
        raise BadParamError(f"{source}: expected no kv_cache_scheme, got {config['kv_cache_scheme']!r}")
    for key in ("sparsity_config", "transform_config"):
        if config.get(key):
            raise BadParamError(f"{source}: expected no {key}, got {config[key]!r}")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise BadParamError(f"{source}: expected config_groups, got {groups!r}")
    return Schemes(tuple(_group(group, f"{source}: config_groups.{name}") for name, group in groups.items()), ignore)


def _group(group: object, source: str) -> Group:
    if not isinstance(group, Mapping):
        raise BadParamError(f"{source}: expected a mapping, got {group!r}")
    return Group(tuple(_patterns(group.get("targets"), f"{source}.targets")), scheme_of(group, source))


def scheme_of(group: Mapping[str, object], source: str) -> Scheme:
    """The scheme of a group in config_groups, which is also that of compressed-tensors' modules. Raises BadParamError for what is not int8 W8A8."""
    _expect(group.get("weights"), f"{source}.weights", strategy=("channel", "tensor"), dynamic=(False,), symmetric=(True,))
    if group.get("output_activations") is not None:
        raise BadParamError(f"{source}.output_activations: expected none, got {group['output_activations']!r}")
    inputs = group.get("input_activations")
    _expect(inputs, f"{source}.input_activations", strategy=("token", "tensor"), dynamic=(True, False), symmetric=(True, False))
    static = not inputs.get("dynamic", False)
    if static != (inputs.get("strategy", "tensor") == "tensor"):
        raise BadParamError(f"{source}.input_activations: expected strategy token with dynamic true, or tensor with false, got {dict(inputs)}")
    return Scheme(static, inputs.get("symmetric", True))


def _expect(arguments: object, source: str, **expected: tuple) -> None:
    if not isinstance(arguments, Mapping):
        raise BadParamError(f"{source}: expected an int8 scheme, got {arguments!r}")
    for key, values in dict(num_bits=(8,), type=("int",), **expected).items():
        default = _DEFAULTS.get(key)
        if arguments.get(key, default) not in values or isinstance(arguments.get(key, default), bool) is not isinstance(values[0], bool):
            raise BadParamError(f"{source}.{key}: expected {' or '.join(map(repr, values))}, got {arguments.get(key)!r}")
    if arguments.get("group_size") not in (None, -1, 0):
        raise BadParamError(f"{source}.group_size: expected none, got {arguments['group_size']!r}")


_DEFAULTS = {"symmetric": True, "dynamic": False, "type": "int", "strategy": "tensor"}  # of compressed-tensors


def _patterns(values: object, source: str) -> Sequence[str]:
    if isinstance(values, str) or not isinstance(values, Sequence) or not all(isinstance(value, str) for value in values):
        raise BadParamError(f"{source}: expected a list of names or patterns, got {values!r}")
    for value in values:
        check_pattern(source, value)
    return values


def write(format: str, schemes: Mapping[str, Scheme], kept: Sequence[str]) -> dict[str, object]:
    """The `quantization_config` of int8 linear layers, by their names on disk. kept: names of linear layers that are not quantized.

    Raises BadParamError if the format cannot hold the schemes.
    """
    if format == "w8a8_int8":
        for name, scheme in schemes.items():
            if scheme != Scheme():
                raise BadParamError(f"format: w8a8_int8 holds dynamic symmetric layers only, got {name}, which is {scheme}; use compressed-tensors")
        return {"quant_method": format, "is_dynamic": True, "ignore": list(kept), "packed_modules_mapping": {}}
    by_scheme: dict[Scheme, list[str]] = {}
    for name, scheme in schemes.items():
        target = EXPERTS if ".experts." in name else name
        if target not in by_scheme.setdefault(scheme, []):
            by_scheme[scheme].append(target)
    groups = {}
    for scheme, names in sorted(by_scheme.items(), key=lambda item: -len(item[1])):
        inputs = {"strategy": "tensor" if scheme.static else "token", "symmetric": scheme.symmetric, "dynamic": not scheme.static}
        groups[f"group_{len(groups)}"] = {
            "targets": ["Linear"] if len(by_scheme) == 1 else names,
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "int", **inputs},
            "output_activations": None,
        }
    return {
        "quant_method": format,
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": list(kept),
        "config_groups": groups,
        "kv_cache_scheme": None,
        "version": VERSION,
        "sparsity_config": {},
        "transform_config": {},
    }
