"""Models and tokenizers of transformers by path, for the commands."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from scaled_mm.errors import BadParamError, lacks_memory
from scaled_mm.models.gguf_source import GgufSource, first_of


def load_model(
    path: str | os.PathLike,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    argument: str = "MODEL",
    gguf: GgufSource | None = None,
    tell: Callable[[str], object] = warnings.warn,
) -> torch.nn.Module:
    """A model in evaluation mode: Checkpoints with a quantization_config go through `from_pretrained`, which refuses all but W8A8; others, and GGUF
    files, are float models of transformers.

    path: a folder, a GGUF file, or a name on the Hugging Face hub. dtype: default: that of the checkpoint; float32 for a GGUF file.
    argument: the name of path in messages.
    gguf: the checked file of a GGUF path, from a caller that tells which of its tensors the model does not use.
    tell: otherwise called with a sentence that names them, if there are any, or says that they are not known.
    Raises BadParamError for what transformers cannot load, and for a checkpoint that lacks tensors; OSError for a GGUF file that cannot be opened.
    """
    import transformers

    from scaled_mm.models.load import from_pretrained

    folder, options = _where(path, argument)
    config = {} if options else _config(folder, argument)
    if config.get("quantization_config"):
        return from_pretrained(folder, dtype=dtype, device=device)
    names = config.get("architectures") or []
    source = gguf or (GgufSource(path, argument) if options else None)  # checks the file before transformers reads it
    cls = getattr(transformers, names[0], None) if names else None
    cls = transformers.AutoModelForCausalLM if cls is None else cls
    try:
        dtype = dtype or ("auto" if not options else torch.float32)
        model, found = cls.from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
    except Exception as error:  # its loaders raise what their code runs into, ZeroDivisionError for one
        if lacks_memory(error):
            raise  # not the file's fault
        raise BadParamError(f"{argument}: transformers cannot load {path}, {_told(error)}") from error
    if source is not None:
        source.check(model)
    # transformers gives them random values. Many checkpoints of encoders lack the pooler, which few programs use.
    parameters = {name for name, _ in model.named_parameters() if "pooler" not in name.split(".")}
    if missing := sorted(parameters & set(found["missing_keys"])):
        raise BadParamError(f"{argument}: expected all tensors of a {type(model).__name__}, {path} has no {first_of(missing)}")
    if options:  # the loader leaves attributes that say GGUF, which a saved model must not have
        model = _without_gguf_attributes(model)
    if source is not None and gguf is None and (words := source.unused_in_words(model)):
        tell(words)
    return model.to(device or "cpu").eval()


def load_tokenizer(path: str | os.PathLike):
    """The tokenizer beside a model. Raises BadParamError if there is none."""
    import transformers

    folder, options = _where(path)
    if options:
        GgufSource(path, "MODEL")  # checks the file before transformers reads it
    local = Path(folder).is_dir()
    if local and not options:
        _config(folder, "MODEL")  # transformers reads it too, and does not name it
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, **options)
    except MemoryError:
        raise
    except Exception as error:  # a malformed file raises whatever its readers run into
        where = path if local else f"{path} on the hub, which is no folder here"
        raise BadParamError(f"MODEL: expected a tokenizer in {where}, {_told(error)}") from error


def _where(path: str | os.PathLike, argument: str = "MODEL") -> tuple[str, dict[str, str]]:
    """(folder or name, options of transformers for a GGUF file)."""
    file = Path(path)
    if file.is_file():
        if file.suffix != ".gguf":
            raise BadParamError(f"{argument}: expected a folder, a GGUF file or a name on the hub, got the file {path}")
        return str(file.parent), {"gguf_file": file.name}
    if not file.is_dir() and (file.is_absolute() or len(file.parts) != 2 or file.suffix == ".gguf"):
        raise BadParamError(f"{argument}: expected a folder, a GGUF file or a name on the hub like owner/model, there is no {path}")
    return str(path), {}


def _config(folder: str, argument: str) -> dict:
    path = Path(folder) / "config.json"
    if path.is_file():
        try:
            document = json.loads(path.read_text())
        except (ValueError, RecursionError) as error:
            raise BadParamError(f"{argument}: expected JSON in {path}: {error}") from error
        if not isinstance(document, dict):
            raise BadParamError(f"{argument}: expected a JSON object in {path}, got a {type(document).__name__}")
        return document
    if Path(folder).is_dir():
        raise BadParamError(f"{argument}: expected a folder with config.json, there is none in {folder}")
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(folder).to_dict()
    except Exception as error:
        raise BadParamError(f"{argument}: transformers cannot load {folder}, {_told(error)}") from error


def _told(error: Exception) -> str:
    """An error of transformers in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _without_gguf_attributes(model: torch.nn.Module) -> torch.nn.Module:
    from accelerate import init_empty_weights

    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with init_empty_weights(include_buffers=False):  # the weights are handed over, not copied
        fresh = type(model)._from_config(config, dtype=model.dtype)  # not to(dtype): rotary frequencies stay float32
    fresh.load_state_dict(model.state_dict(), assign=True)
    fresh.tie_weights()
    fresh.generation_config = model.generation_config
    return fresh
