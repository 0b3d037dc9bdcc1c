"""Int8 linear layers whose weight is split over the ranks of a group."""

from __future__ import annotations

import hashlib

import torch

from scaled_mm.core.checks import check_device
from scaled_mm.errors import BadParamError, BadTensorDtypeError, BadTensorShapeError
from scaled_mm.nn.linear import Int8Linear
from scaled_mm.nn.quantized import QuantizedActivation
from scaled_mm.parallel import choice, collectives
from scaled_mm.parallel.functional import all_reduce_linear, check_k, check_part, gathered, linear_of_quantized, reduce_scatter_linear
from scaled_mm.parallel.ranks import Ranks, ranks_of
from scaled_mm.rowwise.arithmetic import FLOATS
from scaled_mm.rowwise.operands import check_rows

REDUCE = ("reduce_scatter", "all_reduce")


class ColumnParallelInt8Linear(Int8Linear):
    """An `Int8Linear` with a block of the rows of the weight [N, K], which computes that block of the outputs. The name is Megatron-LM's, whose
    weight is [K, N].

    forward(x): x as `Int8Linear` takes it, the same on all ranks. Returns [..., N of this rank]. With gather_output=True it returns the outputs of
    all ranks, in order of rank; the N of each rank must be the same. The bits are those of the whole layer. Made by `from_shard`. Raises as
    `Int8Linear`; with gather_output=True or input_is_parallel=True on CPUs on all ranks.

    With input_is_parallel=True x is [..., K of all ranks / ranks], or a `QuantizedActivation` of that part, quantized with the scale of the whole
    row, and is gathered first: see `gather_linear`. So it can replace a `RowParallelInt8Linear`; its weight is divided along N instead of K.
    """

    is_shard = True
    ranks: Ranks | None = None
    gather_output = False
    input_is_parallel = False
    gather_input: str | None = None
    whole_n = 0  # N of all ranks
    gpu = ""  # that of all ranks, by which `choice` chooses

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
        input_is_parallel: bool = False,
        gather_input: str | None = None,
    ) -> ColumnParallelInt8Linear:
        """weight_shard: int8 [N of this rank, K]. weight_scale: float32, [1, N of this rank] or [N of this rank, 1]. bias: [N of this rank].
        input_is_parallel: each rank has its part of K of the input, of equal sizes. gather_input: how such a float input is gathered: "float" or
        "int8", see `gather_linear`; None: with NCCL what the cost model (`scaled_mm.parallel.cost`) predicts to be fastest for the number of tokens;
        "int8" with gloo, on unknown GPUs and under torch.compile; compile on all ranks or on none. Dynamic inputs with symmetric=False are gathered
        as they are. The other arguments: see `Int8Linear` and the class. A collective: all ranks must call it.

        Raises a ScaledMMError subclass on all ranks if one has a wrong argument, if K, the kind of input scale or, with gather_output, the N of
        the ranks differ, or with input_is_parallel if the number of ranks does not divide K."""
        ranks = Ranks.of(group)
        made: list[ColumnParallelInt8Linear] = []

        def facts() -> dict[str, object]:
            _check_tensors(weight_shard, weight_scale, bias, input_scale, input_zero_point)
            _check_bool("gather_output", gather_output)
            _check_bool("input_is_parallel", input_is_parallel)
            choice.check_gather(gather_input, allow_none=True)
            if gather_input is not None and not input_is_parallel:
                raise BadParamError(f"gather_input: expected None unless input_is_parallel=True, got {gather_input!r}")
            layer = cls.from_tensors(weight_shard, weight_scale, bias, input_scale, input_zero_point, symmetric=symmetric)
            if gather_input == "int8" and layer.input_scale is None and not layer.symmetric:
                raise BadParamError("gather_input: expected 'float' or None for dynamic inputs with symmetric=False, got 'int8'")
            if input_is_parallel:
                if layer.in_features % ranks.size:
                    raise BadTensorShapeError(f"weight_shard: expected a K that {ranks.size} ranks divide, got {layer.in_features}")
                check_k(layer.in_features, not layer.symmetric)
            made.append(layer)
            sizes = {"N": layer.out_features, "K": layer.in_features, "gpu": choice.gpu_of(weight_shard.device, ranks)}
            options = {"gather_output": gather_output, "input_is_parallel": input_is_parallel, "gather_input": gather_input}
            return _facts(layer) | options | sizes

        found = ranks.gather_facts(facts)
        arguments = {name: name for name in ("gather_output", "input_is_parallel", "gather_input")}
        of_sizes = {"K": "weight_shard"} | ({"N": "weight_shard"} if gather_output else {})
        ranks.require_same(found, **arguments, **of_sizes, **_INPUTS)
        made[0].ranks, made[0].gather_output = ranks, gather_output
        made[0].input_is_parallel, made[0].gather_input = input_is_parallel, gather_input
        made[0].whole_n = sum(of_rank["N"] for of_rank in found)
        made[0].gpu = choice.common_gpu(found)
        return made[0]

    def forward(self, x: torch.Tensor | QuantizedActivation) -> torch.Tensor:
        if not self.gather_output and not self.input_is_parallel:
            return super().forward(x)
        if self.input_is_parallel:
            x = self._gathered(x)
            if torch.compiler.is_compiling():  # nothing is compared, and a closure over each layer's forward would be compiled for each layer
                y = super().forward(x)
                return collectives.gather_columns(y, self.ranks) if self.gather_output else y
        forward, ranks = super().forward, ranks_of(self)
        y = ranks.checked(self.weight.device, lambda: forward(x), lambda y: {"shape": list(y.shape[:-1]), "dtype": y.dtype}, shape="x", dtype="x")
        return collectives.gather_columns(y, ranks) if self.gather_output else y

    @torch.no_grad()
    def _gathered(self, x: torch.Tensor | QuantizedActivation) -> torch.Tensor | QuantizedActivation:
        """The whole rows, in int8 or as they are, for `Int8Linear`."""

        def facts(_) -> dict[str, object]:
            quantized = isinstance(x, QuantizedActivation)
            kind = f"zero point {x.zero_point is not None}" if quantized else "float"
            return {"shape": list(x.shape), "dtype": x.dtype, "kind": kind}

        self.ranks.checked(self.weight.device, lambda: self._check_part(x), facts, shape="x", dtype="x", kind="x")
        if isinstance(x, QuantizedActivation):
            return QuantizedActivation(collectives.gather_columns(x.q, self.ranks), x.scale, x.dtype, x.zero_point)
        return gathered(x, self.ranks, self._way(x.shape[:-1].numel()), self.input_scale, self.input_zero_point)

    def _way(self, rows: int) -> str:
        if self.input_scale is None and not self.symmetric:
            return "float"
        sizes = rows, self.whole_n, self.in_features, self.ranks.size, self.gpu
        return choice.choose_gather(*sizes, static=self.input_scale is not None, gather_input=self.gather_input)

    def _check_part(self, x: torch.Tensor | QuantizedActivation) -> None:
        q = x.q if isinstance(x, QuantizedActivation) else x
        if q is x:
            check_rows("x", x)
        elif not isinstance(q, torch.Tensor) or not isinstance(x.scale, torch.Tensor):
            raise BadParamError(f"x: expected tensors in a QuantizedActivation, got {type(q).__name__} and {type(x.scale).__name__}")
        elif q.dtype is not torch.int8 or x.scale.dtype is not torch.float32:
            raise BadTensorDtypeError(f"x: expected int8 with float32 scales, got {q.dtype} with {x.scale.dtype}")
        elif x.scale.numel() not in (1, q.shape[:-1].numel()):
            raise BadTensorShapeError(f"x: expected a scale a row or one, got {list(q.shape)} and {list(x.scale.shape)}")
        check_part("x", q.shape, self.in_features, self.ranks.size)
        check_device("x", q, self.weight.device)
        if q is not x:
            check_k(self.in_features, x.zero_point is not None)


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
        rows = x.q.reshape(x.shape[:-1].numel(), self.in_features)
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
