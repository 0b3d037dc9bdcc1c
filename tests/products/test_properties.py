"""Random valid and invalid products, by call and by descriptor: the reference's bits or a typed error, never a crash."""

import dataclasses

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operands.cases import Case
from operands.oracle import FLOATS, ITEM_BYTES, NAMES, Desc, violations
from strategies import SETTINGS, SIZES, valid_cases

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.errors import ScaledMMError


@settings(max_examples=1500, **SETTINGS)
@given(case=valid_cases)
def test_every_valid_call_equals_the_reference(device, case):
    operands = case.make(device)
    out = operands.poisoned_out()
    sm.scaled_mm(**operands.inputs, out_dtype=case.out_dtype, out=out)
    operands.check(out)


# ---- products with something wrong in them ---------------------------------------------------------------------------

ODD_SIZES = st.one_of(
    st.integers(-2, 40),
    st.sampled_from([33025, 33026, 65793, 65794, 131071, 131072, 2**31 - 1, 2**31, 2**40, 2**63 - 1, 2**64]),
)
ODD_STRIDES = st.one_of(st.integers(-2, 80), st.sampled_from([2**29, 2**31, 2**59, 2**60, 2**62, 2**63 - 1, 2**64, -(2**63)]))
ODD_ALIGNMENTS = st.sampled_from([-16, 0, 1, 2, 3, 4, 8, 16, 24, 128, 2**40, 2**62, 2**63, 2**64, 2**64 + 16])
DTYPES = st.sampled_from(
    [
        *ITEM_BYTES,
        torch.float64,
        torch.uint8,
        torch.int16,
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
    ]
)


def contiguous(shape) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _vector(draw, size: int, column: bool, dtypes, one_value: bool = True, batch: int | None = None) -> Desc:
    shapes = [(size,), (size, 1) if column else (1, size)] + ([(), (1,), (1, 1), (1, 1, 1)] if one_value else [])
    if batch is not None:
        for first in (batch, 1):
            shapes += [(first, size, 1) if column else (first, 1, size)] + ([(first, 1, 1)] if one_value else [])
    shape = draw(st.sampled_from(shapes))
    return Desc(shape, draw(st.sampled_from(dtypes)), contiguous(shape))


@st.composite
def products(draw) -> dict[str, Desc | None]:
    """A valid product, then up to three changes to it."""
    m, n = draw(SIZES), draw(SIZES)
    k = draw(st.one_of(SIZES, st.sampled_from([33025, 33026, 65793, 65794, 131071, 131072])))
    dtype = draw(st.sampled_from([*FLOATS, torch.int32]))
    scaled = dtype is not torch.int32
    descs = {
        "out": Desc(
            (m, n),
            dtype,
            draw(st.sampled_from([(max(n, 1), 1), (1, max(m, 1)), (max(n, 1) + 3, 1), (2 * max(n, 1), 2)])),
        ),
        "a": Desc((m, k), torch.int8, draw(st.sampled_from([(max(k, 1), 1), (1, max(m, 1)), (0, 1), (k + 7, 1)]))),
        "b": Desc((k, n), torch.int8, draw(st.sampled_from([(1, max(k, 1)), (max(n, 1), 1), (1, 0), (2, 2 * k + 1)]))),
        "a_scale": _vector(draw, m, True, [torch.float32]) if scaled else None,
        "b_scale": _vector(draw, n, False, [torch.float32]) if scaled else None,
        "bias": _vector(draw, n, False, [dtype, torch.float32], one_value=False) if scaled and draw(st.booleans()) else None,
        "a_zero_point": _vector(draw, m, True, [torch.int32, torch.int8]) if draw(st.booleans()) else None,
        "b_zero_point": _vector(draw, n, False, [torch.int32, torch.int8]) if draw(st.booleans()) else None,
        "a_row_sums": None,
        "b_column_sums": None,
    }
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(NAMES[:8]))
        descs[name] = draw(_changed(descs[name]))
    return descs


