"""The C core on a machine that pretends to have a GPU: dispatch, launches and errors, without one.

What a launch is handed is computed with by plain loops (host_kernels.cpp) and compared with the reference, so a wrong stride,
broadcast or zero-point term is a wrong number here as it would be on a GPU.
"""

from __future__ import annotations

import json

import pytest
from fake_gpu import host_library

from scaled_mm.jit.provide import When
from scaled_mm.kernels.gpu import typical
from scaled_mm.tables import available_tables, load_table

TABLE = load_table("sm90")
DISPATCH = ("dispatch", "forced", "providers", "broken", "workspaces")  # what fake_gpu_dispatch.py answers


@pytest.fixture
def ask(fake_gpu):
    """ask(function, ...): the answer of a function of fake_gpu_script or fake_gpu_dispatch, from a process of its own."""

    def ask(function: str, *arguments, **variables: str):
        script = "fake_gpu_dispatch.py" if function in DISPATCH else "fake_gpu_script.py"
        done = fake_gpu.python(function, *arguments, script=script, **variables)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout)

    return ask


def test_every_layout_is_launched_with_what_gives_the_bits_of_the_reference(ask, fake_gpu):
    answer = ask("products", fake_gpu.kernels, 3000, 1)
    assert sum(answer["rows"].values()) == 3000
    assert 500 < answer["fallbacks"] < 2900 and len(answer["rows"]) > 2, answer


def test_every_batch_is_launched_once_with_what_gives_the_bits_of_the_reference(ask, fake_gpu):
    answer = ask("batches", fake_gpu.kernels, 2500, 1)
    assert answer["fast"] > 200 and answer["several"] > 100, answer


def test_a_kernel_may_read_b_early_only_where_the_caller_says_that_it_is_constant(ask, fake_gpu):
    assert ask("constant_weights", fake_gpu.kernels) == {"True": True, "False": False}


def test_a_batch_is_dispatched_as_one_product_of_a_shared_weight_or_as_what_it_is(ask, fake_gpu):
    answer = ask("batch_choices", fake_gpu.kernels)
    one, three = {"a shared weight": (300, 1)}, (100, 3)  # one product of B * M rows, or B products
    apart = ["own weights", "a shared weight, rows apart", "a shared weight, biases apart", "zero points", "zero points of a shared b"]
    models = {row.name: TABLE.time_model(row) for row in TABLE.rows if row.name != TABLE.fallback}
    for name, (M, count) in {**one, **dict.fromkeys(apart, three), "65535": (1, 65535)}.items():
        (row, reason, _), bucket = answer[name], TABLE.select(M, 64 * count, 128).bucket_index
        fastest = min(models, key=lambda name: models[name].us(M, 64, 128, typical("sm90"), count, constant_b=False))  # noqa: B023
        assert row == fastest and reason.startswith(f"bucket {bucket} of") and "cannot" not in reason, name
    assert answer["no matrices"][0] == TABLE.fallback and answer["no matrices"][1].endswith("; there is nothing to compute")
    assert answer["many own weights"][0] != answer["many, a shared weight"][0] and answer["65535"][0] != TABLE.select(1, 64, 128).row.name
    assert answer["own weights"][2] == 0
    assert answer["zero points"][2] == 8 * 3 * (100 + 64)
    assert answer["zero points of a shared b"][2] == 8 * (3 * 100 + 64)  # the column sums are there once
    for name, why in {
        "batch stride of a": "the batch stride of a is not a multiple",
        "batch stride of b": "the batch stride of b is not a multiple",
        "far apart": "a batch stride is 2^40 bytes or more",
        "65536": "the batch has more than 65535 products",
    }.items():
        row, reason, _ = answer[name]
        assert row == TABLE.fallback and why in reason, name
    assert TABLE.row(answer["batch stride of out"][0]).alignment[2] == 1  # the fastest of those that it fits
    status, message = answer["forced"]
    assert status == "BAD_PARAM" and message.endswith("cannot take this product: the batch has more than 65535 products")


