"""`scaled-mm quantize`: a model of transformers as a W8A8 checkpoint."""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from scaled_mm.cli import common

if TYPE_CHECKING:
    import torch

    from scaled_mm.models.config import Int8Config

HELP = "quantize a model to W8A8 and write a checkpoint"
REPORT = "quantization.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file or a name on the Hugging Face hub")
    parser.add_argument("--out", required=True, type=common.folder, metavar="DIR", help="folder of the checkpoint; the same command resumes in it")
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="a text file; none: inputs are quantized dynamically; default: the package's, half of the topics of the Python language reference",
    )
    parser.add_argument("--prompts", type=common.integer(1), default=50, help="windows of 64 tokens of the text; default 50")
    parser.add_argument("--policy", type=Path, metavar="FILE", help="YAML or JSON with fields of Int8Config, such as activation: dynamic")
    parser.add_argument("--format", choices=("compressed-tensors", "w8a8_int8"), default="compressed-tensors", help="w8a8_int8 is SGLang's")
    parser.add_argument(
        "--dtype", choices=("float16", "bfloat16", "float32"), help="dtype to load the model in; default: the checkpoint's, float32 for GGUF"
    )
    parser.add_argument(
        "--device", help="cuda, cuda:<index> or cpu, where decoder layers are computed; default: the first GPU, or the CPU without one"
    )
    parser.add_argument(
        "--offload", action="store_true", help="for a model larger than the memory: keep int8 weights in files of DIR until the checkpoint is written"
    )
    parser.add_argument("--json", action="store_true", help="print the report as one JSON document")


def run(args: argparse.Namespace) -> int:
    common.models_extra()
    from scaled_mm.errors import BadParamError
    from scaled_mm.measure import plots
    from scaled_mm.models.config import Int8Config
    from scaled_mm.models.data import default_text

    config = Int8Config() if args.policy is None else _policy(args.policy)
    if args.format == "w8a8_int8" and config.activation == "auto":
        config = Int8Config(**{**config.to_fields(), "activation": "dynamic"})  # the format holds nothing else
    if args.model and Path(args.model).exists() and Path(args.model).resolve() in (args.out.resolve(), *args.out.resolve().parents):
        raise BadParamError(f"--out: expected another folder than that of the model, and none in it, got {args.out}")
    text = default_text() if args.calibration is None else None
    if args.calibration is not None and str(args.calibration) != "none":
        text = common.text_of("--calibration", args.calibration)
    made = not args.out.exists()
    plots.preload()  # before the model is loaded: compiled parts of other packages can keep matplotlib from loading
    from scaled_mm.models.save import check_folder

    out = check_folder(args.out, "--out")
    try:
        return _quantize(args, config, text, out)
    except BaseException:
        if made and not any(out.iterdir()):
            out.rmdir()
        raise


def _quantize(args: argparse.Namespace, config: Int8Config, text: str | None, out: Path) -> int:
    import torch

    from scaled_mm.errors import BadParamError
    from scaled_mm.models.data import PROMPT_TOKENS, windows
    from scaled_mm.models.quantize import quantize_
    from scaled_mm.models.save import check_savable, save_pretrained
    from scaled_mm.models.source import load_model, load_tokenizer

    device = common.device_of(args.device)
    if not args.json:
        common.say(f"loading {args.model}")
    tokenizer = load_tokenizer(args.model)
    model = load_model(args.model, tell=common.warn, dtype=args.dtype and getattr(torch, args.dtype))
    check_savable(model)
    _check_config(config, model, args.format)
    batches = None if text is None else windows(text, tokenizer, args.prompts, PROMPT_TOKENS)
    with common.terminable(), tempfile.TemporaryDirectory(dir=out, prefix=".int8") as folder:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            try:
                report = quantize_(model, config, batches, device=device, resume=out / REPORT, offload=folder if args.offload else None)
            except BadParamError as error:
                if not str(error).startswith("resume: "):
                    raise
                raise BadParamError(f"--out: {str(error).removeprefix('resume: ')}") from error  # the file is in that folder
        save_pretrained(model, out, args.format, tokenizer=tokenizer)
    report.save(out / REPORT)
    plot = _plot(report, out)
    if args.json:
        common.print_json(report.to_dict(), indent=1)
    else:
        console = common.console(markup=False)
        console.print(report.table())
        counts = ", ".join(f"{count} {scheme}" for scheme, count in report.counts().items())
        console.print(f"{counts} linear layers. Wrote {out}, with {REPORT}{plot}.", highlight=False)
    for warning in caught:
        if "static scales" in str(warning.message):
            common.warn(str(warning.message))
    return 0


def _check_config(config: Int8Config, model: torch.nn.Module, format: str) -> None:
    """BadParamError for schemes that `save_pretrained` would refuse whatever calibration finds; warns of patterns without a layer."""
    from scaled_mm.errors import BadParamError
    from scaled_mm.models.blocks import blocks_of, experts_of, linears_of
    from scaled_mm.models.save import TOGETHER

    prefix, blocks = blocks_of(model)
    linears, experts = ([f"{prefix}.{index}.{name}" for index, block in enumerate(blocks) for name in of(block)] for of in (linears_of, experts_of))
    configs = {name: config.of(name) for name in linears}
    config.check_some_left([*linears, *experts], prefix, "--policy")
    for pattern in config.unmatched([*linears, *experts]):
        common.warn(f"--policy: {pattern!r} matches no linear layer or experts in {prefix}")
    for name, one in configs.items():
        if format == "w8a8_int8" and one is not None and _scheme(one) != "dynamic":
            raise BadParamError(f"--policy: expected dynamic for {name}, as the format w8a8_int8 holds nothing else, got {_scheme(one)}")
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in configs):
        for children in TOGETHER:
            group = {child: configs[f"{parent}.{child}"] for child in children if f"{parent}.{child}" in configs}
            some = [one for one in group.values() if one is not None]
            kinds = {one.activation for one in some}
            if 0 < len(some) < len(group) or len({one.symmetric for one in some}) > 1 or {"static", "dynamic"} <= kinds:
                described = ", ".join(f"{child} {_scheme(one)}" for child, one in group.items())
                raise BadParamError(f"--policy: expected one scheme for {', '.join(group)} of {parent}, got {described}")


def _scheme(config: Int8Config | None) -> str:
    return "not quantized" if config is None else f"{config.activation}{'' if config.symmetric else ' asymmetric'}"


def _policy(path: Path):
    import yaml

    from scaled_mm.errors import BadParamError
    from scaled_mm.models.config import Int8Config

    try:
        fields = yaml.safe_load(common.text_of("--policy", path))
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: of a date that does not exist
        raise BadParamError(f"--policy: expected YAML or JSON in {path}: {' '.join(str(error).split())}") from None
    return Int8Config.from_fields(fields, f"--policy: {path}")


def _plot(report, out: Path) -> str:
    """Draws the errors by layer, if matplotlib can be loaded. Returns the end of a sentence."""
    from scaled_mm.measure import plots

    if (reason := plots.unavailable()) is not None:
        return f"; no plot: {reason}"
    report.plot(out / "quantization.png")
    return " and quantization.png"
