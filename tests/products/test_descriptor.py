"""Descriptors: created once from tensors or TensorDescs, calculated many times."""

import copy
import functools
import gc
import pickle
import threading

import pytest
import torch
from operands.cases import BIASES, INPUT_LAYOUTS, LAYOUTS, OUT_DTYPES, SMALL_SHAPES, ZERO_POINTS, ZERO_SHAPES, Case, random_case
from operands.pairs import pairwise

import scaled_mm as sm
from scaled_mm import BadParamError


@pytest.fixture
def handle(device):
    made = sm.Handle(device)
    yield made
    made.destroy()


def describe(t: torch.Tensor | None) -> sm.TensorDesc | None:
    return None if t is None else sm.TensorDesc.of(t)


def calculate(handle, case: Case, device: str, described: bool = False) -> None:
    operands = case.make(device)
    out = operands.poisoned_out()
    given = {name: describe(t) for name, t in operands.inputs.items()} if described else operands.inputs
    with sm.create_descriptor(handle, out=describe(out) if described else out, **given) as descriptor:
        workspace = torch.empty(descriptor.workspace_size, dtype=torch.uint8, device=device)
        descriptor.calculate(out, **operands.inputs, workspace=workspace)
    operands.check(out)


@pytest.mark.parametrize("described", [False, True], ids=["from tensors", "from descriptions"])
@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
def test_every_shape_equals_the_reference(handle, device, out_dtype, described):
    for shape in SMALL_SHAPES + ZERO_SHAPES:
        calculate(handle, Case(*shape, out_dtype=out_dtype, bias="out"), device, described)


@pairwise(
    a_layout=INPUT_LAYOUTS,
    b_layout=INPUT_LAYOUTS,
    out_layout=LAYOUTS,
    a_zero_point=ZERO_POINTS,
    b_zero_point=ZERO_POINTS,
    bias=BIASES,
    shape=[(9, 40, 48), (17, 32, 48)],
    out_dtype=[torch.float16, torch.bfloat16],
)
def test_every_pair_of_options_equals_the_reference(handle, device, shape, **options):
    calculate(handle, Case(*shape, **options), device, described=True)


def test_a_description_of_a_constant_b_takes_the_prepared_weight(handle, device):
    operands = Case(9, 40, 48).make(device)
    out, b = operands.poisoned_out(), operands.inputs["b"]
    constant = sm.TensorDesc(tuple(b.shape), b.dtype, b.stride(), constant=True)
    with sm.create_descriptor(handle, out=out, **{**operands.inputs, "b": constant}) as descriptor:
        descriptor.calculate(out, **{**operands.inputs, "b": sm.prepare_weight(b)})
    operands.check(out)


def test_tensors_without_data_are_refused_and_not_taken_for_a_product(handle, device):
    operands = Case(9, 40, 48).make(device)
    out = operands.poisoned_out()
    meta = {name: t if t is None else t.to("meta") for name, t in operands.inputs.items()}
    with sm.create_descriptor(handle, out=out, **operands.inputs) as descriptor:
        with pytest.raises(sm.BadTensorDeviceError, match=f"^out: expected a tensor on {handle.device}, got one on meta"):
            descriptor.calculate(out.to("meta"), **meta)


def test_a_constant_b_is_refused_where_nothing_could_be_given_for_it(handle, device):
    with pytest.raises(sm.BadParamError, match="^alignment: expected a multiple of 16 bytes for a constant b, got 8"):
        sm.TensorDesc((32, 16), torch.int8, (1, 32), alignment=8, constant=True)
    b, out = sm.TensorDesc((2, 32, 16), torch.int8, (512, 1, 32), constant=True), sm.TensorDesc((8, 16), torch.int32)
    with pytest.raises(sm.BadParamError, match="^b: expected a TensorDesc that is not constant"):
        offsets = sm.TensorDesc((2,), torch.int32)
        sm.create_grouped_descriptor(handle, out=out, a=sm.TensorDesc((8, 32), torch.int8), b=b, a_scale=None, b_scale=None, expert_offsets=offsets)


