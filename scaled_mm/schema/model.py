"""The files of the schema system as frozen models, with the fields of flashinfer-bench 0.1.2 and stricter rules.

flashinfer-bench's loader ignores unknown fields, axes without a tensor, constraints without an axis, and a reference whose parameters are not
the inputs. They are errors here. Every error is a SchemaError whose message ends in `<field>: <reason>`.
"""

from __future__ import annotations

import ast
import json
import math
import re
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

import pydantic
from pydantic import AfterValidator, ConfigDict, Field, field_validator, model_validator

from scaled_mm.errors import BadParamError
from scaled_mm.schema import constraints
from scaled_mm.schema.tags import Compare, compare_of, logical_of
from scaled_mm.schema.vocabulary import LOGICAL_DTYPES, OP_TYPES, STATUSES, STORED_DTYPES

Text = Annotated[str, Field(min_length=1)]
Measured = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)]


class FrozenDict(dict):
    """An immutable dict."""

    def _refuse(self, *_, **__) -> None:
        raise TypeError("frozen: a schema's mappings cannot be changed")

    def __deepcopy__(self, _) -> FrozenDict:
        return self

    def __reduce__(self):
        return FrozenDict, (dict(self),)

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return FrozenDict({key: _frozen(one) for key, one in value.items()})
    return tuple(_frozen(one) for one in value) if isinstance(value, (list, tuple)) else value


Frozen = AfterValidator(_frozen)


def _inside(path: str) -> str:
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise ValueError(f"expected a path that stays inside its folder, got {path!r}")
    return path


InsidePath = Annotated[str, Field(min_length=1), AfterValidator(_inside)]


class SchemaError(BadParamError):
    """A schema file or its contents are invalid. The message names the file, the field and the reason."""


class _Model(pydantic.BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Axis(_Model):
    """An axis: type "const" with a value, or "var", bound by a workload."""

    type: Literal["const", "var"]
    value: Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)] | None = None
    description: str | None = None

    @model_validator(mode="after")
    def _a_value_if_constant(self) -> Axis:
        if (self.type == "const") != (self.value is not None):
            raise ValueError(f"expected {'a value for a const axis' if self.type == 'const' else 'no value for a var axis'}, got {self.value}")
        return self


class Tensor(_Model):
    """shape: names of axes; null for a scalar. dtype: the stored dtype."""

    shape: list[Text] | None
    dtype: str
    description: str | None = None

    @field_validator("dtype")
    @classmethod
    def _a_stored_dtype(cls, dtype: str) -> str:
        if dtype not in STORED_DTYPES:
            hint = "; packed blocks are stored as int8, and a tag logical:<tensor>=<format> names their format"
            raise ValueError(f"expected one of {', '.join(STORED_DTYPES)}, got {dtype!r}{hint if dtype in ('uint8', *LOGICAL_DTYPES) else ''}")
        return dtype