def test_sums_that_are_given_take_the_place_of_reading_the_operand(ask, fake_gpu):
    assert ask("sums", fake_gpu.kernels) == {
        "a None": True,
        "a a_row_sums": True,
        "a b_column_sums": False,
        "b None": True,
        "b a_row_sums": False,
        "b b_column_sums": True,
        "ab None": True,
        "ab a_row_sums": False,
        "ab b_column_sums": False,
    }


def test_many_threads_may_use_one_descriptor(ask, fake_gpu):
    assert ask("threads", fake_gpu.kernels) == {"failed": []}


def test_the_core_and_the_table_choose_the_same_row_around_every_edge(ask, fake_gpu):
    answer = ask("dispatch", fake_gpu.kernels)
    assert answer["count"] > 500 and answer["unused"] == []
    assert answer["tuned"] > 500 and answer["tuned_unused"] == []
    assert answer["random"]["rows"] > 20
    assert answer["again"]["products"] == 600 and answer["again"]["differ"] > 100
    row, reason, bucket, named = answer["rows of out apart"]
    assert TABLE.row(row).alignment[2] == 1 and row != TABLE.fallback and bucket == named
    assert "; its row c3x_128x128x128_pp_c12_swap cannot take this product (" in reason
    assert f"; {row} is the fastest of those that can by prediction, " in reason


def test_a_forced_row_runs_or_says_why_it_cannot(ask, fake_gpu):
    answer = ask("forced", fake_gpu.kernels)
    status, message = answer.pop("unknown")
    assert status == "KERNEL_NOT_FOUND" and message.startswith("kernel: expected a row of sm90 (") and message.endswith("got c3x_1x1x1")
    reasons = {
        "unaligned K": "stride of a",
        "unaligned N": "stride of out",
        "K of zero": "K is 0",
        "end of a row": "whole vectors",
        "end of one row": "whole vectors",
        "row-major b": "b is not contiguous along K",
        **{f"pointer of {name}": f"the data pointer of {name} is not aligned" for name in ("a", "b", "out")},
    }
    assert answer.keys() == reasons.keys()
    for name, (status, message) in answer.items():
        assert status == "BAD_PARAM" and "cannot take this product: " in message and reasons[name] in message, message


def test_a_provider_is_asked_for_what_is_missing_and_its_error_is_the_callers(ask, fake_gpu):
    answer = ask("providers", fake_gpu.kernels)
    row = TABLE.select(1, 16, 16).row.name
    assert answer["table refused"] == ["KERNEL_NOT_BUILT", "no None for sm90"]
    assert answer["asked for table"] == ["sm90", None, -1, When.NOW]
    status, message = answer["no table"]
    assert status == "ARCHITECTURE_NOT_SUPPORTED" and "scaled-mm build --arch sm90" in message
    assert answer["asked when all is there"] == []
    for name in ("no kernel", "without a provider"):
        status, message = answer[name]
        assert status == "KERNEL_NOT_BUILT" and row in message and "float16" in message and "scaled-mm build" in message
    others = {each.name for each in TABLE.rows} - {row, TABLE.fallback}
    first, *built, fallback, last = answer["asked for kernel"]
    assert first == ["sm90", row, 2, When.LATER] and last == ["sm90", TABLE.fallback, 2, When.NOW]
    assert {each[1] for each in built} == others and {each[3] for each in (*built, fallback)} == {When.BUILT} and fallback[1] == TABLE.fallback
    assert answer["kernel refused"] == ["KERNEL_NOT_BUILT", f"no {TABLE.fallback} for sm90"]
    assert answer["asked for an empty product"] == []
    assert answer["own table"] == "KERNEL_NOT_BUILT"
    assert answer["asked for the rest"][:2] == [
        ["sm_other", None, -1, When.NOW],
        ["sm_other", TABLE.fallback, 3, When.LATER],
    ]  # no times without a GPU


