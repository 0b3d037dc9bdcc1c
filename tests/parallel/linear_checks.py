"""Checks of linear layers that run on every rank of a group of processes (`worker.py`). Each raises where it fails."""

from __future__ import annotations

import copy
import pickle
from unittest import mock

import pytest
import torch

import scaled_mm as sm
from scaled_mm import nn, parallel
from scaled_mm.parallel import collectives

N, K = 24, 120  # K is split evenly over 2, 3 and 4 ranks, N too


def part(count: int, rank: int, size: int) -> slice:
    return slice(rank * count // size, (rank + 1) * count // size)


def operands(tokens: int, dtype: torch.dtype = torch.float32):
    """(x [tokens, K] with outliers, weight int8 [N, K], weight_scale [N, 1], bias [N]), the same on every rank."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, K, generator=generator)
    x[:, ::37] *= 20
    weight = torch.randint(-128, 128, (N, K), dtype=torch.int8, generator=generator)
    return x.to(dtype), weight, torch.rand(N, 1, generator=generator) + 0.01, torch.randn(N, generator=generator).to(dtype)


def row_parallel_has_the_bits_of_one_process(rank, size):
    """Tokens: none, fewer than ranks, and a number that they do not divide; dtypes; uneven parts of K, one of them empty; static scales and zero
    points."""
    for tokens in (0, 1, 2, 7, 12):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x, weight, scale, bias = operands(tokens, dtype)
            columns = part(K, rank, size) if tokens != 7 else [slice(0, 0), slice(0, 50), slice(50, 51), slice(51, K)][rank]
            if tokens == 7 and rank == size - 1:
                columns = slice(columns.start, K)
            scaled = {"input_scale": torch.tensor([0.31])}
            for bias_of in (None, bias):
                for static in ({}, scaled, {**scaled, "input_zero_point": torch.tensor([-9], dtype=torch.int8)}):
                    want = sm.int8_linear(x, weight, scale, bias_of, **static)
                    shards = x[:, columns], weight[:, columns], scale, bias_of
                    rows = parallel.part_of(tokens, rank, size)
                    for chunks in (1, 2, 5):
                        for via in parallel.choice.VIA:
                            assert torch.equal(parallel.all_reduce_linear(*shards, **static, via=via, chunks=chunks), want)
                        assert torch.equal(parallel.reduce_scatter_linear(*shards, **static, chunks=chunks), want[rows])


def modules_have_the_bits_of_one_process(rank, size):
    x, weight, scale, bias = operands(6)
    want = nn.Int8Linear.from_tensors(weight, scale, bias)(x.view(2, 3, K))
    columns, rows = part(K, rank, size), part(N, rank, size)
    for reduce in ("all_reduce", "reduce_scatter"):
        layer = parallel.RowParallelInt8Linear.from_shard(weight[:, columns].contiguous(), scale.t(), bias, reduce=reduce)
        y = layer(x.view(2, 3, K)[..., columns])
        assert torch.equal(y, want if reduce == "all_reduce" else want.view(6, N)[parallel.part_of(6, rank, size)])
        q, of_rows = sm.quantize_int8(x)
        y = layer(nn.QuantizedActivation(q[:, columns], of_rows, x.dtype))
        assert torch.equal(y, want.view(6, N)[slice(None) if reduce == "all_reduce" else parallel.part_of(6, rank, size)])
    for gather in (False, True):
        layer = parallel.ColumnParallelInt8Linear.from_shard(weight[rows], scale[rows], bias[rows], gather_output=gather)
        assert torch.equal(layer(x.view(2, 3, K)), want if gather else want[..., rows])


def gathered_inputs_have_the_bits_of_one_process(rank, size):
    """0 to 12 tokens, dtypes, static scales and zero points, biases, a prepared weight; the outputs of all ranks and of this one."""
    columns, rows = part(K, rank, size), part(N, rank, size)
    scaled = {"input_scale": torch.tensor([0.31])}
    for tokens in (0, 1, 2, 7, 12):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x, weight, scale, bias = operands(tokens, dtype)
            for of_bias in (None, bias):
                for static in ({}, scaled, {**scaled, "input_zero_point": torch.tensor([-9], dtype=torch.int8)}):
                    want = sm.int8_linear(x, weight, scale, of_bias, **static)
                    mine = sm.prepare_weight(weight[rows].contiguous().t()) if tokens == 7 else weight[rows]
                    shards = x[:, columns], mine, scale[rows], None if of_bias is None else of_bias[rows]
                    for way in parallel.choice.GATHER_INPUT:
                        assert torch.equal(parallel.gather_linear(*shards, **static, gather_input=way), want)
                        assert torch.equal(parallel.gather_linear(*shards, **static, gather_input=way, gather_output=False), want[:, rows])
    x, weight, scale, bias = operands(6, torch.bfloat16)
    shards = x.view(2, 3, K)[..., columns], weight[rows], scale[rows].view(-1), bias[rows].float()
    want = sm.int8_linear(x, weight, scale, bias.float(), out_dtype=torch.float32).view(2, 3, N)
    for way in parallel.choice.GATHER_INPUT:
        assert torch.equal(parallel.gather_linear(*shards, out_dtype=torch.float32, gather_input=way), want)
        assert torch.equal(parallel.gather_linear(shards[0][1, 2], *shards[1:], out_dtype=torch.float32, gather_input=way), want[1, 2])
    without_k = x[:, :0], weight[rows, :0].contiguous(), scale[rows], bias[rows]
    for way in parallel.choice.GATHER_INPUT:
        assert torch.equal(parallel.gather_linear(*without_k, gather_input=way), bias.expand(6, N))
    uneven = [slice(0, 3), slice(3, 4), slice(4, 20), slice(20, N)][rank] if rank < size - 1 else slice((3, 4, 20)[size - 2], N)
    y = parallel.gather_linear(x[:, columns], weight[uneven], scale[uneven], gather_output=False)  # blocks of N that are not gathered may differ
    assert torch.equal(y, sm.int8_linear(x, weight, scale)[:, uneven])


def column_parallel_layers_of_a_divided_input_have_the_bits_of_one_process(rank, size):
    columns, rows = part(K, rank, size), part(N, rank, size)
    from_shard = parallel.ColumnParallelInt8Linear.from_shard
    static = {"input_scale": torch.tensor([0.31])}
    zero = {**static, "input_zero_point": torch.tensor([-9], dtype=torch.int8)}
    for tokens, dtype in ((6, torch.float32), (1, torch.bfloat16), (0, torch.float16)):
        x, weight, scale, bias = operands(tokens, dtype)
        for inputs in ({}, static, zero, {"symmetric": False}):
            layer = nn.Int8Linear.from_tensors(weight, scale, bias, **inputs)
            want = layer(x)
            for way in (None, *(("float",) if "symmetric" in inputs else parallel.choice.GATHER_INPUT)):
                for gather in (False, True):
                    options = {"input_is_parallel": True, "gather_input": way, "gather_output": gather}
                    made = from_shard(weight[rows], scale[rows], bias[rows], **inputs, **options)
                    assert torch.equal(made(x[:, columns]), want if gather else want[:, rows])
            made = from_shard(weight[rows], scale[rows], bias[rows], **inputs, input_is_parallel=True, gather_output=True)
            quantized = nn.QuantizedActivation(*sm.quantize_int8(x)[:2], x.dtype)
            part_of_it = nn.QuantizedActivation(quantized.q[:, columns], quantized.scale, x.dtype)
            assert torch.equal(made(part_of_it), layer(quantized))
            part_of_it = nn.QuantizedActivation(quantized.q[:, columns], torch.tensor([0.5]), x.dtype, torch.tensor([3], dtype=torch.int8))
            assert torch.equal(made(part_of_it), layer(nn.QuantizedActivation(quantized.q, torch.tensor([0.5]), x.dtype, part_of_it.zero_point)))
    x, weight, scale, bias = operands(6)
    made = from_shard(weight[rows], scale[rows], bias[rows], input_is_parallel=True, gather_output=True)
    assert torch.equal(made(x.view(2, 3, K)[..., columns]), sm.int8_linear(x, weight, scale, bias).view(2, 3, N))
    assert copy.deepcopy(made).ranks is made.ranks and made.input_is_parallel


def rows_that_are_not_finite_are_gathered(rank, size):
    columns, rows = part(K, rank, size), part(N, rank, size)
    for value in (float("nan"), float("inf"), float("-inf")):
        for column in (5, K - 1):
            x, weight, scale, bias = operands(3)
            x[1, column] = value
            want = sm.int8_linear(x, weight, scale, bias)
            for way in parallel.choice.GATHER_INPUT:
                found = parallel.gather_linear(x[:, columns], weight[rows], scale[rows], bias[rows], gather_input=way)
                assert torch.equal(found[[0, 2]], want[[0, 2]]) and found[1].isnan().all() and want[1].isnan().all()


def wrong_gathers_are_refused_on_all(rank, size):
    x, weight, scale, bias = operands(4, torch.bfloat16)
    columns, rows, last = part(K, rank, size), part(N, rank, size), rank == size - 1
    given = dict(x_shard=x[:, columns], weight_shard=weight[rows], weight_scale=scale[rows], bias=bias[rows])
    for name, wrong, message in (
        ("x_shard", x, rf"x_shard: expected \[..., K of this rank\] with K = {K} / {size} ranks, got"),
        ("x_shard", x[:3, columns], "x_shard: expected the same shape on all . ranks"),
        ("x_shard", x[:, columns].float(), "bias: expected torch.float32|bias: expected|x_shard: expected the same dtype"),
        ("x_shard", None, "x_shard: expected"),
        ("weight_shard", weight[rows].float(), "weight_shard: expected int8"),
        ("weight_scale", scale[rows].half(), "weight_scale: expected"),
        ("bias", bias, "bias: expected"),
        ("input_scale", torch.ones(1), "input_scale: expected the same quantization on all"),
        ("gather_input", "float", "gather_input: expected the same on all"),
        ("gather_input", "fp8", "gather_input: expected 'float' or 'int8', got 'fp8'"),
        ("gather_output", False, "gather_output: expected the same on all"),
        ("gather_output", 1, "gather_output: expected True or False, got 1"),
        ("out_dtype", torch.int8, "out_dtype: expected float16, bfloat16 or float32"),
        ("out_dtype", torch.float16, "out_dtype: expected the same on all|bias: expected"),
    ):
        with pytest.raises(sm.ScaledMMError, match=message):
            parallel.gather_linear(**given | ({name: wrong} if last else {}))
    fewer = slice(rows.start, rows.stop - last)
    shorter = given | dict(weight_shard=weight[fewer], weight_scale=scale[fewer], bias=bias[fewer])
    with pytest.raises(sm.BadParamError, match="weight_shard: expected the same N on all"):
        parallel.gather_linear(**shorter)
    with pytest.raises(sm.AccumulatorOverflowError, match="weight_shard: expected K of all ranks of at most 131071"):
        k = (131072 // size + 1) * size
        parallel.gather_linear(torch.zeros(1, k // size), torch.zeros(1, k, dtype=torch.int8), torch.ones(1))

    column = parallel.ColumnParallelInt8Linear.from_shard
    shards = weight[rows], scale[rows]
    for message, make in (
        ("input_is_parallel: expected the same on all", lambda: column(*shards, input_is_parallel=last)),
        ("input_is_parallel: expected True or False, got 2", lambda: column(*shards, input_is_parallel=2 if last else True)),
        ("gather_input: expected the same on all", lambda: column(*shards, input_is_parallel=True, gather_input="float" if last else None)),
        ("gather_input: expected None, 'float' or 'int8'", lambda: column(*shards, input_is_parallel=True, gather_input="x" if last else None)),
        ("gather_input: expected None unless input_is_parallel=True", lambda: column(*shards, gather_input="int8")),
        ("gather_input: expected 'float' or None", lambda: column(*shards, input_is_parallel=True, gather_input="int8", symmetric=False)),
        (f"weight_shard: expected a K that {size} ranks divide", lambda: column(weight[rows, :-1], scale[rows], input_is_parallel=True)),
        ("weight_shard: expected the same N on all", lambda: column(weight[fewer], scale[fewer], input_is_parallel=True, gather_output=True)),
    ):
        with pytest.raises(sm.ScaledMMError, match=message):
            make()
    layer = column(*shards, input_is_parallel=True, gather_output=True)
    q = torch.zeros(4, K // size, dtype=torch.int8)

    def quantized(**wrong):
        given = {"scale": torch.ones(4, 1), "zero_point": torch.tensor([3], dtype=torch.int8)} | wrong
        return nn.QuantizedActivation(q, given["scale"], x.dtype, given["zero_point"])

    for good, wrong, message in (
        (x[:, columns], x, rf"x: expected \[..., K of this rank\] with K = {K} / {size} ranks, got"),
        (x[:, columns], x[:2, columns], "x: expected the same shape on all . ranks"),
        (x[:, columns], x[:, columns].float(), "x: expected the same dtype on all . ranks"),
        (x[:, columns], q, "x: expected"),
        (x[:, columns], nn.QuantizedActivation(q, torch.ones(4, 1), x.dtype), "x: expected the same kind on all . ranks"),
        (x[:, columns], nn.QuantizedActivation(q, torch.ones(3, 1), x.dtype), "x: expected a scale a row or one"),
        (x[:, columns], nn.QuantizedActivation(q.float(), torch.ones(4, 1), x.dtype), "x: expected int8 with float32 scales"),
        (quantized(), quantized(scale=None), "x: expected tensors in a QuantizedActivation, got Tensor and NoneType"),
        (quantized(), quantized(zero_point=torch.tensor([3.0])), "zero_point: expected int32 or int8, got float32"),
    ):
        with pytest.raises(sm.ScaledMMError, match=message):
            layer(wrong if last else good)


def columns_are_gathered(rank, size):
    """Widths of all alignments, one row and none; slices that begin at odd addresses; NaN's bits."""
    from scaled_mm.parallel import collectives
    from scaled_mm.parallel.ranks import Ranks

    ranks, generator = Ranks.of(None), torch.Generator().manual_seed(0)
    for n in (0, 1, 2, 3, 4, 6, 8, 12, 24):
        for shape in ((0,), (1,), (5,), (2, 3), ()):
            content = torch.randint(-128, 128, (*shape, n * size * 8), dtype=torch.int8, generator=generator)
            for dtype in (torch.int8, torch.bfloat16, torch.float32, torch.int64):
                whole = content[..., : n * size * dtype.itemsize].contiguous()
                as_dtype = whole.view(dtype) if n else torch.empty(*shape, 0, dtype=dtype)
                mine = as_dtype[..., n * rank : n * (rank + 1)]
                found = collectives.gather_columns(mine, ranks)
                assert (found.dtype, found.shape) == (dtype, as_dtype.shape) and found.is_contiguous(), (n, shape, dtype, found.shape)
                assert not n or torch.equal(found.view(torch.int8), whole)


def a_descriptor_has_the_bits_of_one_process(rank, size):
    """Rows that ranks divide and do not, fewer than ranks, and none; chunks; static scales and zero points; a prepared weight."""
    static = {"input_scale": torch.tensor([0.31]), "input_zero_point": torch.tensor([-9], dtype=torch.int8)}
    with sm.Handle("cpu") as handle:
        for tokens, dtype in ((12, torch.float32), (7, torch.bfloat16), (1, torch.float16), (0, torch.float32)):
            x, weight, scale, bias = operands(tokens, dtype)
            columns, rows = part(K, rank, size), parallel.part_of(tokens, rank, size)
            for chunks, of_bias, inputs in (
                (None, bias, {}),
                (1, None, static),
                (2, bias.float(), {"input_scale": static["input_scale"]}),
                (3, bias, {}),
            ):
                w = weight[:, columns].contiguous()
                w = sm.prepare_weight(w.t()) if chunks == 3 else w
                out = torch.full((rows.stop - rows.start, N), 7.0, dtype=dtype)
                given = dict(out=out, x_shard=x[:, columns], weight_shard=w, weight_scale=scale, bias=of_bias, **inputs)
                with parallel.create_reduce_scatter_linear_descriptor(handle, **given, chunks=chunks) as descriptor:
                    for _ in range(2):
                        descriptor.calculate(**given, workspace=torch.empty(max(16, descriptor.workspace_size), dtype=torch.int8).fill_(-1))
                    assert torch.equal(out, sm.int8_linear(x, weight, scale, of_bias, **inputs)[rows])
                    descriptor.calculate(**given)


def wrong_descriptors_are_refused_on_all(rank, size):
    x, weight, scale, bias = operands(6)
    last, columns, rows = rank == size - 1, part(K, rank, size), parallel.part_of(6, rank, size)
    given = dict(out=torch.empty(rows.stop - rows.start, N), x_shard=x[:, columns], weight_shard=weight[:, columns], weight_scale=scale, bias=bias)
    create = parallel.create_reduce_scatter_linear_descriptor
    with sm.Handle("cpu") as handle:
        for name, wrong, message in (
            ("out", torch.empty(7, N), "out: expected"),
            ("out", torch.empty(rows.stop - rows.start, N, dtype=torch.int8), "out: expected float16, bfloat16 or float32"),
            ("x_shard", x[:5, columns], "out: expected|x_shard: expected the same rows on all"),
            ("x_shard", x[:, :3], "x_shard: expected"),
            ("bias", bias[:5], "bias: expected"),
            ("weight_scale", scale.half(), "weight_scale: expected torch.float32"),
            ("weight_shard", weight[:, columns].float(), "weight_shard: expected int8"),
            ("chunks", 0, "chunks: expected None or a positive integer, got 0"),
            ("chunks", 2, "chunks: expected the same on all"),
        ):
            others = message if last else "rank . of .: .*expected|expected the same"
            with pytest.raises(sm.ScaledMMError, match=others):
                create(handle, **given | ({name: wrong} if last else {}))
        with create(handle, **given) as descriptor:
            for name, wrong, message in (
                ("x_shard", x.half()[:, columns], "x_shard: expected torch.float32, got torch.float16"),
                ("out", torch.empty(9, N), "out: expected"),
                ("weight_shard", weight[:, columns].contiguous(), "weight_shard: expected strides .*, as at creation, got"),
                ("bias", None, "bias: expected a tensor with memory, got a NoneType"),
                ("input_scale", torch.ones(1), "input_scale: expected None, as at creation, got a Tensor"),
                ("workspace", torch.empty(16, dtype=torch.int8), "workspace: expected"),
            ):
                with pytest.raises(sm.ScaledMMError, match=message if last else f"rank {size - 1} of {size}: .*{message}"):
                    descriptor.calculate(**given | ({name: wrong} if last else {}))
        with pytest.raises(sm.BadParamError, match="descriptor: expected a live one, got one that was destroyed"):
            descriptor.calculate(**given)


def rows_are_gathered(rank, size):
    x = torch.randn(7, 12, generator=torch.Generator().manual_seed(0))
    for rows in (0, 1, 7):
        mine = parallel.part_of(rows, rank, size)
        for tensor in (x[:rows], x[:rows].bfloat16(), x[:rows].to(torch.int8), x[:rows].view(rows, 3, 4)):
            assert torch.equal(parallel.all_gather_rows(tensor[mine], rows), tensor)
        q, scale = sm.quantize_int8(x[:rows])
        for scales, want in ((scale[mine], scale), (torch.tensor([0.5]), torch.full((rows, 1), 0.5))):
            for apart in (0, 1 << 30):
                with mock.patch.object(collectives, "APART", apart):
                    found = parallel.all_gather_rows(nn.QuantizedActivation(q[mine], scales, torch.bfloat16), rows)
                assert torch.equal(found.q, q) and torch.equal(found.scale, want) and found.dtype is torch.bfloat16
    with pytest.raises(
        sm.ScaledMMError, match="mine: expected 1 of . rows, got" if rank == 1 else "rank 1 of .: BadTensorShapeError: mine: expected 1 of"
    ):
        parallel.all_gather_rows(x[: 1 + (rank == 1)], size)
    with pytest.raises(sm.BadParamError, match="rows: expected the same on all"):
        parallel.all_gather_rows(x[: 1 + (rank == 0)], 2 * size if rank == 0 else size)


def an_mlp_has_the_bits_of_one_process(rank, size):
    """gate and up by columns, down by rows; then the norm of this rank's rows, and a gather of int8."""
    generator = torch.Generator().manual_seed(0)
    h, inner, tokens = 32, 48, 5

    def weight(n: int, k: int):
        return torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=generator), torch.rand(n, 1, generator=generator) * 1e-3

    (gate, gate_scale), (up, up_scale), (down, down_scale) = weight(inner, h), weight(inner, h), weight(h, inner)
    x, residual, norm = (torch.randn(*shape, generator=generator) for shape in ((tokens, h), (tokens, h), (h,)))
    activated = sm.silu_and_mul(torch.cat((sm.int8_linear(x, gate, gate_scale), sm.int8_linear(x, up, up_scale)), -1))
    y = sm.int8_linear(activated, down, down_scale)
    quantized, total = sm.add_rms_norm(y, residual, norm, quantize="token")

    mine, rows = part(inner, rank, size), parallel.part_of(tokens, rank, size)
    local = sm.silu_and_mul(torch.cat((sm.int8_linear(x, gate[mine], gate_scale[mine]), sm.int8_linear(x, up[mine], up_scale[mine])), -1))
    of_rank = parallel.reduce_scatter_linear(local, down[:, mine], down_scale)
    (q, scale), of_residual = sm.add_rms_norm(of_rank, residual[rows], norm, quantize="token")
    assert torch.equal(of_rank, y[rows]) and torch.equal(of_residual, total[rows])
    gathered = parallel.all_gather_rows(nn.QuantizedActivation(q, scale, torch.float32), tokens)
    assert torch.equal(gathered.q, quantized[0]) and torch.equal(gathered.scale, quantized[1])