class Definition(_Model):
    """An operator: axes, inputs, outputs, and a PyTorch `run` that takes the inputs and returns the outputs, in order."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]
    op_type: str
    axes: dict[str, Axis]
    inputs: Annotated[dict[str, Tensor], Field(min_length=1)]
    outputs: Annotated[dict[str, Tensor], Field(min_length=1)]
    reference: Text
    tags: list[Text] = []
    description: str | None = None
    constraints: list[Text] = []

    @field_validator("op_type")
    @classmethod
    def _a_known_op_type(cls, op_type: str) -> str:
        if op_type not in OP_TYPES:
            raise ValueError(f"expected one of {', '.join(OP_TYPES)}, got {op_type!r}")
        return op_type

    @field_validator("axes", "inputs", "outputs")
    @classmethod
    def _names_are_identifiers(cls, named: dict[str, Any]) -> dict[str, Any]:
        for name in named:
            if not name.isidentifier():
                raise ValueError(f"expected names that are Python identifiers, got {name!r}")
        return named

    @field_validator("reference")
    @classmethod
    def _has_run(cls, text: str) -> str:
        run_parameters(text)
        return text

    @model_validator(mode="after")
    def _fits_together(self) -> Definition:
        both = set(self.inputs) & set(self.outputs)
        if both:
            raise ValueError(f"outputs: expected names that no input has, got {sorted(both)}")
        for kind, tensors in (("inputs", self.inputs), ("outputs", self.outputs)):
            for name, tensor in tensors.items():
                for axis in tensor.shape or ():
                    if axis not in self.axes:
                        raise ValueError(f"{kind}.{name}.shape: expected names of axes ({', '.join(self.axes)}), got {axis!r}")
        in_inputs = {axis for tensor in self.inputs.values() for axis in tensor.shape or ()}
        in_outputs = {axis for tensor in self.outputs.values() for axis in tensor.shape or ()}
        for name, axis in self.axes.items():
            if axis.type == "var" and name not in in_inputs:
                raise ValueError(f"axes.{name}: expected a var axis to be in the shape of an input, which binds it; no input has it")
            if name not in in_inputs | in_outputs:
                raise ValueError(f"axes.{name}: expected an axis that a tensor has; none does")
        parameters = run_parameters(self.reference)
        if parameters != list(self.inputs):
            raise ValueError(f"reference: expected run({', '.join(self.inputs)}), the inputs in order, got run({', '.join(parameters)})")
        for index, expression in enumerate(self.constraints):
            try:
                constraints.check(expression, set(self.axes))
            except ValueError as error:
                raise ValueError(f"constraints.{index}: {error}") from error
        self._check_tags()
        return self

    def _check_tags(self) -> None:
        tensors = {**self.inputs, **self.outputs}
        compare_of(self.tags)
        for name, fmt in logical_of(self.tags).items():
            if name not in tensors:
                raise ValueError(f"tags: logical:{name}={fmt} names no input or output")
            if fmt not in LOGICAL_DTYPES:
                raise ValueError(f"tags: logical:{name}=: expected one of {', '.join(LOGICAL_DTYPES)}, got {fmt!r}")
            tensor, expected = tensors[name], LOGICAL_DTYPES[fmt].block_bytes
            last = self.axes[tensor.shape[-1]] if tensor.shape and len(tensor.shape) > 1 else None
            if tensor.dtype != "int8" or last is None or last.value != expected:
                raise ValueError(
                    f"tags: logical:{name}={fmt}: expected int8 with an axis of blocks and a last const axis of {expected} bytes, "
                    f"got {tensor.dtype} {tensor.shape}"
                )

    @property
    def group(self) -> str:
        return OP_TYPES[self.op_type].group

    @property
    def var_axes(self) -> list[str]:
        return [name for name, axis in self.axes.items() if axis.type == "var"]

    @property
    def logical(self) -> dict[str, str]:
        """GGUF format by tensor name, for tensors that have one."""
        return logical_of(self.tags)

    @property
    def compare(self) -> Compare:
        """The comparison of a solution's outputs with the reference's."""
        return compare_of(self.tags)

    def sizes(self, bound: dict[str, int]) -> dict[str, int]:
        """The size of every axis; var axes from `bound`. Raises SchemaError if one is missing or unknown, or if a constraint is violated."""
        if set(bound) != set(self.var_axes):
            raise SchemaError(f"axes: expected values of {self.var_axes or 'no axes'} of {self.name}, got {list(bound)}")
        sizes = {name: bound[name] if axis.value is None else axis.value for name, axis in self.axes.items()}
        for index, expression in enumerate(self.constraints):
            if not constraints.holds(expression, sizes):
                said = ", ".join(f"{name} = {sizes[name]}" for name in sorted(constraints.names(expression)))
                raise SchemaError(f"constraints.{index}: expected {expression} to hold, got {said}")
        return sizes

    def shape(self, tensor: str, sizes: dict[str, int]) -> tuple[int, ...]:
        """The shape of an input or output that is not a scalar."""
        found = self.inputs.get(tensor) or self.outputs[tensor]
        return tuple(sizes[axis] for axis in found.shape)


class Source(_Model):
    path: InsidePath
    content: Text


class BuildSpec(_Model):
    language: Literal["python", "triton", "cpp", "cuda", "tilelang"]
    target_hardware: Annotated[list[Text], Field(min_length=1)]
    entry_point: Annotated[str, Field(pattern=r"^[^:]+::[A-Za-z_]\w*$")]
    dependencies: list[Text] = []
    destination_passing_style: bool = True
    binding: Literal["tvm-ffi", "torch"] | None = None


class Solution(_Model):
    """One implementation of a definition: its sources and its entry function."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]
    definition: Text
    author: Text
    spec: BuildSpec
    sources: Annotated[list[Source], Field(min_length=1)]
    description: str | None = None

    @model_validator(mode="after")
    def _has_its_entry(self) -> Solution:
        paths = [source.path for source in self.sources]
        if len(set(paths)) != len(paths):
            raise ValueError(f"sources: expected paths that differ, got {paths}")
        file = self.spec.entry_point.split("::")[0]
        if file not in paths:
            raise ValueError(f"spec.entry_point: expected a file of the sources ({', '.join(paths)}), got {file!r}")
        return self


class RandomInput(_Model):
    type: Literal["random"]


class ScalarInput(_Model):
    type: Literal["scalar"]
    value: bool | int | float


class SafetensorsInput(_Model):
    """A tensor in a file; path is relative to the folder that contains definitions/."""

    type: Literal["safetensors"]
    path: InsidePath
    tensor_key: Text


class Workload(_Model):
    """Sizes of the var axes, and the origin of each input."""

    axes: Annotated[dict[str, Count], Frozen]
    inputs: Annotated[dict[str, Annotated[RandomInput | ScalarInput | SafetensorsInput, Field(discriminator="type")]], Frozen]
    uuid: Text

    def check(self, definition: Definition) -> None:
        """Raises SchemaError unless it binds all var axes and all inputs of the definition."""
        definition.sizes(self.axes)
        if set(self.inputs) != set(definition.inputs):
            raise SchemaError(f"workload.inputs: expected {list(definition.inputs)}, got {list(self.inputs)}")
        for name, given in self.inputs.items():
            scalar = definition.inputs[name].shape is None
            if scalar != (given.type == "scalar"):
                raise SchemaError(f"workload.inputs.{name}: expected {'a scalar' if scalar else 'a tensor'}, got type {given.type!r}")
            if scalar and not _is_a(given.value, definition.inputs[name].dtype):
                raise SchemaError(f"workload.inputs.{name}.value: expected a finite {definition.inputs[name].dtype}, got {given.value!r}")
            if name in definition.logical and given.type == "random":
                raise SchemaError(
                    f"workload.inputs.{name}: expected safetensors for {definition.logical[name]} blocks, for random bytes have "
                    "scales that are not finite"
                )


