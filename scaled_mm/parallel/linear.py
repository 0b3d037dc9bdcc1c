"""Int8 linear layers whose weight is split over the ranks of a group."""

from __future__ import annotations

import hashlib

import torch

from scaled_mm.errors import K_BOUNDS, AccumulatorOverflowError, BadParamError, BadTensorDtypeError, BadTensorShapeError
from scaled_mm.nn.linear import Int8Linear
from scaled_mm.nn.quantized import QuantizedActivation
from scaled_mm.parallel import choice, collectives
from scaled_mm.parallel.functional import all_reduce_linear, linear_of_quantized, reduce_scatter_linear
from scaled_mm.parallel.ranks import Ranks, ranks_of
from scaled_mm.rowwise.arithmetic import FLOATS

REDUCE = ("reduce_scatter", "all_reduce")


class ColumnParallelInt8Linear(Int8Linear):
    """An `Int8Linear` with a block of the rows of the weight [N, K], which computes that block of the outputs. The name is Megatron-LM's, whose
    weight is [K, N].

    forward(x): x as `Int8Linear` takes it, the same on all ranks. Returns [..., N of this rank]. With gather_output=True it returns the outputs of
    all ranks, in order of rank; the N of each rank must be the same. The bits are those of the whole layer. Made by `from_shard`. Raises as
    `Int8Linear`; with gather_output=True on CPUs on all ranks.
    """

    is_shard = True
    ranks: Ranks | None = None
    gather_output = False

    @classmethod
    def from_shard(
        cls,
        weight_shard: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        group=None,
        input_scale: torch.Tensor | None = None,
        input_zero_point: torch.Tensor | None = None,
        symmetric: bool = True,
        gather_output: bool = False,
    ) -> ColumnParallelInt8Linear:
        """weight_shard: int8 [N of this rank, K]. weight_scale: float32, [1, N of this rank] or [N of this rank, 1]. bias: [N of this rank].
        The other arguments: see `Int8Linear` and the class. A collective: all ranks must call it.

        Raises a ScaledMMError subclass on all ranks if one has a wrong argument, or if K, the kind of input scale or, with gather_output, the N of
        the ranks differ."""
        ranks = Ranks.of(group)
        made: list[ColumnParallelInt8Linear] = []

        def facts() -> dict[str, object]:
            _check_tensors(weight_shard, weight_scale, bias, input_scale, input_zero_point)
            _check_bool("gather_output", gather_output)
            layer = cls.from_tensors(weight_shard, weight_scale, bias, input_scale, input_zero_point, symmetric=symmetric)
            made.append(layer)
            return _facts(layer) | {"N": layer.out_features, "K": layer.in_features, "gather_output": gather_output}

        found = ranks.gather_facts(facts)
        of_sizes = {"K": "weight_shard"} | ({"N": "weight_shard"} if gather_output else {})
        ranks.require_same(found, gather_output="gather_output", **of_sizes, **_INPUTS)
        made[0].ranks, made[0].gather_output = ranks, gather_output
        return made[0]

    def forward(self, x: torch.Tensor | QuantizedActivation) -> torch.Tensor:
        if not self.gather_output:
            return super().forward(x)
        forward, ranks = super().forward, ranks_of(self)
        y = ranks.checked(self.weight.device, lambda: forward(x), lambda y: {"shape": list(y.shape[:-1]), "dtype": y.dtype}, shape="x", dtype="x")
        return collectives.gather_columns(y, ranks)