def numbers_that_are_not_finite_arrive_on_every_rank(rank, size):
    from scaled_mm.parallel import collectives
    from scaled_mm.parallel.ranks import Ranks

    bits = torch.tensor([0x7F800000, -1 if rank == 0 else 5, 0x7FC00000 if rank == 0 else 0x7F800000], dtype=torch.int32)  # -1: a NaN with a sign
    assert collectives.all_reduce_max(bits.view(torch.float32), Ranks.of(None)).isnan().tolist() == [False, True, True]
    x = torch.zeros(64, 128)
    x[3, 0] = float("nan")
    mine = part(128, rank, size)
    weight = torch.ones(8, 128, dtype=torch.int8)
    columns = x[:, mine].t().contiguous().t()  # torch's maximum of such a NaN may have a sign
    y = parallel.all_reduce_linear(columns, weight[:, mine], torch.ones(8))
    assert y[3].isnan().all() and not y[:3].isnan().any()
    for value in (float("nan"), float("inf")):
        x, weight, scale, bias = operands(3)
        x[1, 5] = value  # in the part of rank 0
        want = sm.int8_linear(x, weight, scale, bias)
        found = parallel.all_reduce_linear(x[:, part(K, rank, size)], weight[:, part(K, rank, size)], scale, bias)
        assert torch.equal(found[[0, 2]], want[[0, 2]]) and found[1].isnan().all() and want[1].isnan().all()