def test_random_mixes_of_everything_equal_the_reference(handle, device):
    generator = torch.Generator().manual_seed(30)
    for index in range(300):
        calculate(handle, random_case(generator), device, described=index % 2 == 0)


def test_one_descriptor_serves_many_tensors(handle, device):
    shape = dict(m=20, n=48, k=64, bias="out", a_zero_point="vector_int32")
    first = Case(**shape).make(device)
    with sm.create_descriptor(handle, out=first.poisoned_out(), **first.inputs) as descriptor:
        workspace = torch.empty(descriptor.workspace_size, dtype=torch.uint8, device=device)
        for seed in range(5):
            operands = Case(**shape, seed=seed).make(device)
            out = operands.poisoned_out()
            for _ in range(2):
                descriptor.calculate(out, **operands.inputs, workspace=workspace)
                operands.check(out)


def test_a_descriptor_outlives_its_handle(device):
    operands = Case(5, 16, 32).make(device)
    out = operands.poisoned_out()
    handle = sm.Handle(device)
    descriptor = sm.create_descriptor(handle, out=out, **operands.inputs)
    handle.destroy()
    descriptor.calculate(out, **operands.inputs)
    operands.check(out)
    descriptor.destroy()


def test_a_descriptor_says_which_kernel_it_chose_and_why(handle, device):
    operands = Case(5, 16, 32).make(device)
    with sm.create_descriptor(handle, out=operands.poisoned_out(), **operands.inputs) as descriptor:
        assert isinstance(descriptor.kernel.row, str) and descriptor.kernel.row
        assert isinstance(descriptor.kernel.reason, str) and descriptor.kernel.reason
        assert descriptor.workspace_size == 0  # without zero points nothing needs memory


def test_on_a_cpu_the_kernel_is_named_by_the_backend():
    from scaled_mm.cpu import gemm as cpu_gemm

    operands = Case(5, 16, 32).make()
    with sm.create_descriptor(sm.Handle("cpu"), out=operands.poisoned_out(), **operands.inputs) as descriptor:
        assert descriptor.kernel.row == cpu_gemm.kernel_name()


def test_handles_and_descriptors_say_what_they_are(device):
    operands = Case(5, 6, 7).make(device)
    handle = sm.Handle(device)
    descriptor = sm.create_descriptor(handle, out=operands.poisoned_out(), **operands.inputs)
    assert repr(descriptor) == f"Descriptor(5x6x7, bfloat16, device={device!r}, kernel={descriptor.kernel.row!r})"
    assert repr(handle) == f"Handle(device={device!r}, arch={handle.arch!r})"
    descriptor.destroy()
    handle.destroy()
    assert repr(descriptor) == f"Descriptor(5x6x7, bfloat16, device={device!r}, destroyed)"
    assert repr(handle) == f"Handle(device={device!r}, arch={handle.arch!r}, destroyed)"


@pytest.mark.parametrize(
    "name, values", [("stream", ["x", -2, 1.5, True]), ("workspace", [[1], "x", torch.empty(8, device="meta"), torch.empty(4, 4).t()])]
)
def test_a_stream_or_workspace_that_is_none_is_refused_on_every_device(handle, device, name, values):
    operands = Case(5, 6, 7).make(device)
    out = operands.poisoned_out()
    with sm.create_descriptor(handle, out=out, **operands.inputs) as descriptor:
        for value in values:
            with pytest.raises(sm.ScaledMMError, match=name):
                descriptor.calculate(out, **operands.inputs, **{name: value})
        assert out.isnan().all()


def test_a_workspace_that_is_not_contiguous_is_refused_with_its_strides(handle, device):
    operands = Case(5, 6, 7).make(device)
    out = operands.poisoned_out()
    strided = torch.empty(2, 3, 4, 5, dtype=torch.uint8, device=device).mT
    with sm.create_descriptor(handle, out=out, **operands.inputs) as descriptor:
        with pytest.raises(sm.BadTensorStridesError) as caught:
            descriptor.calculate(out, **operands.inputs, workspace=strided)
    assert str(caught.value) == "workspace: expected a contiguous tensor, got strides [60, 20, 1, 5] for shape [2, 3, 5, 4]"