@st.composite
def _changed(draw, desc: Desc | None) -> Desc | None:
    if desc is None:
        shape = tuple(draw(st.lists(ODD_SIZES, max_size=3)))
        return Desc(shape, draw(DTYPES), contiguous(shape))
    what = draw(st.sampled_from(["none", "dtype", "size", "stride", "alignment", "fewer", "more", "strides", "swap"]))
    shape, strides = desc.shape, desc.strides
    if what == "none":
        return None
    if what == "dtype":
        return dataclasses.replace(desc, dtype=draw(DTYPES))
    if what == "alignment":
        return dataclasses.replace(desc, alignment=draw(ODD_ALIGNMENTS))
    if what == "fewer":
        return dataclasses.replace(desc, shape=shape[1:], strides=strides[1:])
    if what == "more":
        return dataclasses.replace(desc, shape=(1, *shape), strides=(1, *strides))
    if what == "strides":
        return dataclasses.replace(desc, strides=(*strides, 1))
    if what == "swap":
        return dataclasses.replace(desc, shape=shape[::-1], strides=strides[::-1])
    if not shape:
        return desc
    at = draw(st.integers(0, len(shape) - 1))
    if what == "size":
        return dataclasses.replace(desc, shape=(*shape[:at], draw(ODD_SIZES), *shape[at + 1 :]))
    return dataclasses.replace(desc, strides=(*strides[:at], draw(ODD_STRIDES), *strides[at + 1 :]))


def shared_batch(draw, desc: Desc, batch: int) -> Desc:
    """A matrix as the operand of a batch: one for each product, one with any batch stride, or one for all."""
    each = desc.elements() if desc.elements() > 0 else 1
    stride = draw(st.sampled_from([each, each + 5, 16 * each, 0, 1]))
    shapes = [(batch, stride), (batch, stride), (1, stride), None]
    first = draw(st.sampled_from(shapes))
    return desc if first is None else dataclasses.replace(desc, shape=(first[0], *desc.shape), strides=(first[1], *desc.strides))


@st.composite
def batched_products(draw) -> dict[str, Desc | None]:
    """A valid batch, then up to three changes to it."""
    batch, m, n, k = draw(st.sampled_from([0, 1, 2, 3, 7])), draw(SIZES), draw(SIZES), draw(SIZES)
    dtype = draw(st.sampled_from([*FLOATS, torch.int32]))
    scaled = dtype is not torch.int32
    a = shared_batch(draw, Desc((m, k), torch.int8, draw(st.sampled_from([(max(k, 1), 1), (1, max(m, 1)), (k + 7, 1)]))), batch)
    b = shared_batch(draw, Desc((k, n), torch.int8, draw(st.sampled_from([(1, max(k, 1)), (max(n, 1), 1), (2, 2 * k + 1)]))), batch)
    batches = {desc.shape[0] for desc in (a, b) if len(desc.shape) == 3}
    batch = max(batches - {1}, default=1) if batches else None
    shape = (m, n) if batch is None else (batch, m, n)
    out_strides = [contiguous(shape), contiguous((*shape[:-1], n + 3))]
    if batch is not None:  # products side by side in rows as long as all of them
        out_strides.append((max(n, 1), max(batch * n, 1), 1))

    def of_rows(dtypes, one_value=True):
        return _vector(draw, m, True, dtypes, one_value, batch)

    def of_columns(dtypes, one_value=True):
        return _vector(draw, n, False, dtypes, one_value, batch)

    descs = {
        "out": Desc(shape, dtype, draw(st.sampled_from(out_strides))),
        "a": a,
        "b": b,
        "a_scale": of_rows([torch.float32]) if scaled else None,
        "b_scale": of_columns([torch.float32]) if scaled else None,
        "bias": of_columns([dtype, torch.float32], one_value=False) if scaled and draw(st.booleans()) else None,
        "a_zero_point": of_rows([torch.int32, torch.int8]) if draw(st.booleans()) else None,
        "b_zero_point": of_columns([torch.int32, torch.int8]) if draw(st.booleans()) else None,
        "a_row_sums": None,  # their values would have to be right: test_zero_points.py
        "b_column_sums": None,
    }
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(list(descs)[:8]))
        descs[name] = draw(_changed(descs[name]))
    return descs


def computable(descs: dict[str, Desc | None]) -> bool:
    """Whether a valid product is small enough to be made real and computed."""
    (m, k), n = descs["a"].shape[-2:], descs["b"].shape[-1]
    small = all(desc is None or (desc.elements() < 1 << 20 and desc.alignment <= 16) for desc in descs.values())
    return small and m * n <= 1 << 13 and (m + n) * k <= 1 << 18


def real(desc: Desc | None, device: str, generator: torch.Generator) -> torch.Tensor | None:
    """A tensor as described, its memory full of numbers that suit an argument of its dtype."""
    if desc is None:
        return None
    size = max(desc.elements(), 1)
    if desc.dtype.is_floating_point:
        memory = torch.randn(size, generator=generator).to(desc.dtype)
    else:
        memory = torch.randint(-128, 128, (size,), generator=generator).to(desc.dtype)
    return memory.to(device).as_strided(desc.shape, desc.strides)


