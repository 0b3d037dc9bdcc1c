"""The report of `quantize_`: what each layer got, and the errors that decided it."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from scaled_mm.errors import BadParamError

if TYPE_CHECKING:
    from rich.table import Table

VERSION = 1


@dataclasses.dataclass
class LayerReport:
    """One linear layer, or the experts of one layer.

    name: of the module. scheme: "static", "dynamic", or "float" for a layer that stays as it is. rule: how the static scale was found; "" for others.
    smooth: whether factors were folded. error, errors: of the scheme and of all candidates, root mean square over at most 512 sampled tokens of |y -
    reference| / |reference|, of all layers that share the input; None and empty without calibration. absmax, threshold: the largest absolute value
    of the input, and the percentile of the config. input_scale, input_zero_point: of a static scheme.
    """

    name: str
    scheme: str
    rule: str = ""
    smooth: bool = False
    error: float | None = None
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    absmax: float | None = None
    threshold: float | None = None
    input_scale: float | None = None
    input_zero_point: int | None = None


@dataclasses.dataclass
class QuantizationReport:
    """config: the fields of the Int8Config. layers: in the order of the model. exponents: of the folded factors, powers of two, by the first layer
    that reads them. fingerprint: of the model, the config and the calibration data."""

    config: dict[str, object]
    layers: list[LayerReport]
    exponents: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    fingerprint: str = ""

    def to_dict(self) -> dict[str, object]:
        """The report as plain values."""
        return {"version": VERSION, **dataclasses.asdict(self)}

    def save(self, path: str | os.PathLike) -> None:
        """Writes the report as JSON, and replaces the file atomically."""
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(self.to_dict(), indent=1))
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> QuantizationReport:
        """Reads what `save` wrote. Raises BadParamError for another file, and for fields of another type or numbers that are not finite."""
        try:
            document = json.loads(Path(path).read_text())
            if document.pop("version") != VERSION:
                raise ValueError("another version")
            layers = [LayerReport(**layer) for layer in document.pop("layers")]
            report = cls(layers=layers, **document)
            report._check_types()
            return report
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise BadParamError(f"{path}: expected a report of quantize_ (version {VERSION}): {error}") from error

    def _check_types(self) -> None:
        """ValueError that names the first field with a value that `save` does not write."""
        for index, layer in enumerate(self.layers):
            for field, (expected, accept) in _OF_LAYER.items():
                _check(f"layers[{index}].{field}", getattr(layer, field), expected, accept)
        _check("config", self.config, "an object", lambda value: isinstance(value, dict))
        _check("exponents", self.exponents, "an object", lambda value: isinstance(value, dict))
        for name, exponents in self.exponents.items():
            _check(f"exponents.{name}", exponents, "a list of integers", lambda value: isinstance(value, list) and all(type(e) is int for e in value))
        _check("fingerprint", self.fingerprint, "text", lambda value: isinstance(value, str))

    def counts(self) -> dict[str, int]:
        """How many layers have each scheme."""
        counts: dict[str, int] = {}
        for layer in self.layers:
            counts[layer.scheme] = counts.get(layer.scheme, 0) + 1
        return counts

    def table(self) -> Table:
        """Errors of each layer as a rich table."""
        from rich.table import Table

        table = Table(title="error of linear layers: root mean square over tokens of |y - reference| / |reference|")
        for column in ("layer", "scheme", "smooth"):
            table.add_column(column)
        for column in ("error", "dynamic", "best static", "max |x|", f"{self.config.get('percentile', '')} % of |x|"):
            table.add_column(column, justify="right")
        for layer in self.layers:
            dynamic = [error for name, error in layer.errors.items() if name.endswith("dynamic")]
            static = [error for name, error in layer.errors.items() if not name.endswith("dynamic")]
            numbers = layer.error, min(dynamic, default=None), min(static, default=None), layer.absmax, layer.threshold
            scheme = f"{layer.scheme} {layer.rule}".strip()
            table.add_row(layer.name, scheme, "yes" if layer.smooth else "no", *("" if one is None else f"{one:.4g}" for one in numbers))
        return table

    def plot(self, path: str | os.PathLike) -> None:
        """Draws the errors by layer to an image file. Needs matplotlib (`pip install ".[bench]"`)."""
        from matplotlib.figure import Figure

        measured = [layer for layer in self.layers if layer.errors]
        figure = Figure(figsize=(12, 5), layout="constrained")
        axes = figure.add_subplot()
        places = range(len(measured))
        for label, chosen in (("dynamic", True), ("best static", False)):
            errors = [min((e for n, e in layer.errors.items() if n.endswith("dynamic") is chosen), default=float("nan")) for layer in measured]
            axes.plot(places, errors, ".", label=label)
        axes.plot(places, [layer.error for layer in measured], "k_", label="chosen")
        axes.set(yscale="log", ylabel="relative error of the output", xlabel="layer")
        axes.set_xticks(places, [layer.name for layer in measured], rotation=90, fontsize=3)
        axes.legend()
        figure.savefig(path, dpi=200)


def _check(field: str, value: object, expected: str, accept: Callable[[object], bool]) -> None:
    if not accept(value):
        raise ValueError(f"{field}: expected {expected}, got {value!r:.80}")


def _is_number(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


_TEXT = "text", lambda value: isinstance(value, str)
_NUMBER = "a finite floating-point number or null", lambda value: value is None or _is_number(value)
_OF_LAYER = {  # field of LayerReport: what is expected, whether a value is that
    "name": _TEXT,
    "scheme": ("static, dynamic or float", lambda value: value in ("static", "dynamic", "float")),
    "rule": _TEXT,
    "smooth": ("true or false", lambda value: isinstance(value, bool)),
    "error": _NUMBER,
    "errors": ("an object with finite floating-point numbers", lambda value: isinstance(value, dict) and all(map(_is_number, value.values()))),
    "absmax": _NUMBER,
    "threshold": _NUMBER,
    "input_scale": _NUMBER,
    "input_zero_point": ("an integer from -128 to 127 or null", lambda value: value is None or (type(value) is int and -128 <= value <= 127)),
}
