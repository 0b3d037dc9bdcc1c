"""Renders the report of decoder layers from `decoder.json`, and from nothing else: the same file gives the same report."""

from __future__ import annotations

from pathlib import Path

from scaled_mm.bench.analysis import by_weight, names_run, over, speedups, wrong_cases
from scaled_mm.bench.decoder import goals
from scaled_mm.bench.decoder.cases import MODELS
from scaled_mm.bench.decoder.peers import BF16, VLLM
from scaled_mm.bench.decoder.record import DecoderCaseRecord, DecoderDocument
from scaled_mm.bench.report import goals_section, head, legend, noise, plots_section, regime_of, time_cell, what_did_not_run, write
from scaled_mm.measure import plots
from scaled_mm.measure.document import Heading, Items, Part, Table

DECODER_MD, PLOTS = "decoder.md", ("decoder_vllm.png", "decoder_bf16.png")
RIVALS = {VLLM: "vLLM's operators", BF16: "torch in bfloat16"}


def render(directory: Path, keep_plots: bool = False) -> list[Path]:
    """Reads `decoder.json` in `directory`, writes `decoder.md`, `decoder.html` and the plots there, and returns their paths."""
    directory = Path(directory)
    document = DecoderDocument.load(directory)
    path, title = directory / DECODER_MD, _title(document)
    return write(path, title, lambda drawn: contents(document, drawn), lambda: draw(document, directory), PLOTS, keep_plots)


def draw(document: DecoderDocument, directory: Path) -> list[Path]:
    """Writes the plots that the document has speed-ups for; returns their paths."""
    return [
        plots.save(plots.speedup_figure(found, against, document.environment.gpu), directory / name)
        for (rival, against), name in zip(RIVALS.items(), PLOTS, strict=True)
        if (found := speedups(document.cases, rival))
    ]


def contents(document: DecoderDocument, drawn: list[Path] | None = None) -> list[Part]:
    """The whole report. drawn: the plots beside it; None when they could not be drawn."""
    return [
        *head(document, _title(document), _method(document)),
        *goals_section(goals.outcomes(document)),
        *_summary(document),
        *_tables(document),
        *what_did_not_run(document),
        *plots_section(drawn),
    ]


def _title(document: DecoderDocument) -> str:
    return f"Decoder layers: {document.environment.gpu}"


def _method(document: DecoderDocument) -> str:
    timed = (
        "`time.perf_counter` around passes over the layers."
        if document.environment.arch == "cpu"
        else "CUDA-graph replays between events; the calls of a graph go through layers that together exceed the L2 cache, so weights come from "
        "memory."
    )
    models = "; ".join(_sizes(name) for name in MODELS if any(case.shape == name for case in document.cases))
    return (
        f"{timed}{regime_of(document)} Microseconds per layer, median. Random weights and activations, seed {document.settings.seed}. {models}. "
        "A layer: add the residual, normalize, attention, add the residual, normalize, feed-forward network. The tokens are one sequence without a "
        "KV cache, so 16 tokens are not 16 sequences in decoding. Attention is torch's `scaled_dot_product_attention` for every implementation. INT8 "
        "layers quantize each token. The errors are those of what attention adds to the residual, or of the output if that is larger."
    )


def _sizes(name: str) -> str:
    m = MODELS[name]
    network = f"{m.experts} experts, {m.choices} of a token, of I = {m.inner}" if m.experts else f"I = {m.inner}"
    return f"{name}: H = {m.hidden}, {m.heads} heads and {m.kv_heads} of key and value, {m.head} elements each, {network}"


def _summary(document: DecoderDocument) -> list[Part]:
    checked = [case for case in document.cases if any(result.bit_equal is not None for result in case.results.values())]
    wrong = wrong_cases(document)
    lines = [f"Graph and plain call of ours have equal bits: {len(checked) - len(wrong)} of {len(checked)} checked cases."]
    lines += [f"**Different bits**: {case.label}." for case in wrong]
    for name in names_run(document):
        errors = [error for case in document.cases if name in case.results and (error := case.results[name].error) is not None]
        if errors:
            lines.append(f"Relative error of `{name}` against the layer in float32: {min(errors):.4f} to {max(errors):.4f}.")
    return [Heading(2, "Summary"), Items(lines + noise(document.cases, document.environment.arch))]


def _tables(document: DecoderDocument) -> list[Part]:
    known = {one.name: one for one in document.implementations}
    names = names_run(document)
    rivals = [name for name in RIVALS if name in names]
    found: list[Part] = [Heading(2, "Microseconds per layer"), Items([legend(known[name]) for name in names])]
    header = ["tokens", *names, *(f"over {name}" for name in rivals)]
    for weight, cases in by_weight(document).items():
        found += [Heading(3, weight), Table(header, [_row(case, names, rivals) for case in cases], "r" * len(header))]
    return found


def _row(case: DecoderCaseRecord, names: list[str], rivals: list[str]) -> list[str]:
    factors = [over(case, name) for name in rivals]
    return [str(case.M), *(time_cell(case, name) for name in names), *("—" if factor is None else f"{factor:.2f}x" for factor in factors)]
