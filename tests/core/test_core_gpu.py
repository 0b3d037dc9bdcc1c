"""On a GPU: the current stream, no synchronisation, no allocation but the output, CUDA graphs, threads, several devices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import scaled_mm as sm
from scaled_mm import reference

pytestmark = pytest.mark.gpu

# Aligned, so a fast row; nothing aligned, so the fallback.
SHAPES = [(16, 512, 1024), (17, 333, 1031)]


class Product:
    """Operands on one device, with new values whenever they are asked for."""

    def __init__(self, shape: tuple[int, int, int], zero_points: bool = False, device: str = "cuda:0"):
        M, N, K = shape
        self.a = torch.empty((M, K), dtype=torch.int8, device=device)
        self.weight = torch.empty((N, K), dtype=torch.int8, device=device)
        self.inputs = {
            "a": self.a,
            "b": self.weight.t(),
            "a_scale": torch.rand(M, 1, device=device) + 0.01,
            "b_scale": torch.rand(N, device=device) + 0.01,
            "bias": torch.randn(N, device=device).bfloat16(),
        }
        if zero_points:
            self.inputs["a_zero_point"] = torch.randint(-128, 128, (M,), dtype=torch.int32, device=device)
            self.inputs["b_zero_point"] = torch.randint(-128, 128, (N,), dtype=torch.int8, device=device)
        self.out = torch.full((M, N), float("nan"), dtype=torch.bfloat16, device=device)
        self.fill(0)

    def fill(self, seed: int) -> None:
        for offset, tensor in enumerate((self.a, self.weight)):
            generator = torch.Generator().manual_seed(2 * seed + offset)
            tensor.copy_(torch.randint(-128, 128, tensor.shape, dtype=torch.int8, generator=generator))

    def expected(self) -> torch.Tensor:
        return reference.scaled_mm(**self.inputs)

    def descriptor(self) -> sm.Descriptor:
        return sm.create_descriptor(sm.Handle(str(self.a.device)), out=self.out, **self.inputs)

    def ways(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        """scaled_mm, scaled_mm into an out, and a descriptor; each has run once, so that nothing is built or loaded later."""

        def into_out() -> torch.Tensor:
            return sm.scaled_mm(**self.inputs, out=self.out)

        descriptor = self.descriptor()
        size = descriptor.workspace_size
        workspace = torch.empty(size, dtype=torch.uint8, device=self.a.device) if size else None

        def calculate() -> torch.Tensor:
            descriptor.calculate(self.out, **self.inputs, workspace=workspace)
            return self.out

        for name, way in (("scaled_mm", lambda: sm.scaled_mm(**self.inputs)), ("out", into_out), ("calculate", calculate)):
            for _ in range(3):  # the first calls make handles, load modules and fill caches
                way()
            torch.cuda.synchronize()
            yield name, way
        descriptor.destroy()


@pytest.fixture(params=[(shape, zero_points) for shape in SHAPES for zero_points in (False, True)], ids=str)
def product(request) -> Product:
    return Product(*request.param)


def test_a_call_allocates_its_output_and_nothing_else(product):
    def allocations() -> int:
        return torch.cuda.memory_stats()["allocation.all.allocated"]

    workspace = int("a_zero_point" in product.inputs)  # which scaled_mm has to find a place for; documented
    allowed = {"scaled_mm": 1 + workspace, "out": workspace, "calculate": 0}
    for name, way in product.ways():
        before = allocations()
        kept = way()
        assert allocations() - before == allowed[name], name
        assert torch.equal(kept, product.expected())


def test_a_call_does_not_synchronise(product):
    for name, way in product.ways():
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = way()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(out, product.expected()), name


def test_a_call_returns_while_the_stream_is_still_busy(product):
    for name, way in product.ways():
        torch.cuda._sleep(1_000_000_000)  # clock cycles, about half a second
        start = time.perf_counter()
        out = way()
        seconds = time.perf_counter() - start
        busy = not torch.cuda.current_stream().query()
        torch.cuda.synchronize()
        assert busy and seconds < 0.2, f"{name}: {seconds:.3f} s"
        assert torch.equal(out, product.expected()), name


def test_a_call_runs_on_the_current_stream(product):
    """The stream is kept busy and then changes the operands: a launch on any other stream would see the old ones."""
    stream = torch.cuda.Stream()
    new = Product(tuple(product.inputs["a"].shape[:1]) + tuple(reversed(product.inputs["b"].shape)), "a_zero_point" in product.inputs)
    for seed, (name, way) in enumerate(product.ways(), 1):
        new.fill(seed)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            product.a.copy_(new.a)
            product.weight.copy_(new.weight)
            out = way()
        stream.synchronize()
        assert torch.equal(out, product.expected()), name
        product.out.fill_(float("nan"))


def test_calculate_runs_on_the_stream_that_it_is_given(product):
    stream = torch.cuda.Stream()
    with product.descriptor() as descriptor:
        workspace = torch.empty(max(descriptor.workspace_size, 1), dtype=torch.uint8, device="cuda")
        descriptor.calculate(product.out, **product.inputs, workspace=workspace)
        for given in (stream, stream.cuda_stream):
            new = torch.randint(-128, 128, product.a.shape, dtype=torch.int8, device="cuda")
            product.out.fill_(float("nan"))
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(100_000_000)
                product.a.copy_(new)
            descriptor.calculate(product.out, **product.inputs, workspace=workspace, stream=given)
            stream.synchronize()
            assert torch.equal(product.out, product.expected())


def test_two_streams_at_once_do_not_disturb_each_other():
    streams = [torch.cuda.Stream() for _ in range(2)]
    products = [Product(SHAPES[0], zero_points=True), Product(SHAPES[0])]
    for product, seed in zip(products, (1, 2)):
        product.fill(seed)
        sm.scaled_mm(**product.inputs)
    torch.cuda.synchronize()
    outs = [[], []]
    for _ in range(50):
        for product, stream, kept in zip(products, streams, outs):
            with torch.cuda.stream(stream):
                kept.append(sm.scaled_mm(**product.inputs))
    torch.cuda.synchronize()
    for product, kept in zip(products, outs):
        expected = product.expected()
        assert all(torch.equal(out, expected) for out in kept)


def test_a_captured_call_computes_what_its_operands_hold_at_each_replay(product):
    for name, way in product.ways():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = way()
        for seed in (3, 4):
            product.fill(seed)
            out.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, product.expected()), name


def test_a_chain_of_calls_is_captured_and_replayed():
    """Back to back, where a kernel may start while the one before it ends: each must see what the one before wrote."""
    M, N = 16, 512
    weights = [torch.randint(-128, 128, (N, N), dtype=torch.int8, device="cuda").t() for _ in range(4)]
    scale = torch.full((1,), 2.0**-9, device="cuda")
    x = torch.randint(-128, 128, (M, N), dtype=torch.int8, device="cuda")

    def chain(product) -> torch.Tensor:
        value = x
        for weight in weights:
            value = product(value, weight, scale, scale).clamp(-128, 127).to(torch.int8)
        return value

    chain(sm.scaled_mm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(sm.scaled_mm)
    for _ in range(3):
        x.copy_(torch.randint(-128, 128, (M, N), dtype=torch.int8, device="cuda"))
        graph.replay()
        assert torch.equal(out, chain(reference.scaled_mm))


def test_threads_with_streams_of_their_own_share_one_descriptor():
    product = Product(SHAPES[0])
    outs, failed = [torch.empty_like(product.out) for _ in range(4)], []
    expected = product.expected()
    with product.descriptor() as descriptor:

        def work(out: torch.Tensor) -> None:
            try:
                stream = torch.cuda.Stream()
                for _ in range(50):
                    with torch.cuda.stream(stream):
                        out.fill_(float("nan"))
                        descriptor.calculate(out, **product.inputs)
                    stream.synchronize()
                    assert torch.equal(out, expected)
            except Exception as error:
                failed.append(repr(error))

        torch.cuda.synchronize()
        threads = [threading.Thread(target=work, args=(out,)) for out in outs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failed == []


def test_a_launch_may_be_the_first_thing_that_a_thread_does_with_cuda():
    product = Product(SHAPES[0])
    out, failed = torch.full_like(product.out, float("nan")), []
    with product.descriptor() as descriptor:
        descriptor.calculate(product.out, **product.inputs)  # what can be looked up once has been

        def work() -> None:
            try:
                descriptor.calculate(out, **product.inputs)
            except Exception as error:
                failed.append(repr(error))

        torch.cuda.synchronize()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    torch.cuda.synchronize()
    assert failed == [] and torch.equal(out, product.expected())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_call_runs_on_the_device_of_its_operands_whichever_is_current():
    product = Product(SHAPES[0], zero_points=True, device="cuda:1")
    with torch.cuda.device(0):
        for name, way in product.ways():
            out = way()
            assert out.device == torch.device("cuda:1") and torch.equal(out, product.expected()), name
        assert torch.cuda.current_device() == 0
