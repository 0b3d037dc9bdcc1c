"""SmoothQuant's factors as powers of two, and folding them into the operation that precedes a linear layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from scaled_mm.models.calibration import Call, FloatBlock, Group

# Linear layer: the projection whose output channels enter its input linearly, multiplied by the gate's activation or averaged by attention. A factor
# on the rows of that projection is the same factor on that input.
PROJECTIONS = {"down_proj": "up_proj", "w2": "w3", "o_proj": "v_proj", "out_proj": "v_proj"}
_LESS = 0.8  # alpha is also tried at 0.8 times its value for the RMS statistics, which are smaller than maxima
LARGEST = 30  # limit of |exponent|, far inside of bfloat16's range


def importance(x: torch.Tensor, statistic: str) -> torch.Tensor:
    """The size of each column of x, float64 [K]. x: float32 [tokens, K].

    "max": the largest absolute value, as SmoothQuant has it. "rms": the root mean square. "relative": the root mean square of |x| / max|x| of the
    token. "relative" is insensitive to the few tokens with massive activations, which have scales of their own if inputs are quantized
    dynamically; "rms" is less sensitive than "max".
    """
    if statistic == "max":
        return x.abs().amax(0).double()
    if statistic == "rms":
        return x.double().square().mean(0).sqrt()
    largest = x.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return (x / largest).double().square().mean(0).sqrt()


def exponents(size: torch.Tensor, weights: Sequence[torch.Tensor], alpha: float) -> torch.Tensor:
    """The exponents e of the factors s = 2^e of the columns of an input, int32 [K]: s is near size^alpha / max|w|^(1 - alpha), which migrates the
    range of the inputs to the weights (SmoothQuant, arXiv:2211.10438, equation 4, where size is max|x|).

    size: [K], see `importance`. weights: [N, K] of each layer that reads the input.
    """
    of_weights = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0).double()
    s = size**alpha / of_weights ** (1 - alpha)
    s[(size == 0) | (of_weights == 0) | ~torch.isfinite(s)] = 1.0
    return s.log2().round().clamp(-LARGEST, LARGEST).int()


def shared(e: torch.Tensor, heads: int, repeats: int) -> torch.Tensor:
    """One exponent for the columns of attention heads that read the same value head: the largest. [heads * repeats * D] to [heads * D]."""
    return e.view(heads, repeats, -1).amax(1).reshape(-1)


def spread(e: torch.Tensor, heads: int, repeats: int) -> torch.Tensor:
    """The exponents of `shared` for all columns: [heads * D] to [heads * repeats * D]."""
    return e.view(heads, 1, -1).expand(-1, repeats, -1).reshape(-1)


class Fold:
    """Where the factors of a group's input can be folded. producer: the name of a norm or linear layer in the layer; factors divide its result.

    heads, repeats: of attention whose value heads are each read by `repeats` query heads; else 1.
    """

    def __init__(self, group: Group, producer: str, heads: int = 1, repeats: int = 1):
        self.names, self.producer, self.heads, self.repeats = group.names, producer, heads, repeats

    def candidates(self, x: torch.Tensor, weights: Sequence[torch.Tensor], alpha: float) -> list[torch.Tensor]:
        """Exponents [K] to choose from; see `exponents`."""
        tried = (("max", alpha), ("rms", alpha * _LESS), ("relative", alpha), ("relative", alpha * _LESS))
        found = [exponents(importance(x, statistic), weights, strength) for statistic, strength in tried]
        return [spread(shared(e, self.heads, self.repeats), self.heads, self.repeats) for e in found]

    def is_exact(self, block: torch.nn.Module, e: torch.Tensor) -> bool:
        """Whether heads that read the same values have the same exponents, and every folded tensor is exactly representable in its dtype. float16 can
        underflow or overflow."""
        same = torch.equal(spread(shared(e, self.heads, self.repeats), self.heads, self.repeats), e)
        return same and all(_is_exact(tensor, powers) for tensor, powers in self._scaled(block, e))

    @torch.no_grad()
    def apply(self, block: torch.nn.Module, e: torch.Tensor) -> None:
        """Divides the producer's result by 2^e and multiplies the weights that read it by 2^e, exactly."""
        for tensor, powers in self._scaled(block, e):
            tensor.data = torch.ldexp(tensor.double(), powers).to(tensor.dtype)  # new memory: writing would copy pages of a file that is mapped

    def tensors(self, block: torch.nn.Module) -> list[torch.Tensor]:
        """The parameters that `apply` changes."""
        writer = block.get_submodule(self.producer)
        found = [writer.weight, getattr(writer, "bias", None), *(block.get_submodule(name).weight for name in self.names)]
        return [tensor for tensor in found if tensor is not None]

    def _scaled(self, block: torch.nn.Module, e: torch.Tensor):
        """(tensor, the exponents of its factors) for each tensor that changes."""
        writer = block.get_submodule(self.producer)
        of_writer = shared(e, self.heads, self.repeats)
        for tensor in (writer.weight, getattr(writer, "bias", None)):
            if tensor is not None:
                yield tensor, -of_writer.to(tensor.device).view(-1, *[1] * (tensor.dim() - 1))
        for name in self.names:
            weight = block.get_submodule(name).weight
            yield weight, e.to(weight.device)


def _is_exact(tensor: torch.Tensor, powers: torch.Tensor) -> bool:
    scaled = torch.ldexp(tensor.detach().double(), powers)
    return torch.equal(scaled.to(tensor.dtype).double(), scaled)


def fold_of(work: FloatBlock, group: Group, groups: Sequence[Group], call: Call, hidden: torch.Tensor, out: torch.Tensor) -> Fold | None:
    """The place for a group's factors, or None. A candidate is accepted only if the decoder layer's output stays bit-identical with random powers of
    two folded.

    That detects other readers of the norm's result (a router, the residual of BERT) and norms that multiply by 1 + weight, without a list of names.
    call, hidden, out: one call of the layer and its output.
    """
    linears = {name for other in groups for name in other.names}
    for producer, heads, repeats in _candidates(work.block, group, linears):
        fold = Fold(group, producer, heads, repeats)
        generator = torch.Generator().manual_seed(0)
        e = torch.randint(-3, 4, (group.x.shape[1],), generator=generator, dtype=torch.int32)
        e = spread(shared(e, heads, repeats), heads, repeats).to(work.device)
        before = {name: parameter.clone() for name, parameter in work.block.named_parameters() if name.rpartition(".")[0] in (*group.names, producer)}
        fold.apply(work.block, e)
        same = torch.equal(work(call, hidden), out)
        with torch.no_grad():
            for name, parameter in before.items():
                work.block.get_parameter(name).copy_(parameter)
        if same:
            return fold
    return None


def _candidates(block: torch.nn.Module, group: Group, linears: set[str]):
    if group.norm is not None and block.get_submodule(group.norm).weight.numel() == group.x.shape[1]:  # not the norm of each head
        yield group.norm, 1, 1
    for name in group.names if len(group.names) == 1 else ():
        parent, _, child = name.rpartition(".")
        producer = ".".join(filter(None, (parent, PROJECTIONS.get(child, ""))))
        if child not in PROJECTIONS or producer not in linears:
            continue
        rows, k = block.get_submodule(producer).weight.shape[0], group.x.shape[1]
        size = getattr(block.get_submodule(parent), "head_dim", None) if parent else None
        if rows == k:
            yield producer, 1, 1
        elif size and k % rows == 0 and rows % size == 0:
            yield producer, rows // size, k // rows