def test_what_owns_a_c_object_is_shared_by_a_copy_and_neither_pickled_nor_copied_deeply(handle, device):
    operands = Case(5, 16, 32).make(device)
    out = operands.poisoned_out()
    with sm.create_descriptor(handle, out=out, **operands.inputs) as descriptor:
        for made in (handle, descriptor):
            name = type(made).__name__
            for act in (copy.deepcopy, pickle.dumps, functools.partial(pickle.dumps, protocol=0)):
                with pytest.raises(sm.BadParamError, match=f"^{name}: expected to stay .*; create another {name} instead$"):
                    act(made)
            copied = copy.copy(made)
            assert type(copied) is type(made) and vars(copied) == vars(made)
        copied.calculate(out, **operands.inputs)
        operands.check(out)
    with pytest.raises(sm.BadParamError, match="got one that was destroyed"):
        copied.calculate(out, **operands.inputs)


def test_descriptors_may_be_used_from_many_threads_at_once(handle, device):
    case = Case(33, 64, 96, bias="out", a_zero_point="vector_int8")
    operands = case.make(device)
    outs = [operands.poisoned_out() for _ in range(8)]
    failures = []

    def work(out):
        try:
            with sm.create_descriptor(handle, out=out, **operands.inputs) as descriptor:
                workspace = torch.empty(descriptor.workspace_size, dtype=torch.uint8, device=device)
                for _ in range(10):
                    descriptor.calculate(out, **operands.inputs, workspace=workspace)
        except Exception as error:  # an exception in a thread would not fail the test by itself
            failures.append(error)

    threads = [threading.Thread(target=work, args=(out,)) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for out in outs:
        operands.check(out)


@pytest.mark.gpu
def test_calculate_may_be_captured_in_a_cuda_graph_and_replayed():
    operands = Case(33, 64, 96, bias="out", a_zero_point="vector_int8").make("cuda:0")
    out = operands.poisoned_out()
    with sm.create_descriptor(sm.Handle("cuda:0"), out=out, **operands.inputs) as descriptor:
        workspace = torch.empty(descriptor.workspace_size, dtype=torch.uint8, device="cuda:0")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            descriptor.calculate(out, **operands.inputs, workspace=workspace)
        other = Case(33, 64, 96, bias="out", a_zero_point="vector_int8", seed=7).make("cuda:0")
        for name, t in operands.inputs.items():
            if t is not None:
                t.copy_(getattr(other, name))
        out.fill_(float("nan"))
        graph.replay()
    other.check(out)


@pytest.mark.gpu
def test_calculate_runs_on_the_stream_it_is_given_and_does_not_synchronise():
    operands = Case(33, 64, 96, bias="out").make("cuda:0")
    out = operands.poisoned_out()
    stream = torch.cuda.Stream()
    with sm.create_descriptor(sm.Handle("cuda:0"), out=out, **operands.inputs) as descriptor:
        descriptor.calculate(out, **operands.inputs, stream=stream)
        stream.synchronize()
        operands.check(out)
        torch.cuda.set_sync_debug_mode("error")
        try:
            descriptor.calculate(out, **operands.inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_copy_of_a_handle_or_a_descriptor_outlives_the_original():
    operands = Case(2, 16, 32).make()
    out = operands.poisoned_out()
    handle = copy.copy(sm.Handle("cpu"))
    descriptor = copy.copy(sm.create_descriptor(handle, out=out, **operands.inputs))
    gc.collect()
    descriptor.calculate(out, **operands.inputs)
    operands.check(out)
    other = copy.copy(descriptor)
    other.destroy()
    assert "destroyed" in repr(descriptor)
    with pytest.raises(BadParamError, match="expected a live descriptor"):
        descriptor.calculate(out, **operands.inputs)
    handle.destroy()
    with pytest.raises(BadParamError, match="expected a live Handle"):
        sm.create_descriptor(handle, out=out, **operands.inputs)