class Correctness(_Model):
    """Errors are NaN if an output is NaN."""

    max_relative_error: float = 0.0
    max_absolute_error: float = 0.0
    extra: Annotated[dict[str, Any] | None, Frozen] = None

    @field_validator("max_relative_error", "max_absolute_error")
    @classmethod
    def _not_below_0(cls, error: float) -> float:
        if error < 0:
            raise ValueError(f"expected NaN or at least 0, got {error}")
        return error


class Performance(_Model):
    """Milliseconds per call, and reference_latency_ms / latency_ms."""

    latency_ms: Measured = 0.0
    reference_latency_ms: Measured = 0.0
    speedup_factor: Measured = 0.0


class Environment(_Model):
    hardware: Text
    libs: Annotated[dict[str, str], Frozen] = {}


class Evaluation(_Model):
    status: str
    environment: Environment
    timestamp: Text
    log: str = ""
    correctness: Correctness | None = None
    performance: Performance | None = None

    @field_validator("status")
    @classmethod
    def _a_known_status(cls, status: str) -> str:
        if status not in STATUSES:
            raise ValueError(f"expected one of {', '.join(STATUSES)}, got {status!r}")
        return status

    @model_validator(mode="after")
    def _has_what_its_status_says(self) -> Evaluation:
        for name, statuses in (("correctness", ("PASSED", "INCORRECT_NUMERICAL")), ("performance", ("PASSED",))):
            if (getattr(self, name) is not None) != (self.status in statuses):
                raise ValueError(f"{name}: expected {'one' if self.status in statuses else 'none'} with status {self.status}")
        return self


class Trace(_Model):
    """A workload (solution and evaluation null), or the result of a solution on a workload."""

    definition: Text
    workload: Workload
    solution: str | None = None
    evaluation: Evaluation | None = None

    @model_validator(mode="after")
    def _both_or_neither(self) -> Trace:
        if (self.solution is None) != (self.evaluation is None):
            raise ValueError("evaluation: expected a solution and its evaluation, or neither")
        return self


def run_parameters(text: str) -> list[str]:
    """Names of the parameters of the top-level function `run` of a text. Raises ValueError if the text is not Python or has no `run`."""
    try:
        module = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"expected Python, got {error.msg} in line {error.lineno}") from error
    except (ValueError, RecursionError, MemoryError) as error:  # zero bytes, or nesting too deep for Python's parser
        raise ValueError(f"expected Python, got {type(error).__name__}: {error}") from error
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name == "run":
            if node.args.vararg or node.args.kwarg or node.args.kwonlyargs or node.args.defaults:
                raise ValueError("expected run with positional parameters and no defaults")
            return [argument.arg for argument in [*node.args.posonlyargs, *node.args.args]]
    raise ValueError("expected a top-level function run, there is none")


def parse(model: type[_Model], text: str) -> Any:
    """The model of a JSON text. Raises SchemaError with the first invalid field and the reason."""
    try:
        json.loads(text, object_pairs_hook=_once)  # pydantic would accept duplicate keys and use the last one
    except SchemaError:
        raise
    except (ValueError, RecursionError):
        pass  # not JSON: reported below
    try:
        return model.model_validate_json(text)
    except pydantic.ValidationError as error:
        raise SchemaError(_reason(error)) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        name = next(name for name, _ in pairs if sum(other == name for other, _ in pairs) > 1)
        raise SchemaError(f"{name}: expected this field once, it is there twice")
    return found


def _is_a(value: bool | int | float, dtype: str) -> bool:
    """Whether a scalar is a valid number of a stored dtype."""
    if dtype == "bool":
        return isinstance(value, bool)
    return not isinstance(value, bool) and (isinstance(value, int) or ("float" in dtype and math.isfinite(value)))


def _reason(error: pydantic.ValidationError) -> str:
    first = error.errors()[0]
    # Errors raised by this module name their field themselves; a tag of a union is not a field.
    where = ".".join(str(part) for part in first["loc"] if part not in ("random", "scalar", "safetensors"))
    message = re.sub(r"^Value error, ", "", first["msg"])
    if first["type"] == "extra_forbidden":
        message = "expected no such field"
    elif first["type"] == "union_tag_not_found":
        message = "expected a type: random, scalar or safetensors"
    elif first["type"] == "missing":
        message = "expected this field, it is missing"
    elif first["type"] != "value_error":
        message = f"{message}, got {first['input']!r:.80}"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{where}: {message}{more}" if where else f"{message}{more}"
