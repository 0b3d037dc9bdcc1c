"""Int8 linear layers whose weight is split over the ranks of a group."""

from __future__ import annotations

import torch

from scaled_mm.errors import K_BOUNDS, AccumulatorOverflowError, BadParamError
from scaled_mm.nn.linear import Int8Linear
from scaled_mm.nn.quantized import QuantizedActivation
from scaled_mm.parallel import collectives
from scaled_mm.parallel.functional import all_reduce_linear, mine, reduce_scatter_linear, scaled
from scaled_mm.parallel.ranks import Ranks
from scaled_mm.products.gemm import scaled_mm

REDUCE = ("reduce_scatter", "all_reduce")


class ColumnParallelInt8Linear(Int8Linear):
    """An `Int8Linear` with the rows of the weight that belong to this rank: its outputs are those columns of the whole layer's.

    forward(x): x as `Int8Linear` takes it, the same on all ranks. Returns [..., N of this rank]; with gather_output=True [..., N] in order of rank,
    for which all ranks must have as many rows. The bits are those of the whole layer.
    """

    is_shard = True

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
            layer = cls.from_tensors(weight_shard, weight_scale, bias, input_scale, input_zero_point, symmetric=symmetric)
            made.append(layer)
            return _facts(layer) | {"N of a rank": layer.out_features, "K": layer.in_features}

        found = ranks.agreed(facts)
        ranks.same(found, "K", "inputs", *(("N of a rank",) if gather_output else ()))
        made[0].ranks, made[0].gather_output = ranks, gather_output
        return made[0]

    def forward(self, x: torch.Tensor | QuantizedActivation) -> torch.Tensor:
        y = super().forward(x)
        return collectives.gather_columns(y, self.ranks) if self.gather_output else y


class RowParallelInt8Linear(Int8Linear):
    """An `Int8Linear` with the columns of the weight that belong to this rank. Int32 sums are reduced, then scaled once.

    forward(x): x float [..., K of this rank], or a `QuantizedActivation` whose scale is that of the whole row. Returns what
    `reduce_scatter_linear` or `all_reduce_linear` return.

    With exact=True the bits are those of the whole layer on one process, for any number of ranks.
    """

    is_shard = True

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
        input_scale: torch.Tensor | None = None,
        input_zero_point: torch.Tensor | None = None,
    ) -> RowParallelInt8Linear:
        """weight_shard: int8 [N, K of this rank]. The same on all ranks: weight_scale: float32, [1, N] or [N, 1]; bias: [N]; input_scale,
        input_zero_point: one value. reduce: "reduce_scatter": this rank's rows; "all_reduce": all rows. exact: see `reduce_scatter_linear`. A
        collective: all ranks must call it.

        Raises a ScaledMMError subclass on all ranks if one has a wrong argument, if what must be the same differs, or if the K of all ranks together
        could overflow int32."""
        ranks = Ranks.of(group)
        made: list[RowParallelInt8Linear] = []

        def facts() -> dict[str, object]:
            if reduce not in REDUCE:
                raise BadParamError(f"reduce: expected {' or '.join(map(repr, REDUCE))}, got {reduce!r}")
            layer = cls.from_tensors(weight_shard, weight_scale, bias, input_scale, input_zero_point)
            made.append(layer)
            values = {name: _values(getattr(layer, name)) for name in ("weight_scale", "bias", "input_scale", "input_zero_point")}
            return _facts(layer) | values | {"N": layer.out_features, "K of a rank": layer.in_features, "reduce": reduce, "exact": exact}

        found = ranks.agreed(facts)
        ranks.same(found, "N", "inputs", "reduce", "exact", "weight_scale", "bias", "input_scale", "input_zero_point")
        k, bound = sum(of_rank["K of a rank"] for of_rank in found), K_BOUNDS[input_zero_point is not None]
        if k > bound:
            raise AccumulatorOverflowError(f"weight_shard: expected K of all ranks of at most {bound}, got {k}")
        made[0].ranks, made[0].reduce, made[0].exact = ranks, reduce, exact
        return made[0]

    def forward(self, x: torch.Tensor | QuantizedActivation) -> torch.Tensor:
        everywhere = self.reduce == "all_reduce"
        if isinstance(x, QuantizedActivation):
            return self._of_whole_rows(x, everywhere)
        linear = all_reduce_linear if everywhere else reduce_scatter_linear
        prepared = self._constant_weight() if x.is_cuda else None
        weight = self.weight if prepared is None else prepared
        bias = self.bias if self.bias is None or self.bias.dtype in (x.dtype, torch.float32) else self.bias.float()
        static = dict(input_scale=self.input_scale, input_zero_point=self.input_zero_point)
        return linear(x, weight, self.weight_scale, bias, group=self.ranks, exact=self.exact, **static)

    def _of_whole_rows(self, x: QuantizedActivation, everywhere: bool) -> torch.Tensor:
        if not self.exact:
            raise BadParamError("x: expected a float tensor with exact=False, got a QuantizedActivation")
        rows = x.q.reshape(-1, self.in_features)
        self.ranks.check_rows(rows.shape[0], rows.device)
        zero_point = None if x.zero_point is None else x.zero_point.reshape(-1, 1)
        prepared = self._constant_weight() if rows.is_cuda else None
        acc = scaled_mm(rows, self.weight.t() if prepared is None else prepared, out_dtype=torch.int32, a_zero_point=zero_point)
        acc = (collectives.sum_to_all if everywhere else collectives.sum_to_rows)(acc, self.ranks)
        y = scaled(acc, mine(x.scale.reshape(-1, 1), rows.shape[0], self.ranks, everywhere), self.weight_scale, self.bias, x.dtype)
        return y.view(*x.shape[:-1], self.out_features) if everywhere else y


def _facts(layer: Int8Linear) -> dict[str, object]:
    return {"inputs": f"{layer.activation}{'' if layer.symmetric else ' asymmetric'}"}


def _values(tensor: torch.Tensor | None) -> str:
    """What two tensors must have in common to be the same, short enough to send."""
    import hashlib

    if tensor is None:
        return "none"
    content = tensor.detach().flatten().clone().view(torch.uint8).cpu().numpy().tobytes()
    return f"{tensor.dtype} of sha256 {hashlib.sha256(content).hexdigest()[:16]}"
