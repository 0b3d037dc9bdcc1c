"""What the isolated process does with a request, on a CPU with a stand-in for our kernels."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
import torch

from scaled_mm.autotune.workbench import WORKBENCHES, ExpertsWorkbench, Workbench
from scaled_mm.autotune.worker import GpuBench
from scaled_mm.bench.int8 import peers
from scaled_mm.cli import autotune
from scaled_mm.core import binding
from scaled_mm.kernels.sections import OF_EXPERTS, SECTIONS, TOP_LEVEL
from scaled_mm.measure.peer import OURS
from scaled_mm.measure.run import Options, time_peers
from scaled_mm.measure.shapes import Case

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from bench_data import StandIn  # noqa: E402

REQUEST = {"row": "a row", "library": "a.so", "M": 5, "N": 64, "K": 32, "limit_us": None}


@pytest.fixture
def bench(monkeypatch):
    made = GpuBench()
    made.device, made.options = torch.device("cpu"), Options(budget_ms=1)
    made.bench = Workbench(made.device, torch.Generator(made.device).manual_seed(1), made.options)
    made.product = made.weights = made.inputs = made.check = None
    made.loaded = set()
    loaded = []
    monkeypatch.setattr(binding, "call", lambda name, *arguments: loaded.append((name, arguments)))
    monkeypatch.setattr(peers, "Ours", lambda row, name: StandIn(name))
    made.calls = loaded
    return made


def test_a_row_with_the_bits_of_the_reference_is_timed(bench):
    answer = bench.measure(REQUEST)
    assert answer["outcome"] == "timed" and answer["us"] > 0 and len(answer["samples"]) > 1
    bench.measure(REQUEST)
    assert bench.calls == [("scaledMMLoadKernels", (b"a.so",))]  # once


@pytest.mark.parametrize("after", [0, 8])
def test_a_row_with_wrong_bits_is_wrong_whether_at_once_or_in_the_timed_calls(bench, monkeypatch, after):
    monkeypatch.setattr(peers, "Ours", lambda row, name: StandIn(name, fault="bits", fault_after=after))
    answer = bench.measure(REQUEST)
    assert answer["outcome"] == "wrong" and answer["message"] and "us" not in answer


def test_a_row_that_raises_failed_and_says_why(bench, monkeypatch):
    monkeypatch.setattr(peers, "Ours", lambda row, name: StandIn(name, fault="raise"))
    assert bench.measure(REQUEST) == {"outcome": "failed", "message": "RuntimeError: the launch failed"}


def test_a_product_that_cannot_be_checked_is_not_timed(bench):
    bench.options = bench.bench.options = Options(budget_ms=1, check_limit_gmac=0)
    answer = bench.measure(REQUEST)
    assert answer["outcome"] == "failed" and "a kernel config that is not checked may not win" in answer["message"]


def test_inputs_and_reference_are_made_once_a_product_and_weights_once_a_layer(bench):
    bench.measure(REQUEST)
    inputs, weights = bench.inputs, bench.weights
    bench.measure({**REQUEST, "row": "another", "library": "b.so"})
    assert bench.inputs is inputs
    bench.measure({**REQUEST, "M": 6})
    assert bench.inputs is not inputs and bench.inputs.case.M == 6 and bench.weights is weights
    bench.measure({**REQUEST, "N": 128})
    assert bench.weights is not weights and bench.check is not None and bench.inputs.out(0).shape == (5, 128)


@pytest.mark.parametrize("section", [name for name in WORKBENCHES if name != TOP_LEVEL])
def test_operands_of_each_section_are_multiplied_and_checked(section):
    options = Options(budget_ms=1, regime="brief")
    device = torch.device("cpu")
    bench = WORKBENCHES[section](device, torch.Generator(device).manual_seed(1), options, 3 if section in OF_EXPERTS else 1)
    inputs = bench.inputs(Case("64x256", 5, 64, 256), bench.weights(64, 256))
    assert inputs.out(0).shape == (15 if section in OF_EXPERTS else 5, 64)
    peer = bench.peer(None)  # on a CPU no kernel has a name
    check = bench.check(inputs)
    result = time_peers(inputs, [peer], check, options)[OURS]
    assert result.failed is None and result.bit_equal is True and result.us > 0
    inputs.expected.add_(1)
    assert time_peers(inputs, [peer], bench.check(inputs), options)[OURS].bit_equal is False


def test_every_section_whose_kernel_configs_give_the_same_bits_can_be_tuned():
    parser = argparse.ArgumentParser()
    autotune.add_arguments(parser)
    [choices] = [action.choices for action in parser._actions if action.dest == "section"]
    assert set(choices) == set(WORKBENCHES) == {name for name, section in SECTIONS.items() if section.same_bits}
    assert set(OF_EXPERTS) == {name for name, bench in WORKBENCHES.items() if issubclass(bench, ExpertsWorkbench)}
