"""The cost model: limits that must hold, hand-computed examples, what was measured, and what is refused."""

from __future__ import annotations

import dataclasses
import math
import timeit

import pytest

from scaled_mm.errors import BadParamError
from scaled_mm.parallel import choice, cost
from scaled_mm.parallel.collectives import APART
from scaled_mm.parallel.cost import linear
from scaled_mm.parallel.cost.collectives import KINDS
from scaled_mm.parallel.cost.experts import reached_ranks
from scaled_mm.parallel.cost.linear import CHUNKS, INPUT_BYTES

H200 = "NVIDIA H200"
HOSTS = cost.hosts_of(H200)
SHAPES = [(1, 8192, 28672, 8), (77, 4096, 14336, 4), (2048, 8192, 8192, 2), (8192, 8192, 28672, 8), (2048, 8192, 8192, 16)]


def test_a_ring_is_computed_by_hand():
    # LL: 6.6 + 7 steps of 0.6, then 7/8 of 1 MB at 141 GB/s; Simple: 8.4 + 7 * 3.4, then 7/8 of 1 GB at 360 GB/s
    assert cost.fastest("reduce_scatter", 1_000_000, 8, HOSTS) == (pytest.approx(10.8 + 875_000 / 141e3), "ring LL")
    assert cost.fastest("all_gather", 10**9, 8, HOSTS) == (pytest.approx(32.2 + 875e6 / 360e3), "ring Simple")
    assert cost.all_reduce_us(0, 8, HOSTS) == 0.0
    # two nodes: 14 steps inside, of at least 1 us to post a step to the network, and one between of 2.7
    assert cost.reduce_scatter_us(16, 16, HOSTS) == pytest.approx(6.6 + 14 * 1.0 + 2.7, abs=0.01)
    # one GPU a node: the network alone, with the latency of a tree's step
    alone = dataclasses.replace(HOSTS, gpus_per_node=1)
    assert cost.reduce_scatter_us(16, 2, alone) == pytest.approx(6.6 + 5.0, abs=0.01)
    assert cost.reduce_scatter_us(2 * 46 * 10**9, 2, alone) == pytest.approx(1e6, rel=0.001)


def test_the_model_agrees_with_what_nccl_logs_of_its_own():
    us, algorithm = cost.fastest("all_reduce", 128, 16, HOSTS)  # 16 H100s on two nodes: NCCL issue 1453
    assert algorithm == "tree LL" and us == pytest.approx(25.2148, abs=0.01)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32])
def test_time_grows_with_bytes_and_one_rank_sends_nothing(ranks):
    sizes = [1, 100, 4096, 10**5, 10**6, 10**7, 10**9]
    for kind in KINDS:
        times = [cost.fastest(kind, size, ranks, HOSTS)[0] for size in sizes]
        assert times == sorted(times) and len(set(times)) == len(sizes) and times[0] > 6
        assert cost.fastest(kind, 10**6, 1, HOSTS) == (0.0, "none")
    assert cost.all_reduce_us(10**9, ranks, HOSTS) > 1.9 * cost.reduce_scatter_us(10**9, ranks, HOSTS)
    found = [cost.all_to_all_us(size, ranks, HOSTS) for size in (0, 10**3, 10**7, 10**9)]
    assert found == sorted(found) and found[0] == 0.0 == cost.all_to_all_us(10**9, 1, HOSTS)


def test_slower_links_are_slower_and_a_network_is_slower_than_a_link():
    for kind in KINDS:
        times = [cost.fastest(kind, 10**8, 8, cost.Hosts(cost.LINKS[name]))[0] for name in ("nvlink4", "nvlink3", "pcie5", "pcie4")]
        assert times == sorted(times)
        assert cost.fastest(kind, 10**5, 8, dataclasses.replace(HOSTS, gpus_per_node=4))[0] > cost.fastest(kind, 10**5, 8, HOSTS)[0]
    assert "LL128" not in cost.fastest("all_reduce", 4 * 10**6, 8, cost.hosts_of("NVIDIA L40S"))[1]
    assert "LL128" in cost.fastest("all_reduce", 4 * 10**6, 8, HOSTS)[1]