BROKEN = """\
BROKEN_KERNEL(scaled_mm_kernel_too_large_fp32, "too_large", 1 << 20, prepare, launch_fails)
BROKEN_KERNEL(scaled_mm_kernel_prepare_fails_fp32, "prepare_fails", 0, prepare_fails, launch_fails)
BROKEN_KERNEL(scaled_mm_kernel_launch_fails_fp32, "launch_fails", 0, prepare, launch_fails)"""


def test_kernels_and_workspaces_that_do_not_do_are_errors_with_their_reason(ask, tmp_path):
    """The rows of the library are in its table too, by another architecture's name."""
    generic = TABLE.row(TABLE.fallback)
    rows = [generic, *(generic.model_copy(update={"name": name}) for name in ("too_large", "prepare_fails", "launch_fails"))]
    bucket = TABLE.buckets[-1].model_copy(update={"kernel": generic.name})
    table = TABLE.model_copy(update={"arch": "sm_broken", "rows": (generic,), "buckets": (bucket,)})
    full = table.model_copy(update={"rows": tuple(rows)})
    answer = ask("broken", host_library(tmp_path / "broken", table, BROKEN, index_table=full))
    status, message = answer["too large"]
    assert status == "ARCHITECTURE_NOT_SUPPORTED" and "too_large needs 1048576 bytes of shared memory" in message
    assert answer["prepare"] == ["CUDA_ERROR", "kernel: row prepare_fails cannot run on device 0: no code for device 0"]
    assert answer["launch"] == ["CUDA_ERROR", "launch of launch_fails on device 0: the launch was too much"]
    assert answer["no workspace"] == ["INSUFFICIENT_WORKSPACE", f"workspace: expected at least {answer['size']} bytes, got 0"]
    assert answer["small workspace"][0] == "INSUFFICIENT_WORKSPACE" and f"got {answer['size'] - 1}" in answer["small workspace"][1]
    assert answer["unaligned workspace"][0] == "BAD_TENSOR_ALIGNMENT"
    assert answer["workspace"] == ["SUCCESS", ""] and answer["not written"]


def test_a_kernel_gets_the_workspace_it_asks_for_beside_the_zero_point_terms(ask, tmp_path):
    generic = TABLE.row(TABLE.fallback)
    bucket = TABLE.buckets[-1].model_copy(update={"kernel": generic.name})
    table = TABLE.model_copy(update={"arch": "sm_broken", "rows": (generic,), "buckets": (bucket,)})
    full = table.model_copy(update={"rows": (generic, generic.model_copy(update={"name": "with_workspace"}))})
    entry = 'WORKSPACE_KERNEL(scaled_mm_kernel_with_workspace_fp32, "with_workspace")'
    plain, with_terms = ask("workspaces", host_library(tmp_path / "workspace", table, entry, index_table=full))
    own = 8 * 3 * 15 + 4
    assert plain["size"] == own and with_terms["size"] == 160 + own  # 8 * (4 + 15) bytes of terms, up to a multiple of 16
    for answer in (plain, with_terms):
        assert answer["right"]
        assert answer["missing"] == ["INSUFFICIENT_WORKSPACE", f"workspace: expected at least {answer['size']} bytes, got 0"]
        assert answer["small"] == ["INSUFFICIENT_WORKSPACE", f"workspace: expected at least {answer['size']} bytes, got {answer['size'] - 1}"]


@pytest.fixture
def device(c_program, fake_gpu):
    """device(index, arch, **variables of the driver): what the C program of that name prints, of an error too."""

    def device(*arguments, **variables: str) -> str:
        done = fake_gpu.run([c_program("device"), *arguments], **variables)
        assert done.returncode == (1 if done.stderr else 0)
        return (done.stderr or done.stdout).strip()

    return device


SERVED = [(int(served.removeprefix("sm")), arch) for arch, _ in available_tables() for served in load_table(arch).serves]


