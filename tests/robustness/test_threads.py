"""Many threads, each with streams of its own, calling in every way at once: the bits of the reference every time."""

from __future__ import annotations

import random
import threading

import pytest
import torch

import scaled_mm as sm
from scaled_mm import reference

pytestmark = pytest.mark.gpu

THREADS, STREAMS, CALLS = 10, 10, 1000
# Decode, prefill, several waves; a padded row, and one that takes the generic kernel.
SHAPES = [(1, 4096, 1024), (16, 1024, 2048), (33, 512, 512), (128, 2048, 512), (300, 768, 1024), (7, 1000, 333)]
OUT_DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int32]


class Product:
    """A product with its expected result; inputs are shared by all threads and never written."""

    def __init__(self, M: int, N: int, K: int, out_dtype: torch.dtype, zero_points: bool):
        self.out_dtype = out_dtype
        self.a = torch.randint(-128, 128, (M, K), dtype=torch.int8, device="cuda")
        self.b = torch.randint(-128, 128, (N, K), dtype=torch.int8, device="cuda").t()
        self.inputs = {}
        if out_dtype != torch.int32:
            self.inputs = {"a_scale": torch.rand(M, 1, device="cuda"), "b_scale": torch.rand(N, device="cuda"), "bias": torch.randn(N, device="cuda")}
        self.weight = sm.prepare_weight(self.b)
        if zero_points:
            self.inputs["a_zero_point"] = torch.randint(-128, 128, (M,), dtype=torch.int32, device="cuda")
        self.expected = reference.scaled_mm(self.a, self.b, out_dtype=out_dtype, **{"a_scale": None, "b_scale": None, **self.inputs})

    def poisoned(self) -> torch.Tensor:
        return torch.full_like(self.expected, -77777 if self.out_dtype == torch.int32 else float("nan"))


@pytest.fixture(scope="module")
def products():
    torch.manual_seed(0)
    made = [Product(*shape, out_dtype, zeros) for shape in SHAPES for out_dtype in OUT_DTYPES for zeros in (False, True)]
    for product in made:  # builds what is missing before the clock of the threads runs
        sm.scaled_mm(product.a, product.b, out_dtype=product.out_dtype, **product.inputs)
    torch.cuda.synchronize()
    return made


def test_ten_threads_on_ten_streams_each_get_the_reference_bits_from_a_thousand_mixed_calls(products):
    handle = sm.Handle("cuda:0")
    shared = [sm.create_descriptor(handle, out=p.expected, a=p.a, b=p.b, **p.inputs) for p in products]
    failures: list[str] = []

    def work(number: int) -> None:
        choose = random.Random(number)
        streams = [torch.cuda.Stream() for _ in range(STREAMS)]
        pending: list[tuple[torch.cuda.Stream, Product, torch.Tensor]] = []
        try:
            for call in range(CALLS):
                index, stream = choose.randrange(len(products)), choose.choice(streams)
                product, way = products[index], choose.randrange(4)
                with torch.cuda.stream(stream):
                    out = product.poisoned()
                    if way == 0:
                        sm.scaled_mm(product.a, product.b, out=out, **product.inputs)
                    elif way == 1:
                        sm.scaled_mm(product.a, product.weight, out=out, **product.inputs)
                    elif way == 2:
                        out = sm.scaled_mm(product.a, product.b, out_dtype=product.out_dtype, **product.inputs)
                    else:
                        size = shared[index].workspace_size
                        workspace = torch.empty(size, dtype=torch.uint8, device="cuda") if size else None
                        shared[index].calculate(out, product.a, product.b, workspace=workspace, **product.inputs)
                pending.append((stream, product, out))
                if len(pending) == 50 or call == CALLS - 1:
                    for used, one, result in pending:
                        used.synchronize()
                        if not torch.equal(result, one.expected):
                            failures.append(f"thread {number}: {tuple(one.a.shape)} {one.out_dtype}")
                    pending.clear()
        except Exception as error:
            failures.append(f"thread {number}: {error!r}")

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for descriptor in shared:
        descriptor.destroy()
    assert failures == []