def test_the_bytes_of_each_way_are_those_of_its_collectives():
    per_output = {way: cost.sent_bytes(64, 4096, 8, way=way, static=True, k=14336) / (64 * 4096 * 7 / 8) for way in cost.WAYS}
    assert per_output["gather"] == 2 + 2 * 3.5 and per_output["gather_int8"] == 2 + 3.5
    assert per_output["bf16"] == 4 and per_output["exact"] == 6 and per_output["exact_all_reduce"] == 8
    assert per_output["exact_int8"] == pytest.approx(5, abs=0.001)  # and a scale for each row
    scales = 2 * 4 * 64 * 7 / 8
    assert cost.sent_bytes(64, 4096, 8) == cost.sent_bytes(64, 4096, 8, static=True) + scales
    gathered = [cost.sent_bytes(64, 4096, 8, way=way, static=static, k=4096) for way in ("gather", "gather_int8") for static in (False, True)]
    assert gathered[0] == gathered[1] and gathered[2] == gathered[3] + scales
    assert cost.sent_bytes(64, 4096, 8, way="bf16") == cost.sent_bytes(64, 4096, 8, way="bf16", static=True)
    assert cost.sent_bytes(1, 4096, 8, static=True) == cost.sent_bytes(8, 4096, 8, static=True)  # rows are padded
    assert cost.sent_bytes(64, 4096, 1) == 0.0


@pytest.mark.parametrize("m, n, k, ranks", SHAPES)
def test_the_parts_of_a_way_are_its_steps(m, n, k, ranks):
    found = {way: cost.predict(m, n, k, ranks, way=way) for way in cost.WAYS}
    always = {"quantize", "product", "reduce", "norm"}
    exact = always | {"maximum", "scales"}
    steps = {"exact": exact | {"scale", "gather"}, "exact_int8": exact | {"scale", "gather"}, "exact_all_reduce": exact | {"scale"}, "bf16": always}
    steps["exact_int8"] |= {"pack"} if m * n < APART else set()
    steps["gather"] = {"quantize", "input", "product", "gather", "norm"} | ({"columns"} if m > 1 else set())
    steps["gather_int8"] = steps["gather"] | {"maximum", "scales"}
    assert {way: set(one.parts) for way, one in found.items()} == steps
    assert all(us > 0 and math.isfinite(us) for one in found.values() for us in one.parts.values())
    assert all(one.hidden == pytest.approx(0) and one.us == pytest.approx(sum(one.parts.values())) for one in found.values())
    static = cost.predict(m, n, k, ranks, static=True)
    assert found["exact"].us - static.us == pytest.approx(found["exact"].parts["maximum"] + found["exact"].parts["scales"])
    assert found["exact_int8"].parts["norm"] <= found["exact"].parts["norm"]  # of the rank's rows
    assert found["gather_int8"].parts["input"] < found["gather"].parts["input"]
    assert found["gather"].parts["gather"] <= found["exact"].parts["gather"]  # rows are not padded
    assert cost.predict(m, n, k, ranks, way="gather", static=True) == found["gather"]
    assert set(cost.predict(m, n, k, 1, chunks=4).parts) == {"quantize", "product", "norm"}


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("way", [way for way in cost.WAYS if way not in INPUT_BYTES])
@pytest.mark.parametrize("m, n, k, ranks", SHAPES)
def test_overlap_is_bounded_by_both_resources_and_the_best_chunks_are_the_fastest(m, n, k, ranks, way, overlap, monkeypatch):
    monkeypatch.setattr(linear, "OVERLAP", overlap)
    times = {}
    for chunks in CHUNKS:
        one = cost.predict(m, n, k, ranks, way=way, chunks=chunks)
        both = one.parts["product"] + one.parts["reduce"]
        span = both - one.hidden
        assert max(one.parts["product"], one.parts["reduce"]) <= span + 1e-9 and span <= both + 1e-9
        times[chunks] = one.us
    best = cost.best_chunks.__wrapped__(m, n, k, ranks, way=way)
    assert times[best] == min(times.values()) and best == min(c for c in times if times[c] == times[best])


