"""PNG plots of a path document: the speed-up over vLLM, of layers and of operators."""

from __future__ import annotations

from pathlib import Path

from scaled_mm.bench.analysis import speedups
from scaled_mm.bench.path.cases import LAYER, LINEARS
from scaled_mm.bench.path.peers import TORCH, VLLM
from scaled_mm.bench.path.record import PathDocument
from scaled_mm.measure import plots

NAMES = ("path_layers_vllm.png", "path_layers_torch.png", "path_operators_vllm.png")


def draw(document: PathDocument, directory: Path) -> list[Path]:
    """Writes the plots that the document has speed-ups for into `directory`; returns their paths."""
    layers = [case for case in document.cases if case.part == LAYER]
    operators = [case for case in document.cases if case.part not in LINEARS]
    wanted = ((layers, VLLM, "vLLM's quantizer and product"), (layers, TORCH, "torch.mm in bfloat16"), (operators, VLLM, "vLLM"))
    gpu = document.environment.gpu
    return [
        plots.save(plots.speedup_figure(found, against, gpu), directory / name)
        for (cases, rival, against), name in zip(wanted, NAMES, strict=True)
        if (found := speedups(cases, rival))
    ]