def the_usual_way_depends_on_the_number_of_ranks(rank, size):
    x, weight, scale, _ = operands(64, torch.bfloat16)
    mine = part(K, rank, size)
    want = sm.int8_linear(x, weight, scale)
    found = parallel.all_reduce_linear(x[:, mine], weight[:, mine], scale, exact=False)
    error = (found.float() - want.float()).norm() / want.float().norm()
    assert not torch.equal(found, want) and error < 0.05


def what_differs_between_ranks_is_refused_on_all(rank, size):
    _, weight, scale, bias = operands(1)
    mine, last = weight[:, part(K, rank, size)].contiguous(), rank == size - 1
    row, column = parallel.RowParallelInt8Linear.from_shard, parallel.ColumnParallelInt8Linear.from_shard
    for message, make in (
        ("weight_shard: expected the same N on all", lambda: row(mine[: N - last], scale[: N - last])),
        ("weight_scale: expected the same on all", lambda: row(mine, scale + last)),
        ("bias: expected the same on all", lambda: row(mine, scale, bias if last else None)),
        ("reduce: expected the same on all", lambda: row(mine, scale, reduce="all_reduce" if last else "reduce_scatter")),
        ("weight_shard: expected int8, got torch.float32", lambda: row(mine.float() if last else mine, scale)),
        ("weight_shard: expected the same K on all", lambda: column(weight[:, : K - last], scale)),
        ("input_scale: expected the same kind of inputs on all", lambda: column(weight, scale, input_scale=torch.tensor([1.0]) if last else None)),
        ("gather_output: expected the same on all", lambda: column(weight, scale, gather_output=last)),
        ("input_scale: expected the same on all", lambda: column(weight, scale, input_scale=torch.tensor([1.0 + last]))),
        ("bias: expected float16, bfloat16 or float32", lambda: row(mine, scale, bias.double() if last else bias)),
        ("bias: expected .24., got .23.", lambda: row(mine, scale, bias[: N - last])),
        ("via: expected None unless reduce='all_reduce'", lambda: row(mine, scale, via="all_reduce")),
        ("chunks: expected None with exact=False", lambda: row(mine, scale, chunks=2, exact=False)),
        ("weight_scale: expected a tensor, got NoneType", lambda: row(mine, None if last else scale)),
        ("of at most 131071", lambda: row(torch.zeros(1, 131072 // size + 1, dtype=torch.int8), torch.ones(1, 1))),
    ):
        with pytest.raises(sm.ScaledMMError, match=message):
            make()
    x, weight, scale, _ = operands(4)
    with pytest.raises(sm.BadParamError, match="x_shard: expected the same number of rows on all . ranks, got 4, "):
        parallel.all_reduce_linear(x[: 4 - last, part(K, rank, size)], weight[:, part(K, rank, size)], scale)


def parts_of_rows_are_checked(rank, size):
    _, weight, scale, _ = operands(1)
    layer = parallel.RowParallelInt8Linear.from_shard(weight[:, part(K, rank, size)].contiguous(), scale)
    whole = nn.QuantizedActivation(torch.zeros(size, K, dtype=torch.int8), torch.ones(size, 1), torch.float32)
    with pytest.raises(sm.BadTensorShapeError, match=rf"x: expected \[..., {K // size}\], the part of each row that is this rank's, got"):
        layer(whole)
    layer = parallel.RowParallelInt8Linear.from_shard(torch.zeros(1, 120000 // size, dtype=torch.int8), torch.ones(1, 1))
    zero = torch.zeros(2, 120000 // size, dtype=torch.int8)
    with pytest.raises(sm.AccumulatorOverflowError, match="expected K of all ranks of at most 65793, got 120000"):
        layer(nn.QuantizedActivation(zero, torch.ones(2, 1), torch.float32, torch.tensor([3])))


def layers_can_be_copied_but_not_pickled(rank, size):
    _, weight, scale, _ = operands(1)
    layer = parallel.RowParallelInt8Linear.from_shard(weight[:, part(K, rank, size)].contiguous(), scale)
    assert copy.deepcopy(layer).ranks is layer.ranks
    with pytest.raises(sm.BadParamError, match="save before `parallelize_`"):
        pickle.dumps(layer)


def outputs_of_other_rows_are_not_gathered(rank, size):
    _, weight, scale, _ = operands(1)
    gathers = parallel.ColumnParallelInt8Linear.from_shard(weight, scale, gather_output=True)
    with pytest.raises(sm.BadParamError, match="x: expected the same shape on all . ranks"):
        gathers(torch.zeros(3 + (rank == 0), K))
    with pytest.raises(sm.ScaledMMError, match="x: expected .* K = 120"):
        gathers(torch.zeros(3, K - (rank == size - 1)))


def arguments_that_change_the_collectives_must_be_the_same(rank, size):
    x, weight, scale, bias = operands(4, torch.bfloat16)
    shards, last = (x[:, part(K, rank, size)], weight[:, part(K, rank, size)], scale), rank == size - 1
    for name, of_last, of_others in (
        ("exact", False, True),
        ("out_dtype", torch.float16, None),
        ("bias", bias, None),
        ("chunks", 2**70, 1),
        ("via", "reduce_scatter", "all_reduce"),
        ("input_scale", torch.ones(1), None),
    ):
        with pytest.raises(sm.BadParamError, match=f"{name}: expected the same (quantization )?on all"):
            parallel.all_reduce_linear(*shards, **{name: of_last if last else of_others})


def one_rank_exits(rank, size):
    """The collective of the others must fail before the timeout."""
    import os
    import sys
    from pathlib import Path

    x, weight, scale, _ = operands(4)
    mine = part(K, rank, size)
    if rank == 1:
        (Path(sys.argv[3]) / "exit").write_text("")
        os._exit(7)
    parallel.all_reduce_linear(x[:, mine], weight[:, mine], scale)
