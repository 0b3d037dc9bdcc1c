"""The operators as torch sees them: schemas, fake implementations, torch.compile. On the CPU, and on a GPU where there is one."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.errors import BadTensorDtypeError, BadTensorShapeError, ScaledMMError
from scaled_mm.products.gemm import GEMM

OUT_DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int32]


def operands(device: str, M: int = 5, N: int = 32, K: int = 48, seed: int = 0, zero_points: bool = False, scaled: bool = True) -> dict:
    generator = torch.Generator().manual_seed(seed)
    a, weight = (torch.randint(-128, 128, (rows, K), dtype=torch.int8, generator=generator) for rows in (M, N))
    made = {"a": a, "weight": weight}
    if scaled:
        made |= {
            "a_scale": torch.rand(M, 1, generator=generator),
            "b_scale": torch.rand(N, generator=generator),
            "bias": torch.randn(N, generator=generator),
        }
    if zero_points:
        made |= {
            "a_zero_point": torch.randint(-128, 128, (M,), dtype=torch.int32, generator=generator),
            "b_zero_point": torch.randint(-128, 128, (1, N), dtype=torch.int8, generator=generator),
        }
    made = {name: tensor.to(device) for name, tensor in made.items()}
    made["b"] = made.pop("weight").t()
    return made


NAMES = GEMM.spec.input_names


def positional(made: dict) -> tuple:
    return tuple(made.get(name) for name in NAMES)


# ---- the operators' registration ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_points", [False, True], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
def test_opcheck_finds_nothing_wrong_with_scaled_mm(device, out_dtype, zero_points):
    made = operands(device, zero_points=zero_points, scaled=out_dtype is not torch.int32)
    torch.library.opcheck(GEMM.functional, (*positional(made), out_dtype, False))


def test_opcheck_finds_nothing_wrong_with_scaled_mm_into_an_out(device):
    made = operands(device, zero_points=True)
    for out in (torch.empty(5, 32, device=device), torch.empty(5, 48, device=device)[:, :32], torch.empty(32, 5, device=device).t()):
        torch.library.opcheck(GEMM.out, (out, *positional(made), False))


def test_the_fake_output_is_what_the_real_one_is(device):
    for M, N, K in [(1, 1, 1), (5, 32, 48), (0, 8, 16), (8, 0, 16), (3, 7, 0)]:
        for out_dtype in OUT_DTYPES:
            made = operands(device, M, N, K, scaled=out_dtype is not torch.int32)
            real = sm.scaled_mm(*positional(made)[:5], out_dtype=out_dtype)
            with FakeTensorMode() as mode:
                fake = sm.scaled_mm(*(value if value is None else mode.from_tensor(value) for value in positional(made)[:5]), out_dtype=out_dtype)
            assert (fake.shape, fake.dtype, fake.stride(), fake.device) == (real.shape, real.dtype, real.stride(), real.device)


def test_what_torch_can_see_without_data_is_refused_while_tracing(device):
    made = operands(device)
    with FakeTensorMode() as mode:
        a, b = mode.from_tensor(made["a"]), mode.from_tensor(made["b"])
        with pytest.raises(BadTensorShapeError, match="b: expected 2 dimensions"):
            sm.scaled_mm(a, b.reshape(-1), out_dtype=torch.int32)
        with pytest.raises(BadTensorShapeError, match=r"b: expected \[K, N\] with K = 48 as in a \[M, K\], got \[47, 32\]"):
            sm.scaled_mm(a, b[1:], out_dtype=torch.int32)


def batched_operands(device: str, B: int = 3, M: int = 5, shared_weight: bool = False, seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    a, weight = (torch.randint(-128, 128, (B, rows, 48), dtype=torch.int8, generator=generator) for rows in (M, 32))
    made = {
        "a": a,
        "weight": weight[0] if shared_weight else weight,
        "a_scale": torch.rand(B, M, 1, generator=generator),
        "b_scale": torch.rand(1 if shared_weight else B, 1, 32, generator=generator),
        "bias": torch.randn(32, generator=generator),
        "a_zero_point": torch.randint(-128, 128, (B, M, 1), dtype=torch.int32, generator=generator),
        "b_zero_point": torch.randint(-128, 128, (1, 32), dtype=torch.int8, generator=generator),
    }
    made = {name: tensor.to(device) for name, tensor in made.items()}
    made["b"] = made.pop("weight").mT
    return made


@pytest.mark.parametrize("shared_weight", [False, True], ids=["own weights", "a shared weight"])
def test_opcheck_finds_nothing_wrong_with_batches_and_sums(device, shared_weight):
    made = batched_operands(device, shared_weight=shared_weight)
    torch.library.opcheck(GEMM.functional, (*positional(made), torch.bfloat16, False))
    made |= {"a_row_sums": made["a"].sum(-1, keepdim=True, dtype=torch.int32), "b_column_sums": made["b"].sum(-2, keepdim=True, dtype=torch.int32)}
    torch.library.opcheck(GEMM.functional, (*positional(made), torch.float32, False))
    for out in (torch.empty(3, 5, 32, device=device), torch.empty(5, 3, 32, device=device).transpose(0, 1)):
        torch.library.opcheck(GEMM.out, (out, *positional(made), False))


def test_the_fake_output_of_a_batch_is_what_the_real_one_is(device):
    pairs = [
        ((3, 5, 16), (3, 16, 8)),
        ((3, 5, 16), (1, 16, 8)),
        ((1, 5, 16), (3, 16, 8)),
        ((3, 5, 16), (16, 8)),
        ((5, 16), (3, 16, 8)),
        ((1, 5, 16), (16, 8)),
        ((0, 5, 16), (1, 16, 8)),
        ((3, 0, 16), (3, 16, 8)),
        ((3, 5, 16), (3, 16, 0)),
        ((3, 5, 0), (3, 0, 8)),
    ]
    for shape_a, shape_b in pairs:
        a, b = (torch.zeros(shape, dtype=torch.int8, device=device) for shape in (shape_a, shape_b))
        real = sm.scaled_mm(a, b, out_dtype=torch.int32)
        with FakeTensorMode() as mode:
            fake = sm.scaled_mm(mode.from_tensor(a), mode.from_tensor(b), out_dtype=torch.int32)
        assert (fake.shape, fake.dtype, fake.stride(), fake.device) == (real.shape, real.dtype, real.stride(), real.device)


def test_batches_that_do_not_meet_are_refused_while_tracing(device):
    with FakeTensorMode() as mode:
        a, b = (mode.from_tensor(torch.zeros(shape, dtype=torch.int8, device=device)) for shape in ((3, 5, 16), (2, 16, 8)))
        with pytest.raises(BadTensorShapeError, match=r"b: expected \[B, K, N\] with B = 3 as in a \[B, M, K\], or 1, got \[2, 16, 8\]"):
            sm.scaled_mm(a, b, out_dtype=torch.int32)
        with pytest.raises(BadTensorShapeError, match="a: expected 2 dimensions"):
            sm.scaled_mm(a.unsqueeze(0), b, out_dtype=torch.int32)


# ---- the meta device ------------------------------------------------------------------------------------------------------


def refusal_of(call, arguments: dict) -> tuple[type, str]:
    with pytest.raises(ScaledMMError) as caught:
        call(**arguments)
    return type(caught.value), str(caught.value)


def check_refused_alike(call, right: dict, wrong: list[dict]) -> None:
    """Every change of right arguments is refused in the same words on the CPU and on the meta device, and nothing else is."""

    def to_meta(arguments: dict) -> dict:  # `to` would not keep the strides of 0
        return {
            name: torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta") if isinstance(v, torch.Tensor) else v
            for name, v in arguments.items()
        }

    real, meta = call(**right), call(**to_meta(right))
    assert (meta.shape, meta.dtype, meta.device.type) == (real.shape, real.dtype, "meta")
    for changed in wrong:
        assert refusal_of(call, {**right, **changed}) == refusal_of(call, to_meta({**right, **changed})), changed


def test_meta_tensors_are_refused_in_the_words_of_all_others():
    right = operands("cpu", zero_points=True)
    a, b = right["a"], right["b"]
    long = {"a": a[:1, :1].expand(2, 131072), "b": b[:1, :1].expand(131072, 3)}
    check_refused_alike(
        sm.scaled_mm,
        right,
        [
            {"a": a.float()},
            {"b": b.double()},
            {"b": b[1:]},
            {"a_scale": None},
            {"b_scale": right["b_scale"][1:]},
            {"bias": right["bias"].half()},
            {"a_zero_point": right["a_zero_point"].long()},
            {"out": torch.empty(5, 31)},
            {"out": torch.empty(1, 32).expand(5, 32)},
            {"out": torch.empty(5, 32, dtype=torch.int8)},
            {"a": a[None, None]},
            {"out_dtype": torch.int32},
            {**long, "a_scale": right["a_scale"][:2], "b_scale": torch.ones(1), "bias": None, "a_zero_point": None, "b_zero_point": None},
        ],
    )
    sm.scaled_mm(*(t.to("meta") for t in (a, b, right["a_scale"], right["b_scale"])), out=torch.empty(5, 32, device="meta"))


def test_meta_tensors_of_a_batch_are_refused_in_the_words_of_all_others():
    right = batched_operands("cpu")
    check_refused_alike(sm.scaled_mm, right, [{"b": right["b"][:2]}, {"a_scale": right["a_scale"][:2]}, {"out": torch.empty(3, 5, 31)}])


def test_meta_tensors_of_the_other_products_are_refused_in_the_words_of_all_others():
    generator = torch.Generator().manual_seed(1)
    a, w = (torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator) for shape in ((6, 256), (4, 32, 256)))
    grouped = dict(a=a, b=w.mT, a_scale=torch.rand(6), b_scale=torch.rand(4), expert_offsets=torch.tensor([1, 2, 4, 6], dtype=torch.int32))
    check_refused_alike(
        sm.grouped_scaled_mm,
        grouped,
        [
            {"a": a.float()},
            {"b": w.mT[:, 1:]},
            {"a_scale": None},
            {"b_scale": torch.rand(3)},
            {"out": torch.empty(6, 31)},
            {"expert_offsets": torch.zeros(4)},
            {"expert_offsets": torch.zeros(3, dtype=torch.int32)},
            {"a": a[None]},
        ],
    )
    blocks = dict(a=a, b=w[0].t(), a_scale=torch.rand(6, 2), b_scale=torch.rand(2, 1))
    check_refused_alike(
        sm.block_scaled_mm,
        blocks,
        [
            {"a": a.float()},
            {"b": w[0].t()[1:]},
            {"a_scale": torch.rand(6, 1)},
            {"b_scale": torch.rand(1, 2)},
            {"out": torch.empty(6, 31)},
            {"bias": torch.rand(31)},
            {"b": w.mT},
        ],
    )


# ---- torch.compile --------------------------------------------------------------------------------------------------------


def inductor_can_compile() -> bool:
    return shutil.which("g++") is not None and (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file()


BACKENDS = [
    "eager",
    "aot_eager",
    pytest.param("inductor", marks=pytest.mark.skipif(not inductor_can_compile(), reason="inductor needs g++ and Python's headers")),
]


@pytest.fixture(autouse=True)
def forget_compiled_graphs():
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
def test_a_compiled_function_is_one_graph_and_has_the_same_bits(device, backend, out_dtype):
    def layer(a, b, a_scale, b_scale, bias):
        return torch.relu(sm.scaled_mm(a, b, a_scale, b_scale, bias, out_dtype=out_dtype))

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for seed in range(2):
        made = positional(operands(device, seed=seed, scaled=out_dtype is not torch.int32))[:5]
        expected = torch.relu(reference.scaled_mm(*made, out_dtype=out_dtype))
        assert torch.equal(compiled(*made), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_function_writes_to_an_out_that_it_was_given(device, backend):
    def layer(out, made):
        sm.scaled_mm(*made[:5], a_zero_point=made[5], b_zero_point=made[6], out=out)
        return out + 1

    made = positional(operands(device, zero_points=True))
    out = torch.full((5, 32), float("nan"), device=device)
    returned = torch.compile(layer, fullgraph=True, backend=backend)(out, made)
    expected = reference.scaled_mm(*made[:5], a_zero_point=made[5], b_zero_point=made[6], out_dtype=torch.float32)
    assert torch.equal(out, expected) and torch.equal(returned, expected + 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_function_takes_every_m_without_compiling_again(device, backend):
    graphs = CompileCounterWithBackend(backend)
    compiled = torch.compile(lambda *made: sm.scaled_mm(*made), fullgraph=True, dynamic=True, backend=graphs)
    for M in (2, 3, 17, 64):
        made = positional(operands(device, M))[:5]
        made = (*made[:4], made[4].bfloat16())
        assert torch.equal(compiled(*made), reference.scaled_mm(*made))
    assert graphs.frame_count == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shared_weight", [False, True], ids=["own weights", "a shared weight"])
def test_a_compiled_function_takes_every_batch_without_compiling_again(device, backend, shared_weight):
    graphs = CompileCounterWithBackend(backend)

    def layer(*made):
        return sm.scaled_mm(*made[:5], a_zero_point=made[5], b_zero_point=made[6], out_dtype=torch.float32) + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=graphs)
    for B, M in [(2, 5), (3, 17), (8, 2)]:
        made = positional(batched_operands(device, B, M, shared_weight))
        expected = reference.scaled_mm(*made[:5], a_zero_point=made[5], b_zero_point=made[6], out_dtype=torch.float32) + 1
        assert torch.equal(compiled(*made), expected)
    assert graphs.frame_count == 1


def test_a_compiled_function_raises_what_the_call_raises(device):
    compiled = torch.compile(lambda a, b: sm.scaled_mm(a, b, out_dtype=torch.int32), backend="aot_eager")
    made = operands(device)
    with pytest.raises((BadTensorDtypeError, RuntimeError), match="a: expected int8, got float32"):
        compiled(made["a"].float(), made["b"])


# ---- what torch passes that is not a plain tensor -----------------------------------------------------------------------------


def test_subclasses_and_parameters_of_int8_run_as_tensors_do(device):
    class Marked(torch.Tensor):
        pass

    made = operands(device)
    expected = sm.scaled_mm(*positional(made)[:4])
    weight = torch.nn.Parameter(made["b"].t(), requires_grad=False)
    for a, b in ((made["a"], weight.t()), (made["a"].as_subclass(Marked), made["b"])):
        assert torch.equal(sm.scaled_mm(a, b, made["a_scale"], made["b_scale"]).as_subclass(torch.Tensor), expected)


def test_arguments_that_are_no_tensors_are_typed_errors(device):
    made = operands(device)
    for name in ("a", "b", "a_scale", "bias"):
        for wrong in (1.0, "text", [1, 2]):
            with pytest.raises(ScaledMMError):
                sm.scaled_mm(**{**made, name: wrong})


# ---- autograd -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_points", [False, True], ids=["symmetric", "zero points"])
def test_no_output_claims_a_gradient(device, zero_points):
    made = operands(device, zero_points=zero_points)
    expected = sm.scaled_mm(**made)
    for name in ("a_scale", "b_scale", "bias"):
        made[name].requires_grad_()
    plain = sm.scaled_mm(**made)
    compiled = torch.compile(lambda made: sm.scaled_mm(**made), fullgraph=True, backend="aot_eager")(made)
    out = torch.empty_like(expected)
    sm.scaled_mm(**made, out=out)
    direct = GEMM.functional(*positional(made), torch.bfloat16, False)
    for result in (plain, compiled, out, direct):
        assert not result.requires_grad and torch.equal(result, expected)
    with pytest.raises(RuntimeError, match="does not require grad"):
        plain.sum().backward()


def test_opcheck_finds_nothing_wrong_with_inputs_that_require_a_gradient(device):
    made = operands(device)
    made["a_scale"].requires_grad_()
    torch.library.opcheck(GEMM.functional, (*positional(made), torch.bfloat16, False))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_over_a_gives_what_a_loop_gives(device):
    batch = [operands(device, seed=seed) for seed in range(3)]
    a, b = torch.stack([made["a"] for made in batch]), batch[0]["b"]
    out = torch.func.vmap(lambda a: sm.scaled_mm(a, b, out_dtype=torch.int32))(a)
    assert torch.equal(out, torch.stack([reference.scaled_mm(one, b, None, None, out_dtype=torch.int32) for one in a]))