@pytest.mark.parametrize("capability, arch", SERVED)
def test_a_gpu_has_the_table_that_says_it_serves_it(device, capability, arch):
    said = device(FAKE_COMPUTE_CAPABILITY=str(capability))
    assert said == f"{arch} {capability} 132 232448", "kServed in csrc/core/arch.cpp differs from `serves` of the tables"


@pytest.mark.parametrize(
    "capability, arch", [(76, "sm75"), (81, "sm80"), (91, "sm89"), (101, "sm100"), (122, "sm120"), (130, "sm120"), (200, "sm120")]
)
def test_a_gpu_that_no_table_knows_has_that_of_the_newest_whose_code_it_runs(device, capability, arch):
    assert device(FAKE_COMPUTE_CAPABILITY=str(capability)) == f"{arch} {capability} 132 232448"


@pytest.mark.parametrize("name, arch", [("sm75", "sm75"), ("sm80", "sm80"), ("sm86", "sm89"), ("sm87", "sm80"), ("sm89", "sm89"), ("sm90", "sm90")])
def test_an_older_architecture_may_be_forced_by_argument_and_by_environment(device, name, arch):
    assert device("0", name) == f"{arch} 90 132 232448"
    assert device(SCALED_MM_ARCH=name) == f"{arch} 90 132 232448"
    assert device("0", "sm75", SCALED_MM_ARCH=name) == "sm75 90 132 232448"  # the argument comes first


def test_an_empty_variable_forces_nothing(device):
    assert device(SCALED_MM_ARCH="") == "sm90 90 132 232448"


@pytest.mark.parametrize(
    "capability, name, needs",
    [
        (90, "sm100", "10.0 or newer"),
        (90, "sm121", "12.0 or newer"),
        (80, "sm89", "8.6 or newer"),
        (75, "sm80", "8.0 or newer"),
        (100, "sm90", "9.0 and no other"),
        (89, "sm90", "9.0 and no other"),
    ],
)
def test_an_architecture_whose_code_the_device_cannot_run_is_refused(device, capability, name, needs):
    have = f"{capability // 10}.{capability % 10}"
    for origin, answer in (
        ("arch", device("0", name, FAKE_COMPUTE_CAPABILITY=str(capability))),
        ("SCALED_MM_ARCH", device(FAKE_COMPUTE_CAPABILITY=str(capability), SCALED_MM_ARCH=name)),
    ):
        assert answer == (
            f"ARCHITECTURE_NOT_SUPPORTED: {origin}: expected an architecture whose kernels device 0 of compute capability {have} "
            f"can run, got {name}, which needs {needs}"
        )


def test_an_architecture_before_turing_cannot_be_forced(device):
    assert device("0", "sm70") == "ARCHITECTURE_NOT_SUPPORTED: arch: expected sm75 or newer, got sm70"


def test_a_table_of_any_other_name_may_be_named(device):
    assert device("0", "sm_other") == "sm_other 90 132 232448"


def test_a_device_that_is_too_old_or_not_there_is_a_typed_error(device):
    too_old = "ARCHITECTURE_NOT_SUPPORTED: device: expected compute capability 7.5 (Turing) or newer, got 7.0 on device 0"
    assert device(FAKE_COMPUTE_CAPABILITY="70") == too_old
    assert device("3") == "DEVICE_NOT_SUPPORTED: device: expected one of 1 CUDA devices, got index 3"
    assert device("0", FAKE_DEVICES="0") == "DEVICE_NOT_SUPPORTED: device: expected one of 0 CUDA devices, got index 0"
    assert device(FAKE_CUINIT="100") == "DEVICE_NOT_SUPPORTED: device: expected a CUDA GPU, the driver's cuInit answered error 100"
    assert device("100", FAKE_DEVICES="200") == "DEVICE_NOT_SUPPORTED: device: expected an index below 64, got 100"
    for name in ("a_name_that_is_far_too_long", ""):
        assert device("0", name) == f"BAD_PARAM: arch: expected the name of a tile table such as sm90, got {name}".strip()
