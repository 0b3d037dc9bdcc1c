"""`scaled-mm generate`: text from a model, by greedy decoding."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

from scaled_mm.cli import common

HELP = "text from a model, by greedy decoding; a W8A8 model runs fused (fuse_) where it can"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file or a name on the Hugging Face hub; W8A8 or float")
    parser.add_argument("prompt", metavar="PROMPT", help="user message; without a chat template, the text to continue")
    parser.add_argument("--tokens", type=common.integer(1), default=64, help="new tokens at most; default 64")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), help="of what is not quantized; default: the checkpoint's")
    parser.add_argument("--device", help="cuda, cuda:<index> or cpu; default: the first GPU, or the CPU without one")
    parser.add_argument(
        "--reproducible",
        action="store_true",
        help="hidden states with the same bits on every device (reproducible_), so nearly always the same text: a fused, dense W8A8 model; slower",
    )
    parser.add_argument(
        "--packed",
        action="store_true",
        help="of a GGUF file: multiply with its own blocks (from_gguf) instead of dequantized weights; less memory after loading",
    )
    parser.add_argument("--requantize", action="store_true", help="with --packed: pack Q6_K weights, too, quantized again to Q8_0 (less accurate)")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON document: text, tokens per second, whether the model was fused, and the number of packed layers",
    )


def run(args: argparse.Namespace) -> int:
    common.models_extra()
    import time

    import torch

    from scaled_mm.errors import BadParamError
    from scaled_mm.models.data import check_ids
    from scaled_mm.models.fuse import fuse_
    from scaled_mm.models.gguf import from_gguf
    from scaled_mm.models.reproducible import reproducible_
    from scaled_mm.models.source import load_model, load_tokenizer
    from scaled_mm.nn import BlockLinear, Int8Linear

    device = common.device_of(args.device)
    if args.packed and not Path(args.model).is_file():
        raise BadParamError(f"--packed: expected a GGUF file as MODEL, got {args.model}")
    if args.requantize and not args.packed:
        raise BadParamError("--requantize: expected --packed beside it, got none")
    if not args.json:
        common.say(f"loading {args.model}")
    tokenizer = load_tokenizer(args.model)
    dtype = args.dtype and getattr(torch, args.dtype)
    if args.packed:
        options = dict(dtype=dtype, device=device, requantize=args.requantize, progress=not args.json)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*of transformers does not use", UserWarning)  # the report names them
            model = from_gguf(args.model, **options, report=lambda report: common.say(str(report)))
    else:
        model = load_model(args.model, tell=common.warn, dtype=dtype, device=device)
    fused = False
    if any(isinstance(module, Int8Linear) for module in model.modules()):
        try:
            fuse_(model)
            fused = True
        except BadParamError as error:
            common.say(f"not fused: {error}")
    if args.reproducible:
        reproducible_(model)
    if not model.can_generate():
        raise BadParamError(f"MODEL: expected one that generates text, got a {type(model).__name__}")
    if getattr(model.config, "is_encoder_decoder", False):  # its result does not begin with the prompt
        raise BadParamError(f"MODEL: expected a causal language model, got a {type(model).__name__}")
    inputs = _inputs(tokenizer, args.prompt)
    if not inputs["input_ids"].numel():
        raise BadParamError("PROMPT: expected some text, got none")
    check_ids("MODEL", model, inputs["input_ids"], "the tokens of PROMPT")
    inputs = {name: inputs[name].to(device) for name in ("input_ids", "attention_mask") if name in inputs}
    start = time.perf_counter()
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=args.tokens, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    seconds = time.perf_counter() - start
    text = tokenizer.decode(ids, skip_special_tokens=True)
    if args.json:
        packed = sum(isinstance(module, BlockLinear) for module in model.modules())
        document = {"text": text, "tokens": len(ids), "tokens_per_second": len(ids) / seconds, "fused": fused, "packed": packed}
        common.print_json(document, indent=1)
    else:
        common.console(markup=False).print(text, highlight=False, soft_wrap=True)  # a line of the text stays one line
        common.say(f"{len(ids)} tokens, {len(ids) / seconds:.1f} tokens/s")
    return 0


def _inputs(tokenizer, prompt: str):
    """The tokens of the prompt, in the chat template if there is one."""
    from scaled_mm.errors import BadParamError

    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # bytes that the terminal's encoding does not have
        raise BadParamError(f"PROMPT: expected UTF-8, got {prompt!r}") from error
    if not tokenizer.chat_template:
        return tokenizer(prompt, return_tensors="pt")
    messages = [{"role": "user", "content": prompt}]
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    except Exception as error:  # a program of the model's author
        raise BadParamError(f"MODEL: expected a chat template that takes one user message, {type(error).__name__}: {error}") from error
