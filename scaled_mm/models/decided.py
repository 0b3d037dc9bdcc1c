"""The decisions of `quantize_` on the layers so far, and the file that a later run resumes from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path

import torch

from scaled_mm.errors import BadParamError
from scaled_mm.models.config import Int8Config
from scaled_mm.models.report import LayerReport, QuantizationReport

ANEW = "delete that file to start anew, or choose another folder"


class Decided:
    """The report while it grows, and its file."""

    def __init__(self, config: Int8Config, fingerprint: str, path: str | os.PathLike | None):
        self.path = None if path is None else Path(path)
        self.report = QuantizationReport(config.to_fields(), [], fingerprint=fingerprint)
        self.earlier: dict[str, LayerReport] = {}
        self.exponents: dict[str, list[int]] = {}
        if self.path is not None and self.path.is_dir():
            raise BadParamError(f"resume: expected a file, got the folder {path}")
        if self.path is not None and self.path.exists():
            try:
                earlier = QuantizationReport.load(self.path)
            except BadParamError as error:
                raise BadParamError(f"resume: {error}; {ANEW}") from error
            if earlier.fingerprint != fingerprint:
                raise BadParamError(f"resume: expected a file of the same model, config and calibration data, {self.path} is of others; {ANEW}")
            self.earlier, self.exponents = {layer.name: layer for layer in earlier.layers}, earlier.exponents
        try:
            self.save()  # before the model is changed
        except OSError as error:
            raise BadParamError(f"resume: expected a file that can be written to, got {path} ({error.strerror})") from error

    def save(self) -> None:
        """Writes the decisions so far, and those of an earlier run on later layers."""
        if self.path is not None:
            done = {layer.name for layer in self.report.layers}
            layers = [*self.report.layers, *(layer for layer in self.earlier.values() if layer.name not in done)]
            exponents = {**self.exponents, **self.report.exponents}
            dataclasses.replace(self.report, layers=layers, exponents=exponents).save(self.path)


def fingerprint_of(model: torch.nn.Module, config: Int8Config, inputs: list[torch.Tensor]) -> str:
    """What the decisions depend on: the config, the model's shapes and a few of its values, and the arguments of the first layer."""
    digest = hashlib.sha256(json.dumps(config.to_fields(), sort_keys=True).encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {parameter.dtype} {list(parameter.shape)}".encode())
        digest.update(parameter.detach().reshape(-1)[:: max(1, parameter.numel() // 64)].float().cpu().numpy().tobytes())
    for tensor in inputs:
        digest.update(f"{list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).float().cpu().numpy().tobytes())
    return digest.hexdigest()
