"""The report of `quantize_`: what each layer got, and the errors that decided it."""

from __future__ import annotations

import dataclasses
import json
import os
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
        """Reads what `save` wrote. Raises BadParamError for another file."""
        try:
            document = json.loads(Path(path).read_text())
            if document.pop("version") != VERSION:
                raise ValueError("another version")
            layers = [LayerReport(**layer) for layer in document.pop("layers")]
            return cls(layers=layers, **document)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadParamError(f"{path}: expected a report of quantize_ (version {VERSION}): {error}") from error

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
