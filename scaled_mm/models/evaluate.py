"""`evaluate`: how far a quantized model is from its float model, on text."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence

import torch

from scaled_mm.errors import BadParamError, BadTensorShapeError
from scaled_mm.models.blocks import blocks_of
from scaled_mm.models.data import check_ids
from scaled_mm.models.search import relative_squares


@dataclasses.dataclass
class Evaluation:
    """tokens: predicted tokens. perplexity, reference_perplexity: exp of the mean negative log-likelihood, of language models. kl: the mean KL
    divergence KL(reference || model) in nats. top1: the fraction of tokens for which both predict the same token. cosine: the mean over sequences,
    of mean-pooled last hidden states, for encoders. layers: by name, the root mean square over tokens of |y - reference| / |reference|, where y is
    the output vector of a token of that decoder layer. All but tokens and perplexity need a reference."""

    tokens: int
    perplexity: float | None = None
    reference_perplexity: float | None = None
    kl: float | None = None
    top1: float | None = None
    cosine: float | None = None
    layers: dict[str, float] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """The figures that were measured, as plain values."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value not in (None, {})}


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    batches: Sequence[torch.Tensor],
    against: torch.nn.Module | None = None,
    *,
    step: Callable[[int], None] = lambda done: None,
) -> Evaluation:
    """Runs a model, and a reference beside it, on token ids.

    model, against: models of transformers; against may be None. Both have the same kind of output, vocabulary, hidden size and number of layers.
    batches: token ids, [batch, tokens] each, at least 2 tokens. step: called with the number of finished batches. Raises BadParamError or
    BadTensorShapeError, naming the argument.
    """
    if not batches:
        raise BadParamError("batches: expected at least one, got none")
    models = {"model": model} if against is None else {"model": model, "against": against}
    for argument, one in models.items():
        if "decoder_input_ids" in inspect.signature(one.forward).parameters:
            raise _other_kind(argument, one)
    names = [] if against is None else _names("model", model)
    if against is not None and len(theirs := _names("against", against)) != len(names):
        raise BadParamError(f"against: expected {len(names)} layers, as model has, got {len(theirs)}")
    sums, layers = _Sums(), {name: [] for name in names}
    for done, ids in enumerate(batches):
        if ids.dim() != 2 or ids.shape[1] < 2:
            raise BadTensorShapeError(f"batches[{done}]: expected [batch, tokens] with at least 2 tokens, got {list(ids.shape)}")
        for argument, one in models.items():
            check_ids(argument, one, ids, f"batches[{done}]")
        kind, output, hidden = _run("model", model, ids, keep=against is not None)
        wanted = None
        if against is not None:
            of_reference, wanted, reference = _run("against", against, ids, keep=True)
            _check_alike((kind, output, *hidden), (of_reference, wanted, *reference))
            for name, y, w in zip(layers, hidden, reference):
                layers[name].append(relative_squares(y.float(), w.to(y.device, torch.float32)).reshape(-1).double().cpu())
        sums.add(ids, kind, output, wanted)
        step(done + 1)
    return sums.result({name: float(torch.cat(squares).mean().sqrt()) for name, squares in layers.items()})


def _names(argument: str, model: torch.nn.Module) -> list[str]:
    try:
        prefix, blocks = blocks_of(model)
    except BadParamError as error:
        raise BadParamError(f"{argument}{str(error).removeprefix('model')}") from None
    return [f"{prefix}.{index}" for index in range(len(blocks))]


def _other_kind(argument: str, model: torch.nn.Module) -> BadParamError:
    return BadParamError(f"{argument}: expected a causal language model, or an encoder without a head, got a {type(model).__name__}")


def _run(argument: str, model: torch.nn.Module, ids: torch.Tensor, keep: bool) -> tuple[str, torch.Tensor, list[torch.Tensor]]:
    """("logits" or "last_hidden_state", that output, the outputs of its layers if `keep`)."""
    hidden: list[torch.Tensor] = []
    hooks, training = [], model.training
    model.eval()
    for block in blocks_of(model)[1] if keep else ():
        hooks.append(block.register_forward_hook(lambda module, arguments, out: hidden.append(out[0] if isinstance(out, tuple) else out)))
    try:
        outputs = model(ids.to(next(model.parameters()).device))
    finally:
        for hook in hooks:
            hook.remove()
        model.train(training)
    if (logits := getattr(outputs, "logits", None)) is not None and getattr(model, "can_generate", lambda: True)():
        return "logits", logits, hidden
    if logits is not None or getattr(outputs, "last_hidden_state", None) is None:
        raise _other_kind(argument, model)
    return "last_hidden_state", outputs.last_hidden_state, hidden


def _check_alike(ours: tuple, theirs: tuple) -> None:
    """BadParamError if outputs cannot be compared: (kind, output, the output of each layer)."""
    if ours[0] != theirs[0]:
        raise BadParamError(f"against: expected a model that returns {ours[0]}, as model does, got {theirs[0]}")
    for what, y, w in zip((ours[0], *["hidden states"] * len(ours)), ours[1:], theirs[1:]):
        if y.shape != w.shape:
            raise BadParamError(f"against: expected {what} {list(y.shape)}, as model has, got {list(w.shape)}")


class _Sums:
    """Sums over tokens and sequences."""

    def __init__(self):
        self.of: dict[str, float] = {}
        self.tokens = self.sequences = 0

    def add(self, ids: torch.Tensor, kind: str, output: torch.Tensor, wanted: torch.Tensor | None) -> None:
        self.tokens, self.sequences = self.tokens + ids[:, 1:].numel(), self.sequences + len(ids)
        if kind == "last_hidden_state":
            if wanted is not None:
                pooled = [one.double().mean(1).cpu() for one in (output, wanted)]
                self._add("cosine", torch.nn.functional.cosine_similarity(*pooled, dim=-1))
            return
        ours = output.double().log_softmax(-1)
        following = ids[:, 1:, None].to(ours.device)
        self._add("nll", -ours[:, :-1].gather(-1, following))
        if wanted is not None:
            reference = wanted.to(ours.device).double().log_softmax(-1)
            self._add("reference_nll", -reference[:, :-1].gather(-1, following))
            self._add("kl", (reference.exp() * (reference - ours)).sum(-1)[:, :-1])
            self._add("top1", (reference.argmax(-1) == ours.argmax(-1))[:, :-1].double())

    def _add(self, name: str, values: torch.Tensor) -> None:
        self.of[name] = self.of.get(name, 0.0) + float(values.sum())

    def result(self, layers: dict[str, float]) -> Evaluation:
        def mean(name: str, count: int) -> float | None:
            return self.of[name] / count if name in self.of else None

        def perplexity(nll: float | None) -> float | None:
            return None if nll is None else math.exp(nll) if nll < 700 else math.inf

        nll, reference = mean("nll", self.tokens), mean("reference_nll", self.tokens)
        means = {name: mean(name, self.tokens) for name in ("kl", "top1")}
        return Evaluation(self.tokens, perplexity(nll), perplexity(reference), **means, cosine=mean("cosine", self.sequences), layers=layers)
