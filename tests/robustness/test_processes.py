"""Workers that are forked or spawned, copies and pickles: what crosses a process arrives whole, or says that it does not cross."""

from __future__ import annotations

import copy
import dataclasses
import io
import multiprocessing
import os
import pickle
import signal
import threading
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

import scaled_mm as sm
from scaled_mm.core.plan import KernelChoice
from scaled_mm.gguf.layout import Parts

DEADLINE_S = 60
A = torch.arange(33 * 256).reshape(33, 256).remainder(255).sub(127).to(torch.int8)
B = torch.arange(64 * 256).reshape(64, 256).remainder(251).sub(125).to(torch.int8).t()
SCALE = torch.tensor([0.01])
BLOCKS = sm.quantize_q4_0(torch.linspace(-1, 1, 64 * 256).reshape(64, 256))
X = torch.linspace(-1, 1, 3 * 256).reshape(3, 256)


def product() -> torch.Tensor:
    return sm.scaled_mm(A, B, SCALE, SCALE, out_dtype=torch.float32)


def plan(handle: sm.Handle) -> sm.Descriptor:
    return sm.create_descriptor(handle, out=torch.empty(33, 64), a=A, b=B, a_scale=SCALE, b_scale=SCALE)


def run(descriptor: sm.Descriptor) -> torch.Tensor:
    out = torch.full((33, 64), float("nan"))
    descriptor.calculate(out, A, B, a_scale=SCALE, b_scale=SCALE)
    return out


def forked(work) -> int:
    """Exit status of a forked child: 0 if work() is true.

    Threads of torch are not there in a child. It waits for them without end unless it is told to use one, which torch's DataLoader does.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(DEADLINE_S)
            torch.set_num_threads(1)
            status = 0 if work() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Products(torch.utils.data.Dataset):
    """What a loader that quantizes and multiplies on its workers does."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return product() + index


def fail(number: int):
    if number == 0:
        raise sm.KernelNotFoundError("kernel: there is none named x")
    sm.scaled_mm(A, B[:-1], SCALE, SCALE)


def linear(packed: sm.PackedBlockWeight, prepared: sm.PreparedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    return sm.block_linear(X, packed), sm.scaled_mm(A, prepared, SCALE, SCALE, out_dtype=torch.float32)


# ---- fork ---------------------------------------------------------------------------------------------------------------


def test_a_forked_child_multiplies_as_its_parent_did_before():
    expected = product()
    assert forked(lambda: torch.equal(product(), expected)) == 0


def test_a_forked_child_may_use_and_destroy_what_its_parent_made_and_the_parent_keeps_it():
    expected = product()
    handle = sm.Handle("cpu")
    descriptor = plan(handle)

    def work() -> bool:
        equal = torch.equal(run(descriptor), expected)
        descriptor.destroy()
        handle.destroy()
        with sm.Handle("cpu") as another, plan(another) as made_here:
            return equal and torch.equal(run(made_here), expected)

    assert forked(work) == 0
    assert torch.equal(run(descriptor), expected)
    descriptor.destroy()
    handle.destroy()


def test_a_fork_while_threads_multiply_leaves_no_lock_taken():
    expected = product()
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            with sm.Handle("cpu") as handle, plan(handle) as descriptor:
                run(descriptor)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            assert forked(lambda: torch.equal(run(plan(sm.Handle("cpu"))), expected)) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


# ---- workers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_workers_of_a_loader_multiply(method):
    expected = product()
    workers = 2 if method == "fork" else 1  # a spawned one imports torch
    loader = torch.utils.data.DataLoader(Products(), batch_size=None, num_workers=workers, multiprocessing_context=method, timeout=DEADLINE_S)
    for index, got in enumerate(loader):
        assert torch.equal(got, expected + index)


def test_a_spawned_worker_takes_weights_and_gives_typed_errors_back():
    packed, prepared = sm.pack_block_weight(BLOCKS, "q4_0"), sm.prepare_weight(B)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        for got, expected in zip(pool.submit(linear, packed, prepared).result(DEADLINE_S), linear(packed, prepared)):
            assert torch.equal(got, expected)
        with pytest.raises(sm.KernelNotFoundError, match="^kernel: there is none named x$"):
            pool.submit(fail, 0).result(DEADLINE_S)
        with pytest.raises(sm.BadTensorShapeError, match="^b: expected ") as caught:
            pool.submit(fail, 1).result(DEADLINE_S)
        assert caught.value.status is sm.Status.BAD_TENSOR_SHAPE
        with pytest.raises(sm.BadParamError, match="^Handle: expected to stay as it is in its process"):
            pool.submit(repr, sm.Handle("cpu")).result(DEADLINE_S)


# ---- copies -------------------------------------------------------------------------------------------------------------


def saved(value: object, safe: list[type] | None = None) -> object:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    if safe is None:
        return torch.load(file, weights_only=False)
    with torch.serialization.safe_globals(safe):
        return torch.load(file, weights_only=True)


def errors() -> list[type[sm.ScaledMMError]]:
    found = [sm.ScaledMMError]
    for one in found:
        found += one.__subclasses__()
    return [one for one in found if one.__module__ == "scaled_mm.errors"]


@pytest.mark.parametrize("error", errors(), ids=lambda error: error.__name__)
def test_an_error_survives_copies_and_every_protocol_of_pickle(error):
    for made in (error("a: expected int8, got float32"), error("what", sm.Status.CUDA_ERROR)):
        made.note = "kept"
        for copied in (
            copy.copy(made),
            copy.deepcopy(made),
            *(pickle.loads(pickle.dumps(made, number)) for number in range(pickle.HIGHEST_PROTOCOL + 1)),
        ):
            assert type(copied) is error and str(copied) == str(made) and copied.args == made.args and copied.note == "kept"
            assert copied.status is made.status and type(copied.status) is sm.Status


WEIGHTS = {
    "prepared": (lambda: sm.prepare_weight(B, torch.tensor([3], dtype=torch.int32)), [sm.PreparedWeight]),
    "packed": (lambda: sm.pack_block_weight(BLOCKS, "q4_0"), [sm.PackedBlockWeight, Parts]),
    "of a file": (lambda: sm.QuantizedTensor("q4_0", BLOCKS), [sm.QuantizedTensor]),
    "asymmetric": (lambda: sm.quantize_int8(X, symmetric=False), [sm.AsymmetricInt8]),
}


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple):
        return type(one) is type(other) and all(map(same, one, other))
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one) if field.name != "constant"]
        return type(one) is type(other) and all(same(getattr(one, name), getattr(other, name)) for name in names)
    return one == other


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_weight_survives_copies_pickles_and_torch_save_but_not_its_promise(kind):
    make, safe = WEIGHTS[kind]
    weight = make()
    for copied in (copy.copy(weight), copy.deepcopy(weight), pickle.loads(pickle.dumps(weight)), saved(weight), saved(weight, safe)):
        assert same(weight, copied)
        assert not getattr(copied, "constant", False)  # that nobody writes to its memory
    with pytest.raises(pickle.UnpicklingError, match=safe[0].__name__):  # torch names the class to allow
        saved(weight, [])


def test_descriptions_and_choices_survive_copies_and_pickles():
    strided = sm.TensorDesc((32, 64), torch.int8, (1, 32), constant=True)
    assert strided.bytes == 32 * 64  # which it remembers
    for value in (strided, sm.TensorDesc((64, 256), "q4_0", packed=True), KernelChoice("row", "reason", 3, True), sm.Status.OVERFLOW):
        for copied in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value)), saved(value)):
            assert copied == value and type(copied) is type(value) and hash(copied) == hash(value)