def tensors_of(descs: dict[str, Desc | None], device: str) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    generator = torch.Generator().manual_seed(1)
    made = {name: real(desc, device, generator) for name, desc in descs.items()}
    out = made.pop("out")
    memory = out.as_strided((max(descs["out"].elements(), 1),), (1,))  # an invalid out may overlap itself
    memory.fill_(float("nan") if out.dtype.is_floating_point else 7)
    return out, made


def without_sums(inputs: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    return {name: t for name, t in inputs.items() if name not in ("a_row_sums", "b_column_sums")}


@settings(max_examples=4000, **SETTINGS)
@given(descs=st.one_of(products(), batched_products()))
def test_a_descriptor_is_made_exactly_for_valid_products_and_computes_them(device, descs):
    broken = violations(descs)
    try:
        given_descs = {name: None if d is None else sm.TensorDesc(d.shape, d.dtype, d.strides, d.alignment) for name, d in descs.items()}
        descriptor = sm.create_descriptor(sm.Handle(device), **given_descs)
    except ScaledMMError as error:
        assert error.status in broken, f"refused with {error.status.name}: {error}; broken: {broken}"
        assert str(error)
        return
    assert not broken, f"accepted a product that breaks {broken}"
    with descriptor:
        if not computable(descs):
            return
        out, inputs = tensors_of(descs, device)
        workspace = torch.empty(descriptor.workspace_size, dtype=torch.uint8, device=device)
        descriptor.calculate(out, **inputs, workspace=workspace)
    expected = reference.scaled_mm(**without_sums(inputs), out_dtype=out.dtype)
    assert reference.same_bits(out, expected), reference.describe_difference(out, expected)


def can_exist(desc: Desc | None) -> bool:
    """Whether torch can make a (small) tensor of it."""
    if desc is None:
        return True
    sizes = all(0 <= size < 1 << 20 for size in desc.shape) and all(0 <= s < 1 << 20 for s in desc.strides)
    return sizes and len(desc.shape) == len(desc.strides) and desc.elements() < 1 << 20


@settings(max_examples=3000, **SETTINGS)
@given(descs=st.one_of(products(), batched_products()))
def test_a_call_is_refused_with_a_reason_or_equals_the_reference(device, descs):
    # Tensors know their own alignment, and a call makes its own out when it gets none.
    descs = {name: d and dataclasses.replace(d, alignment=16) for name, d in descs.items()}
    descs["out"] = descs["out"] or Desc((1, 1), torch.float16, (1, 1))
    if not all(map(can_exist, descs.values())):
        return
    broken = violations(descs)
    if not broken and not computable(descs):
        return
    out, inputs = tensors_of(descs, device)
    try:
        returned = sm.scaled_mm(**inputs, out_dtype=out.dtype, out=out)
    except ScaledMMError as error:
        assert error.status in broken, f"refused with {error.status.name}: {error}; broken: {broken}"
        return
    assert not broken, f"accepted a product that breaks {broken}"
    assert returned is out
    expected = reference.scaled_mm(**without_sums(inputs), out_dtype=out.dtype)
    assert reference.same_bits(out, expected), reference.describe_difference(out, expected)


@settings(max_examples=500, **SETTINGS)
@given(
    # Mostly what would be right, 3 by 5, so that a single wrong thing is what decides.
    shape=st.one_of(
        st.tuples(st.sampled_from([3, 3, 3, 3.5, "3", None, 2**70]), st.sampled_from([5, 5, 5, 5.0, -5, 2**64 + 5])),
        st.lists(st.integers(-3, 9), max_size=5),
    ),
    dtype=st.sampled_from([torch.int8, torch.int8, "int8", None, 3]),
    strides=st.one_of(st.none(), st.tuples(st.sampled_from([5, 5, "5", 5.9]), st.just(1)), st.lists(st.integers(-3, 9), max_size=5)),
    alignment=st.sampled_from([16, 16, 0, -1, None, "16", 2.0, 2**80, 2**64 + 16]),
)
def test_a_description_of_anything_at_all_is_taken_or_refused_in_words(device, shape, dtype, strides, alignment):
    operands = Case(3, 4, 5).make(device)
    try:
        desc = sm.TensorDesc(tuple(shape), dtype, strides, alignment)
        sm.create_descriptor(sm.Handle(device), out=operands.poisoned_out(), **{**operands.inputs, "a": desc}).destroy()
    except ScaledMMError as error:
        assert str(error)
    else:
        assert tuple(shape) == (3, 5) and dtype is torch.int8 and alignment == 16
        assert strides is None or all(isinstance(stride, int) for stride in strides)