def test_a_makespan_is_computed_by_hand():
    assert cost.makespan([10, 10, 10], [4, 4, 4]) == 34  # the products bound it
    assert cost.makespan([4, 4, 4], [10, 10, 10]) == 34  # the link does
    assert cost.makespan([7], [5]) == 12 and cost.makespan([], []) == 0


@pytest.mark.parametrize("m, ranks, chunks", [(1, 8, 4), (7, 2, 3), (64, 8, 3), (2048, 8, 6), (100, 16, 8), (3, 1, 2)])
def test_chunks_hold_each_row_once(m, ranks, chunks):
    found = cost.chunk_rows(m, ranks, chunks)
    assert sum(real for _, real in found) == m and sum(each for each, _ in found) == -(-m // ranks)
    assert 1 <= len(found) <= chunks and all(0 < real <= each * ranks for each, real in found)
    assert max(each for each, _ in found) - min(each for each, _ in found) <= 1


def test_chunks_do_not_pay_where_they_were_measured_not_to():
    """Layers of Llama 3 8B and 70B on two H200s."""
    for n, k in ((4096, 4096), (4096, 14336), (8192, 8192), (8192, 28672)):
        for m in (1, 16, 64, 256, 2048, 8192):
            assert {cost.best_chunks(m, n, k, 2, way=way, static=static) for way in cost.WAYS for static in (False, True)} == {1}
            assert choice.choose(m, n, k, 2, H200, all_rows=True, static=False, via=None, chunks=None).chunks == 1


def test_chunks_would_pay_for_large_products_if_overlap_hid_time(monkeypatch):
    monkeypatch.setattr(linear, "OVERLAP", 1.0)
    best = cost.best_chunks.__wrapped__
    assert best(1, 8192, 28672, 8) == best(64, 8192, 28672, 8) == best(2048, 8192, 28672, 1) == 1 and best(8192, 8192, 28672, 8) > 1


def test_few_tokens_are_gathered_as_they_are_and_many_in_int8():
    options = dict(static=False, gather_input=None)
    assert [choice.choose_gather(m, 8192, 28672, 2, H200, **options) for m in (1, 16, 2048, 8192)] == ["float", "float", "int8", "int8"]
    assert choice.choose_gather(1, 8192, 28672, 2, "", **options) == choice.choose_gather(1, 8192, 28672, 1, H200, **options) == "int8"
    assert choice.choose_gather(0, 8192, 28672, 2, H200, **options) == "int8"
    assert choice.choose_gather(2048, 8192, 28672, 2, H200, static=False, gather_input="float") == "float"


def test_best_chunks_of_a_repeated_call_takes_microseconds():
    facts = cost.facts_of(H200)
    options = dict(gpu=facts, hosts=HOSTS, way="exact", static=False)
    cost.best_chunks(64, 8192, 8192, 8, **options)
    assert min(timeit.repeat(lambda: cost.best_chunks(64, 8192, 8192, 8, **options), number=1000, repeat=5)) < 5e-3


def test_a_product_takes_longer_with_wider_outputs_and_no_less_than_99_percent_of_its_time_on_fewer_sms():
    facts = cost.facts_of(H200)
    fewer = dataclasses.replace(facts, multiprocessors=facts.multiprocessors - 24)
    for m, n, k in ((1, 8192, 1024), (2048, 8192, 3584), (8192, 4096, 1792)):
        assert cost.product_us(m, n, k, facts, 4) > cost.product_us(m, n, k, facts) > 0
        assert cost.product_us(m, n, k, fewer) > 0.99 * cost.product_us(m, n, k, facts)
    assert cost.product_us(0, 8, 8, facts) == 0.0 and cost.product_us(64, 8191, 1001, facts) > 0
    for gpu in cost.GPU_LINKS:
        assert cost.predict(64, 4096, 4096, 2, gpu=gpu).us > 0


def test_the_ranks_that_a_token_reaches_are_counted():
    assert reached_ranks(1, 8, 8) == 1 and reached_ranks(8, 8, 8) == 8 and reached_ranks(3, 8, 1) == 1
    assert reached_ranks(2, 4, 2) == pytest.approx(2 - 2 * (1 / 6))  # of 6 pairs of experts, two lie on one rank


def test_experts_travel_in_the_steps_of_their_way():
    sent, replicated = (one(2048, 8, 256, 7168, 8, HOSTS) for one in (cost.experts_all_to_all, cost.experts_replicated))
    assert list(sent) == ["dispatch", "combine", "gather"] and list(replicated) == ["tokens", "combine", "gather"]
    assert sent["gather"] == replicated["gather"] == cost.all_gather_us(2048 * 7168 * 2, 8, HOSTS)
    assert sent["combine"] == cost.all_to_all_us(256 * 8 * 7168 * 2, 8, HOSTS)
    assert replicated["combine"] == cost.reduce_scatter_us(2048 * 8 * 7168 * 2, 8, HOSTS) > 5 * sent["combine"]
    assert not any(cost.experts_all_to_all(5, 2, 8, 256, 1, HOSTS).values())


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: cost.predict(0, 8, 8, 2), "m: expected an integer >= 1, got 0"),
        (lambda: cost.predict(1, 8, 8.0, 2), "k: expected an integer >= 1, got 8.0"),
        (lambda: cost.predict(1, 8, 8, True), "ranks: expected an integer >= 1, got True"),
        (lambda: cost.predict(1, 8, 8, 12), r"ranks: expected at most 8 \(gpus_per_node\) or a multiple of it, got 12"),
        (lambda: cost.predict(1, 8, 8, 2, way="fp8"), "way: expected one of exact, exact_int8, .*, bf16, got 'fp8'"),
        (lambda: cost.predict(1, 8, 8, 2, way="gather", chunks=2), "chunks: expected 1 with way='gather', got 2"),
        (lambda: cost.sent_bytes(1, 8, 2, way="gather_int8"), "k: expected an integer >= 1, got None"),
        (lambda: cost.predict(1, 8, 8, 2, chunks=0), "chunks: expected an integer >= 1, got 0"),
        (lambda: cost.predict(1, 8, 8, 2, gpu="H200"), "gpu: expected one of NVIDIA H200, .*, got 'H200'"),
        (lambda: cost.predict(1, 8, 8, 2, gpu=cost.facts_of(H200)), "hosts: expected Hosts beside a GPU's facts, got None"),
        (lambda: cost.best_chunks(1, 8, 8, 2, way="x"), "way: expected one of"),
        (lambda: cost.sent_bytes(1, 8, 2, way="x"), "way: expected one of"),
        (lambda: cost.sent_bytes(1, 8, 0), "ranks: expected an integer >= 1, got 0"),
        (lambda: cost.hosts_of(H200, "nvlink9"), "link: expected one of nvlink4, nvlink3, pcie5, pcie4, got 'nvlink9'"),
        (lambda: cost.hosts_of(H200, gpus_per_node=0), "gpus_per_node: expected an integer >= 1, got 0"),
        (lambda: cost.Hosts("nvlink4"), "link: expected a Link, got 'nvlink4'"),
        (lambda: cost.fastest("broadcast", 1, 2, HOSTS), "kind: expected one of all_reduce, reduce_scatter, all_gather, got 'broadcast'"),
        (lambda: cost.all_reduce_us(-1, 2, HOSTS), "size: expected bytes >= 0, got -1"),
        (lambda: cost.experts_all_to_all(1, 2, 9, 8, 2, HOSTS), "experts: expected a multiple of the 2 ranks, got 9"),
        (lambda: cost.experts_replicated(1, 9, 8, 8, 2, HOSTS), r"choices: expected at most 8 \(experts\), got 9"),
    ],
)
def test_what_is_wrong_is_refused_and_named(call, message):
    with pytest.raises(BadParamError, match=message):
        call()
