"""`rope`: the bits of the numpy reference."""

from __future__ import annotations

import pytest
import torch
from operands.pairs import pairwise
from rowwise_data import FLOATS, KINDS, LAYOUTS, laid_out, values

import scaled_mm as sm
from scaled_mm.errors import BadParamError, BadTensorDeviceError, BadTensorDtypeError, BadTensorShapeError
from scaled_mm.reference import same_bits
from scaled_mm.rowwise import reference


def operands(tokens, d, heads, dtype, angle_dtype, half=False, layout="contiguous", kind="plain"):
    query, key = (laid_out(values((*tokens, h, d), dtype, kind, seed=h), layout) for h in heads)
    cos, sin = (laid_out(values((*tokens, d // 2 if half else d), angle_dtype, seed=seed), layout) for seed in (1, 2))
    return query, key, cos, sin


@pairwise(
    dtype=FLOATS,
    angle_dtype=FLOATS,
    d=(2, 4, 6, 64, 128, 130),
    heads=((1, 1), (4, 2), (3, 0)),
    tokens=((), (1,), (5,), (2, 3), (1, 2, 1, 2, 1, 3), (0,), (2, 0)),
    half=(False, True),
    interleaved=(False, True),
    layout=LAYOUTS,
    kind=KINDS,
)
def test_every_pair_of_operands_has_the_bits_of_the_reference(device, interleaved, **options):
    made = operands(**options)
    rotated = sm.rope(*(each.to(device) for each in made), interleaved=interleaved)
    for x, y in zip(made[:2], rotated):
        assert y.is_contiguous() and same_bits(y.cpu(), reference.rope(x, *made[2:], interleaved))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_heads_of_language_models_have_the_bits_of_the_reference(device, dtype, interleaved):
    made = operands((17,), 128, (32, 8), dtype, dtype)
    for x, y in zip(made[:2], sm.rope(*(each.to(device) for each in made), interleaved=interleaved)):
        assert same_bits(y.cpu(), reference.rope(x, *made[2:], interleaved))


@pytest.mark.parametrize("interleaved", [False, True])
def test_an_angle_of_zero_and_of_a_quarter_turn_move_elements_only(device, interleaved):
    x = values((3, 2, 8), torch.bfloat16).to(device)
    zero, one = torch.zeros(3, 4, device=device), torch.ones(3, 4, device=device)
    assert all(torch.equal(y, x) for y in sm.rope(x, x, one, zero, interleaved=interleaved))
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    turned = torch.stack((-second, first), -1).flatten(-2) if interleaved else torch.cat((-second, first), -1)
    assert torch.equal(sm.rope(x, x, zero, one, interleaved=interleaved)[0], turned)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_token_alone_has_the_bits_of_the_token_in_a_batch(device, dtype):
    made = [each.to(device) for each in operands((67,), 64, (4, 2), dtype, torch.float32)]
    batch = sm.rope(*made)
    for token in (0, 31, 66):
        assert all(same_bits(one, many[token]) for one, many in zip(sm.rope(*(each[token] for each in made)), batch))


def test_heads_and_layouts_of_channels_last_give_contiguous_outputs(device):
    for dtype in FLOATS:
        query, key, cos, sin = operands((2, 3), 8, (4, 4), dtype, dtype)
        views = [each.to(memory_format=torch.channels_last) for each in (query, key)]
        for interleaved in (False, True):
            for one, other in zip(sm.rope(*views, cos, sin, interleaved=interleaved), sm.rope(query, key, cos, sin, interleaved=interleaved)):
                assert one.is_contiguous() and same_bits(one, other)


Q, ANGLE = torch.ones(3, 2, 4), torch.ones(3, 4)


@pytest.mark.parametrize(
    "error, message, arguments",
    [
        (BadParamError, "query: expected a tensor, got None", (None, Q, ANGLE, ANGLE)),
        (BadTensorDtypeError, "query: expected float16", (Q.double(), Q, ANGLE, ANGLE)),
        (BadTensorShapeError, "query: expected 2 to 8 dimensions, got 1", (Q[0, 0], Q[0, 0], ANGLE, ANGLE)),
        (BadTensorShapeError, r"query: expected \[..., HQ, D\] with an even D", (Q[..., :3], Q[..., :3], ANGLE[:, :3], ANGLE[:, :3])),
        (BadParamError, "key: expected a tensor, got int", (Q, 1, ANGLE, ANGLE)),
        (BadTensorDtypeError, "key: expected torch.float32 as query, got torch.float16", (Q, Q.half(), ANGLE, ANGLE)),
        (BadTensorShapeError, r"key: expected \[3, 'HK', 4\]", (Q, Q[:2], ANGLE, ANGLE)),
        (BadTensorShapeError, r"key: expected \[3, 'HK', 4\]", (Q, Q[..., :2], ANGLE, ANGLE)),
        (BadTensorDeviceError, "key: expected a tensor on cpu", (Q, Q.to("meta"), ANGLE, ANGLE)),
        (BadTensorDtypeError, "cos: expected float16", (Q, Q, ANGLE.double(), ANGLE)),
        (BadTensorShapeError, r"cos: expected \[3, 4\] or \[3, 2\]", (Q, Q, ANGLE[:, :3], ANGLE)),
        (BadTensorShapeError, r"cos: expected \[3, 4\] or \[3, 2\]", (Q, Q, ANGLE[0], ANGLE)),
        (BadTensorShapeError, r"sin: expected \[3, 4\] as cos", (Q, Q, ANGLE, ANGLE[:, :2])),
        (BadTensorShapeError, r"sin: expected \[3, 4\] or \[3, 2\]", (Q, Q, ANGLE, ANGLE[:1])),
        (BadTensorDeviceError, "sin: expected a tensor on cpu", (Q, Q, ANGLE, ANGLE.to("meta"))),
        (BadParamError, "sin: expected a strided tensor", (Q, Q, ANGLE, ANGLE.to_sparse())),
    ],
)
def test_what_is_wrong_is_refused_and_named(error, message, arguments):
    with pytest.raises(error, match="^" + message):
        sm.rope(*arguments)


@pytest.mark.parametrize("interleaved", [1, None, "neox"])
def test_a_wrong_interleaved_is_refused_and_named(interleaved):
    with pytest.raises(BadParamError, match="^interleaved: expected True or False"):
        sm.rope(Q, Q, ANGLE, ANGLE, interleaved=interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_compiled_graph_gives_the_same_bits(device, interleaved):
    torch.compiler.reset()
    compiled = torch.compile(lambda *made: sm.rope(*made, interleaved=interleaved), fullgraph=True, backend="aot_eager")
    for tokens in (3, 7):
        made = [each.to(device) for each in operands((tokens,), 16, (4, 2), torch.float16, torch.float32)]
        for one, other in zip(sm.rope(*made, interleaved=interleaved), compiled(*made)):
            assert same_bits(one, other) and one.stride() == other.stride()


def test_opcheck_finds_nothing_wrong(device):
    for layout, dtype, interleaved in (("contiguous", torch.float16, False), ("transposed", torch.float32, True)):
        made = [each.to(device) for each in operands((3,), 8, (4, 2), dtype, torch.float32, layout=layout)]
        torch.library.opcheck(torch.ops.scaled_mm.rope.default, (*made, interleaved))


def test_symbolic_sizes_and_constant_angles_compile():
    query, key = torch.randn(5, 2, 8), torch.randn(5, 1, 8)

    def rotated(query, key):
        return sm.rope(query, key, torch.full((5, 8), 0.6), torch.full((5, 8), 0.8))

    found = torch.compile(rotated, fullgraph=True, backend="eager", dynamic=True)(query, key)
    assert all(map(torch.equal, found, rotated(query, key)))
