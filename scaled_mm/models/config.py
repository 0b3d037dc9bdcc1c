"""`Int8Config`: how `quantize_` quantizes the linear layers of a model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from scaled_mm.errors import BadParamError

ACTIVATIONS = ("auto", "dynamic", "static")
CLIPS = ("absmax", "percentile", "mse")


@dataclasses.dataclass(frozen=True)
class Int8Config:
    """The scheme of a model's linear layers. Weights are int8 with one scale for each output channel. What it says of inputs:

    activation: "dynamic": one scale for each token, computed from the data. "static": one scale from calibration. "auto": static where the
        error on the calibration data is at most 1.5 times that of "dynamic". Experts are always dynamic.
    smooth: the strength alpha of SmoothQuant (arXiv:2211.10438), from 0 to 1, or None. Factors are powers of two, so that folding them into the
        preceding norm or projection changes no bit of the float model. Used where a fold exists and the error drops.
    clip: the rule for the static scale of activation="static": "absmax", the "percentile" of the absolute values, or the least squared error relative
        to each token, "mse". "auto" ignores it and tries absmax, mse and the percentiles `percentile`, 99.99 and 99.999.
    percentile: of the absolute values, above 50 and at most 100.
    symmetric: whether inputs are quantized without a zero point.
    ignore: names of modules that stay as they are, or "re:" and a regular expression that the beginning of the name matches.
    overrides: pattern to the fields that differ, or to None, which leaves the layers unquantized. The first pattern that matches counts.
    Linear layers that are not called during calibration stay as they are. `quantize_` warns of patterns that match no layer, but for those of the
    default `ignore`.

    Raises BadParamError that names the field.
    """

    activation: str = "auto"
    smooth: float | None = 0.8
    clip: str = "mse"
    percentile: float = 99.9
    symmetric: bool = True
    ignore: Sequence[str] = ("lm_head", r"re:.*mlp\.gate$")
    overrides: Mapping[str, Mapping[str, object] | None] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        _one_of("activation", self.activation, ACTIVATIONS)
        _one_of("clip", self.clip, CLIPS)
        if self.smooth is not None:
            _number("smooth", self.smooth, "None or a number from 0 to 1", lambda value: 0 <= value <= 1)
        _number("percentile", self.percentile, "a number above 50 and at most 100", lambda value: 50 < value <= 100)
        if not isinstance(self.symmetric, bool):
            raise BadParamError(f"symmetric: expected True or False, got {self.symmetric!r}")
        if isinstance(self.ignore, str) or not isinstance(self.ignore, Sequence):
            raise BadParamError(f"ignore: expected a sequence of patterns, got {self.ignore!r}")
        object.__setattr__(self, "ignore", tuple(self.ignore))
        for pattern in self.ignore:
            check_pattern("ignore", pattern)
        if not isinstance(self.overrides, Mapping):
            raise BadParamError(f"overrides: expected a mapping of patterns to fields, got {self.overrides!r}")
        for pattern, fields in self.overrides.items():
            check_pattern("overrides", pattern)
            if fields is not None:
                self._with(pattern, fields)

    def of(self, name: str) -> Int8Config | None:
        """The config of the layer `name`, without overrides; None if the layer stays as it is."""
        if any(matches(pattern, name) for pattern in self.ignore):
            return None
        for pattern, fields in self.overrides.items():
            if matches(pattern, name):
                return None if fields is None else self._with(pattern, fields)
        return self

    def check_some_left(self, names: Sequence[str], place: str, argument: str = "config") -> None:
        """BadParamError if all of the layers `names`, which are in `place`, stay as they are."""
        if all(self.of(name) is None for name in names):
            got = f"ignore and overrides that exclude all {len(names)} linear layers and experts of {place}"
            raise BadParamError(f"{argument}: expected layers to quantize, got {got}")

    def unmatched(self, names: Sequence[str]) -> list[str]:
        """The patterns of `overrides`, and of `ignore` without its defaults, that match none of the names."""
        patterns = (*(pattern for pattern in self.ignore if pattern not in Int8Config.ignore), *self.overrides)
        return [pattern for pattern in patterns if not any(matches(pattern, name) for name in names)]

    def _with(self, pattern: str, fields: Mapping[str, object]) -> Int8Config:
        known = {field.name for field in dataclasses.fields(self)} - {"ignore", "overrides"}
        if not isinstance(fields, Mapping) or not set(fields) <= known:
            raise BadParamError(f"overrides: expected fields out of {', '.join(sorted(known))} for {pattern!r}, got {fields!r}")
        return dataclasses.replace(self, **{"overrides": {}, **fields})

    @classmethod
    def from_fields(cls, fields: object, source: str = "policy") -> Int8Config:
        """A config from a mapping, as a YAML or JSON file holds it. source: for messages."""
        known = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(fields, Mapping) or not set(fields) <= known:
            raise BadParamError(f"{source}: expected a mapping with keys out of {', '.join(sorted(known))}, got {fields!r}")
        try:
            return cls(**fields)
        except BadParamError as error:
            raise BadParamError(f"{source}: {error}") from None

    def to_fields(self) -> dict[str, object]:
        """The config as plain values for JSON or YAML."""
        plain = dataclasses.asdict(self)
        return {**plain, "ignore": list(self.ignore)}


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern names a module: its name, or "re:" and a regular expression for its beginning, as in compressed-tensors."""
    return re.match(pattern[3:], name) is not None if pattern.startswith("re:") else pattern == name


def check_pattern(field: str, pattern: object) -> None:
    """Checks a name or "re:" pattern. field: for messages."""
    if not isinstance(pattern, str):
        raise BadParamError(f"{field}: expected patterns as text, got {pattern!r}")
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            raise BadParamError(f"{field}: expected a regular expression after re:, got {pattern!r} ({error})") from None


def _one_of(field: str, value: object, expected: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in expected:
        raise BadParamError(f"{field}: expected one of {', '.join(map(repr, expected))}, got {value!r}")


def _number(field: str, value: object, expected: str, accept) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not accept(value):
        raise BadParamError(f"{field}: expected {expected}, got {value!r}")
