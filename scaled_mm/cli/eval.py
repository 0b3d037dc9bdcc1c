"""`scaled-mm eval`: perplexity of a model, and its distance from another."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from scaled_mm.cli import common

HELP = "perplexity, and error relative to a reference model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file or a name on the Hugging Face hub; W8A8 or float")
    parser.add_argument("--against", metavar="MODEL", help="the reference, usually the float model")
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="a text file; default: the package's, half of the topics of the Python language reference"
    )
    parser.add_argument("--windows", type=common.integer(1), default=12, help="windows of the text; default 12")
    parser.add_argument("--tokens", type=common.integer(2), default=256, help="tokens of a window; default 256")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), help="of what is not quantized; default: the checkpoint's")
    parser.add_argument("--fused", action="store_true", help="run norms and activations fused with quantization (fuse_)")
    parser.add_argument("--device", help="cuda, cuda:<index> or cpu; default: the first GPU, or the CPU without one")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a plot of the errors of decoder layers; needs --against")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    common.models_extra()
    import torch

    from scaled_mm.models.data import default_text, windows
    from scaled_mm.models.evaluate import evaluate
    from scaled_mm.models.fuse import fuse_
    from scaled_mm.models.source import load_model, load_tokenizer

    if args.plot is not None:
        _check_plot(args.plot, args.against)
    device, dtype = common.device_of(args.device), args.dtype and getattr(torch, args.dtype)
    text = default_text(evaluation=True) if args.text is None else common.text_of("--text", args.text)
    batches = windows(text, load_tokenizer(args.model), args.windows, args.tokens)
    model = load_model(args.model, tell=common.warn, dtype=dtype, device=device)
    against = None if args.against is None else load_model(args.against, tell=common.warn, dtype=dtype, device=device, argument="--against")
    if args.fused:
        fuse_(model)
    log = common.LogLines(common.console(stderr=True).is_terminal)
    result = evaluate(model, batches, against, step=lambda done: log.say(f"{done} of {len(batches)} pieces"))
    if args.json:
        common.print_json(result.to_dict(), indent=1)
    else:
        common.console(markup=False).print(_table(result))
    if args.plot is not None:
        try:
            _draw(result.layers, args.plot)
        except Exception as error:  # the result is printed: no second document
            common.say(f"--plot: {args.plot} cannot be drawn, {type(error).__name__}: {error}")
            return 2
    return 0


def _check_plot(path: Path, against: str | None) -> None:
    """BadParamError for a plot that could not be drawn, before the evaluation."""
    from scaled_mm.errors import BadParamError
    from scaled_mm.measure import plots

    if (reason := plots.unavailable()) is not None:
        raise BadParamError(f"--plot: {reason}")
    if against is None:
        raise BadParamError("--plot: expected --against MODEL too, whose decoder layers the plot compares, got none")
    from matplotlib.figure import Figure

    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise BadParamError(f"--plot: expected a file that ends in one of {', '.join(formats)}, got {path}")
    if path.is_dir() or not path.parent.is_dir():
        raise BadParamError(f"--plot: expected a file in a folder that is there, got {path}")
    common.writable_folder("--plot", path.parent)


def _table(result):
    table = common.narrow_table(f"{result.tokens} tokens")
    table.add_column("figure")
    table.add_column("value", justify="right")
    if result.perplexity is not None:
        reference = result.reference_perplexity
        known = reference is not None and math.isfinite(result.perplexity) and math.isfinite(reference)
        change = f" ({100 * (result.perplexity / reference - 1):+.2f} %)" if known else ""
        table.add_row("perplexity", f"{result.perplexity:.3f}{change}")
    if result.reference_perplexity is not None:
        table.add_row("perplexity of the reference", f"{result.reference_perplexity:.3f}")
        table.add_row("KL(reference || model), nats", f"{result.kl:.4f}")
        table.add_row("top-1 agreement", f"{100 * result.top1:.1f} %")
    if result.cosine is not None:
        table.add_row("cosine of embeddings", f"{result.cosine:.5f}")
    for name, error in result.layers.items():
        table.add_row(f"error of {name}", f"{error:.4f}")
    return table


def _draw(layers: dict[str, float], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(range(len(layers)), list(layers.values()), "o-")
    axes.set(xlabel="layer", ylabel="relative error of the layer's output", ylim=(0, None))
    figure.savefig(path, dpi=150)