class RowParallelInt8Linear(Int8Linear):
    """An `Int8Linear` with a block of the columns of the weight [N, K]. Int32 sums are reduced, then scaled once. The name is Megatron-LM's, whose
    weight is [K, N].

    forward(x): x float [..., K of this rank], or a `QuantizedActivation` of this rank's K, quantized with the scale of the whole row. Returns what
    `reduce_scatter_linear` or `all_reduce_linear` return, and raises what they raise. Made by `from_shard`.

    With exact=True the bits are those of the whole layer on one process, for any number of ranks.
    """

    is_shard = True
    ranks: Ranks | None = None
    reduce = "reduce_scatter"
    exact = True
    via: str | None = None
    chunks: int | None = None
    whole_k = 0  # K of all ranks
    gpu = ""  # that of all ranks, by which `choice` chooses

    @classmethod
    def from_shard(
        cls,
        weight_shard: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        group=None,
        reduce: str = "reduce_scatter",
        exact: bool = True,
        via: str | None = None,
        chunks: int | None = None,
        input_scale: torch.Tensor | None = None,
        input_zero_point: torch.Tensor | None = None,
    ) -> RowParallelInt8Linear:
        """weight_shard: int8 [N, K of this rank]. The same on all ranks: weight_scale: float32, [1, N] or [N, 1]; bias: [N]; input_scale,
        input_zero_point: one value. reduce: "reduce_scatter": this rank's rows; "all_reduce": all rows. exact, via, chunks: see
        `all_reduce_linear`; via is for reduce="all_reduce", both are for exact=True. None: with NCCL what the cost model (`scaled_mm.parallel.cost`)
        predicts to be fastest; with gloo, for unknown GPUs and under torch.compile, which all ranks use or none, one chunk and an all-reduce. A
        collective: all ranks must call it.

        Raises a ScaledMMError subclass on all ranks if one has a wrong argument, if what must be the same differs, or if the K of all ranks together
        could overflow int32."""
        ranks = Ranks.of(group)
        made: list[RowParallelInt8Linear] = []

        def facts() -> dict[str, object]:
            if reduce not in REDUCE:
                raise BadParamError(f"reduce: expected {' or '.join(map(repr, REDUCE))}, got {reduce!r}")
            _check_bool("exact", exact)
            choice.check(via, chunks, allow_none=True)
            if via is not None and (reduce != "all_reduce" or not exact):
                raise BadParamError(f"via: expected None unless reduce='all_reduce' and exact=True, got {via!r}")
            if chunks is not None and not exact:
                raise BadParamError(f"chunks: expected None with exact=False, got {chunks!r}")
            _check_tensors(weight_shard, weight_scale, bias, input_scale, input_zero_point)
            layer = cls.from_tensors(weight_shard, weight_scale, bias, input_scale, input_zero_point)
            made.append(layer)
            options = {"reduce": reduce, "exact": exact, "via": via, "chunks": chunks}
            tensors = {"weight_scale": _digest(layer.weight_scale), "bias": _digest(layer.bias)}
            sizes = {"N": layer.out_features, "K": layer.in_features, "gpu": choice.gpu_of(weight_shard.device, ranks)}
            return _facts(layer) | options | tensors | sizes

        found = ranks.gather_facts(facts)
        arguments = {name: name for name in ("weight_scale", "bias", "reduce", "exact", "via", "chunks")}
        ranks.require_same(found, N="weight_shard", **arguments, **_INPUTS)
        made[0].whole_k = k = sum(of_rank["K"] for of_rank in found)
        check_k(k, input_zero_point is not None)
        made[0].ranks, made[0].reduce, made[0].exact = ranks, reduce, exact
        made[0].via, made[0].chunks = via, chunks
        made[0].gpu = choice.common_gpu(found)
        return made[0]

    def forward(self, x: torch.Tensor | QuantizedActivation) -> torch.Tensor:
        all_rows, ranks = self.reduce == "all_reduce", ranks_of(self)
        if isinstance(x, QuantizedActivation):
            return self._of_whole_rows(x, all_rows)
        linear = all_reduce_linear if all_rows else reduce_scatter_linear
        if not isinstance(x, torch.Tensor):
            return linear(x, self.weight, self.weight_scale, group=ranks)  # refuses it on all ranks
        prepared = self._constant_weight() if x.is_cuda else None
        weight = self.weight if prepared is None else prepared
        bias = self.bias if self.bias is None or self.bias.dtype in (x.dtype, torch.float32) else self.bias.float()
        static = dict(input_scale=self.input_scale, input_zero_point=self.input_zero_point)
        way = self._way(x.shape[:-1].numel(), static=self.input_scale is not None)
        options = {"via": way.via, "chunks": way.chunks} if all_rows else {"chunks": way.chunks}
        return linear(x, weight, self.weight_scale, bias, group=ranks, exact=self.exact, **options, **static)

    def _way(self, rows: int, *, static: bool) -> choice.Choice:
        sizes = rows, self.out_features, self.whole_k, self.ranks.size, self.gpu
        return choice.choose(*sizes, all_rows=self.reduce == "all_reduce", static=static, via=self.via, chunks=self.chunks)

    def _of_whole_rows(self, x: QuantizedActivation, all_rows: bool) -> torch.Tensor:
        facts = lambda _: {"shape": list(x.shape[:-1]), "zero points": x.zero_point is not None}  # noqa: E731
        self.ranks.checked(self.weight.device, lambda: self._check_whole_rows(x), facts, shape="x", **{"zero points": "x"})
        rows = x.q.reshape(-1, self.in_features)
        zero_point = None if x.zero_point is None else x.zero_point.reshape(-1, 1)
        prepared = self._constant_weight() if rows.is_cuda else None
        b = self.weight.t() if prepared is None else prepared
        scale = x.scale.reshape(-1, 1)
        way = self._way(rows.shape[0], static=True)
        y = linear_of_quantized(rows, scale, zero_point, b, self.weight_scale, self.bias, x.dtype, self.ranks, all_rows, *way)
        return y.view(*x.shape[:-1], self.out_features) if all_rows else y

    def _check_whole_rows(self, x: QuantizedActivation) -> None:
        if not self.exact:
            raise BadParamError("x: expected a float tensor with exact=False, got a QuantizedActivation")
        if x.shape[-1] != self.in_features:
            raise BadTensorShapeError(f"x: expected [..., {self.in_features}], the part of each row that is this rank's, got {list(x.shape)}")
        check_k(self.whole_k, x.zero_point is not None)


