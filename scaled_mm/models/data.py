"""Token batches for calibration and evaluation, and the text that is used when the caller gives none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from scaled_mm.errors import BadParamError, BadTensorDtypeError, BadTensorShapeError

PROMPTS, PROMPT_TOKENS = 50, 64  # of the default calibration
WINDOWS, WINDOW_TOKENS = 12, 256  # of the default evaluation
TEXTS = Path(__file__).parent / "texts"


def default_text(evaluation: bool = False) -> str:
    """English text of the package, the same for every version of Python: paragraphs of more than 80 characters of the language reference of Python
    3.11.7 (its module `pydoc_data.topics`, white space collapsed). Calibration has every second topic. Evaluation has the others, without paragraphs
    that occur in both."""
    name = "evaluation" if evaluation else "calibration"
    return (TEXTS / f"{name}.txt").read_text(encoding="utf-8").removesuffix("\n")


def windows(text: str, tokenizer, count: int, tokens: int) -> list[torch.Tensor]:
    """`count` windows of `tokens` tokens, [1, tokens] each, evenly spread over the text. A short text gives fewer or shorter windows."""
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids[0]
    if len(ids) < 2:
        raise BadParamError(f"text: expected at least 2 tokens, got {len(ids)}")
    tokens = min(tokens, len(ids))
    count = min(count, len(ids) // tokens)
    step = (len(ids) - tokens) // max(1, count - 1)
    return [ids[start : start + tokens][None] for start in range(0, count * max(step, 1), max(step, 1))]


def token_batches(calibration: Sequence, tokenizer) -> Iterator[torch.Tensor]:
    """[batch, tokens] for each item: a text, which needs the tokenizer, or token ids [tokens] or [batch, tokens].

    Raises BadParamError, BadTensorDtypeError or BadTensorShapeError, naming the item.
    """
    for index, item in enumerate(calibration):
        name = f"calibration[{index}]"
        if isinstance(item, str):
            if tokenizer is None:
                raise BadParamError("tokenizer: expected one for calibration with texts, got None")
            ids = tokenizer(item, return_tensors="pt", truncation=True).input_ids
        elif isinstance(item, torch.Tensor):
            if item.dtype not in (torch.int32, torch.int64):
                raise BadTensorDtypeError(f"{name}: expected token ids as integers, got {item.dtype}, which is neither int32 nor int64")
            if item.is_meta or item.layout is not torch.strided:
                raise BadParamError(f"{name}: expected token ids in memory, got a tensor on {item.device} with layout {item.layout}")
            ids = item.reshape(1, -1) if item.dim() == 1 else item
        else:
            raise BadParamError(f"{name}: expected a text or a tensor of token ids, got a {type(item).__name__}")
        if ids.dim() != 2 or not ids.numel():
            raise BadTensorShapeError(f"{name}: expected token ids [tokens] or [batch, tokens], not empty, got {list(ids.shape)}")
        yield ids


def check_ids(argument: str, model: torch.nn.Module, ids: torch.Tensor, source: str = "") -> None:
    """BadParamError for token ids that the model's embedding lacks, as those of another tokenizer. source: of the ids, if not the argument."""
    try:
        known = getattr(model.get_input_embeddings(), "num_embeddings", None)
    except (AttributeError, NotImplementedError):  # no model of transformers, or one whose embedding it does not know
        known = None
    if known is not None and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < known:
        found = f" in {source}" if source else ""
        raise BadParamError(f"{argument}: expected token ids from 0 to {known - 1}{found}, got {int(ids.min())} to {int(ids.max())}")
