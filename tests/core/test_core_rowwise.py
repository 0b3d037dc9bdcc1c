"""Row-wise operators through the C interface on a machine that pretends to have a GPU: what a launch is handed, and what is refused."""

from __future__ import annotations

import itertools
import json

import pytest

from scaled_mm.jit import codegen
from scaled_mm.jit.provide import When


@pytest.fixture
def ask(fake_gpu):
    def ask(function: str, *arguments, script: str = "fake_gpu_rowwise.py"):
        done = fake_gpu.python(function, *arguments, script=script)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout)

    return ask


def test_every_operator_is_launched_with_what_gives_the_bits_of_the_cpu(ask, fake_gpu, rowwise_kernels):
    met = ask("operators", fake_gpu.kernels, rowwise_kernels, 300)
    assert sum(met.values()) == 300 and len(met) == 4 + 2 * 3 + 3 * 3, met


def check_refusals(answer: dict[str, list[str]]) -> None:
    for what, (expected, status, message) in answer.items():
        assert expected == f"{status} {message.partition(':')[0]}".strip(), (what, status, message)
        assert status == "SUCCESS" or ("expected" in message and "got" in message), message


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_create_refuses_what_the_header_does_not_allow_and_names_it(ask, fake_gpu, rowwise_kernels, device):
    answer = ask("create_refusals", fake_gpu.kernels, rowwise_kernels, device)
    check_refusals(answer)
    assert answer["scale [1, M]"][2].endswith("; x is flat, so reshape it to [4, 1]")
    assert "scaledMMCreateRowwiseDescriptor" in answer["scaledMMCreateDescriptor NORM None"][2]


def test_calculate_refuses_memory_that_outputs_share_and_pointers_that_do_not_fit(ask, fake_gpu, rowwise_kernels):
    answer = ask("calculate_refusals", fake_gpu.kernels, rowwise_kernels)
    check_refusals(answer)
    assert [what for what, (_, status, _) in answer.items() if status == "SUCCESS"] == [
        "fine",
        "total is x",
        "total is residual",
        "total is x and residual",
        "one row in place",
        "nothing within the weight",
    ]


def test_a_plan_names_its_kernel_which_no_table_lists(ask, fake_gpu, rowwise_kernels):
    answer = ask("names", fake_gpu.kernels, rowwise_kernels)
    for kind, rows in itertools.product(("QUANTIZE", "NORM", "ACTIVATION"), (4, 0)):
        kernel = [f"rowwise_{kind.lower()}", "the kernel of this operator; no table lists it", -1, 0]
        assert answer.pop(f"{kind}, {rows} rows, GPU") == kernel
        assert answer.pop(f"{kind}, {rows} rows, CPU") == ["cpu", "the device is a CPU", -1, 0]
        assert answer.pop(f"calculate {kind}, {rows} rows") == "DEVICE_NOT_SUPPORTED"
    assert answer == {}


def test_the_provider_is_asked_for_the_kernel_of_the_dtype_of_x(ask, fake_gpu):
    answer = ask("missing", fake_gpu.kernels)
    assert answer["answer"][0] == "KERNEL_NOT_BUILT" and "row rowwise_norm of sm90" in answer["answer"][1]
    assert answer["asked"] == [["sm90", "rowwise_norm", codegen.OUT_DTYPES["fp16"].code, When.LATER]]


OPERATORS = "fake_gpu_rowwise_operators.py"


def test_python_operators_give_the_same_by_kernel_for_every_layout(ask, fake_gpu, rowwise_kernels, short_path):
    answer = ask("layouts", fake_gpu.kernels, rowwise_kernels, short_path, script=OPERATORS)
    assert answer["wrong"] == [] and answer["count"] > 2000
    # An asymmetric scale of a whole tensor has no kernel. DLPack does not tell that memory is negated.
    assert answer["unserved"].keys() == {"tensor", "a row", "no rows, expanded", "negated"}, answer["unserved"]
    assert answer["unserved"]["a row"] == ["static rows of the channels"]  # which needs two dimensions


def test_python_operators_write_the_same_by_kernel_wherever_outputs_lie(ask, fake_gpu, rowwise_kernels, short_path):
    assert ask("written", fake_gpu.kernels, rowwise_kernels, short_path, script=OPERATORS) == {"wrong": []}


def test_python_operators_give_the_same_under_transforms_and_the_same_errors(ask, fake_gpu, rowwise_kernels, short_path):
    assert ask("transforms", fake_gpu.kernels, rowwise_kernels, short_path, script=OPERATORS) == {"wrong": []}


def test_torch_operations_serve_where_no_kernel_is_built_and_a_warning_says_so_once(ask, fake_gpu, short_path):
    answer = ask("unbuilt", fake_gpu.kernels, short_path, script=OPERATORS)
    assert answer["right"] == [True] * 4 and answer["served"] and not any(answer["served"])
    assert len(answer["warnings"]) == 2 and all(text.startswith("row-wise operators run as torch operations") for text in answer["warnings"])


def test_int8_linear_in_one_call_has_the_bits_of_the_two_functions(ask, fake_gpu, rowwise_kernels, short_path):
    answer = ask("linear", fake_gpu.kernels, rowwise_kernels, short_path, script=OPERATORS)
    assert answer["wrong"] == [] and answer["count"] > 100 and answer["computed"] == []


def test_torch_operations_serve_more_and_longer_rows_than_the_core_takes(ask, fake_gpu, rowwise_kernels, short_path):
    assert ask("too_long", fake_gpu.kernels, rowwise_kernels, short_path, script=OPERATORS) == [True, True, True]