_INPUTS = {"kind_of_inputs": "input_scale", "input_scale": "input_scale", "input_zero_point": "input_zero_point"}


def _facts(layer: Int8Linear) -> dict[str, object]:
    """What all ranks must have in common, by the names in `_INPUTS`."""
    kind = f"{layer.activation}{'' if layer.symmetric else ' asymmetric'}"
    return {"kind_of_inputs": kind} | {name: _digest(getattr(layer, name)) for name in ("input_scale", "input_zero_point")}


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise BadParamError(f"{name}: expected True or False, got {value!r}")


def check_k(k: int, zero_point: bool) -> None:
    """AccumulatorOverflowError if int32 sums over K of all ranks could overflow."""
    if k > K_BOUNDS[zero_point]:
        raise AccumulatorOverflowError(f"weight_shard: expected K of all ranks of at most {K_BOUNDS[zero_point]}, got {k}")


def _check_tensors(weight, weight_scale, bias, input_scale, input_zero_point) -> None:
    """Checks what `Int8Linear.from_tensors` does not. Raises a ScaledMMError that names the argument."""
    given = dict(weight_shard=weight, weight_scale=weight_scale, bias=bias, input_scale=input_scale, input_zero_point=input_zero_point)
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor) and (tensor is not None or name in ("weight_shard", "weight_scale")):
            raise BadParamError(f"{name}: expected a tensor, got {type(tensor).__name__}")
        if tensor is not None and tensor.is_meta:
            raise BadParamError(f"{name}: expected a tensor with memory, got one on the meta device")
    if weight.dtype is not torch.int8:
        raise BadTensorDtypeError(f"weight_shard: expected int8, got {weight.dtype}")
    if weight.dim() != 2:
        raise BadTensorShapeError(f"weight_shard: expected [N, K] of this rank, got {list(weight.shape)}")
    n = weight.shape[0]
    if bias is not None and bias.dtype not in FLOATS:
        raise BadTensorDtypeError(f"bias: expected float16, bfloat16 or float32, got {bias.dtype}")
    if bias is not None and tuple(bias.shape) != (n,):
        raise BadTensorShapeError(f"bias: expected [{n}], got {list(bias.shape)}")


def _digest(tensor: torch.Tensor | None) -> str:
    """The dtype and a hash of the bytes of a tensor, to compare it between ranks."""
    if tensor is None:
        return "none"
    content = tensor.detach().flatten().clone().view(torch.uint8).cpu().numpy().tobytes()
    return f"{tensor.dtype} of sha256 {hashlib.sha256(content).hexdigest()[:16]}"
