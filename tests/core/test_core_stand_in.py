"""A plan whose kernel config is not built runs on another one at once, and takes its own when it is loaded. On the fake GPU."""

from __future__ import annotations

import json

import pytest
from fake_gpu import host_library

from scaled_mm.jit.provide import When
from scaled_mm.tables import TileTable, load_table

TABLE = load_table("sm90")
SELECTED = TABLE.select(16, 64, 128)
GROUPED = TABLE.grouped.select(6, 16, 32)
FLOAT32 = 4


def only(table: TileTable, *names: str) -> TileTable:
    """The table with these kernel configs alone, for a library; it is not valid."""
    sections = {
        name: None if section is None else section.model_copy(update={"rows": tuple(row for row in section.rows if row.name in names)})
        for name, section in (("grouped", table.grouped), ("block_scaled", None), ("gguf", None))
    }
    return table.model_copy(update={"rows": tuple(row for row in table.rows if row.name in names), **sections})


@pytest.fixture(scope="module")
def library_of(tmp_path_factory):
    """library_of(names...): a library with these kernel configs of sm90, and its tables."""
    folder, made = tmp_path_factory.mktemp("stand_in"), {}

    def library_of(*names: str):
        if names not in made:
            made[names] = host_library(folder / str(len(made)), only(TABLE, *names), index_table=TABLE)
        return made[names]

    return library_of


@pytest.fixture(scope="module")
def starter(library_of):
    return library_of(TABLE.fallback, TABLE.grouped.fallback)


@pytest.fixture(scope="module")
def better(library_of):
    return library_of(SELECTED.row.name, GROUPED.row.name)


@pytest.fixture
def ask(fake_gpu):
    def ask(function: str, *arguments, **variables: str):
        done = fake_gpu.python(function, *arguments, script="fake_gpu_stand_in.py", **variables)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout)

    return ask


def test_a_plan_runs_at_once_and_takes_its_kernel_when_another_thread_has_loaded_it(ask, starter, better):
    answer, selected = ask("switch", starter, better), SELECTED.row.name
    row, waits_for, reason = answer["before"]
    assert (row, waits_for) == (TABLE.fallback, selected) and reason.startswith(f"bucket {SELECTED.bucket_index} of ")
    assert reason.endswith(f"; {selected} is not built yet, so {TABLE.fallback} runs until it is loaded")
    assert answer["asked"][0] == ["sm90", selected, FLOAT32, When.LATER] and {each[3] for each in answer["asked"][1:]} == {When.BUILT}
    for choice, state in zip(answer["in Python"], ("", f"; {selected} is being compiled", f"; {selected} could not be compiled: no compiler")):
        assert choice == {"row": row, "reason": reason + state, "bucket": SELECTED.bucket_index, "tuned": False, "better": selected}
    assert answer["asked again"] == 0, "a provider is asked once for each kernel, not in every call"
    assert answer["right"] == [True] * 3 and answer["right after"] and answer["right again"]
    status, message = answer["odd pointer"]
    assert status == "BAD_TENSOR_ALIGNMENT" and message.startswith("a: "), "a pointer must suit the kernel that may take over"
    assert answer["loaded"] == ["SUCCESS", ""] and answer["launches"] == [0, 2]
    assert (answer["cache of the stand-in"], answer["own cache"]) == (False, True)
    row, waits_for, reason = answer["after"]
    assert (row, waits_for) == (selected, None) and f" of sm90.yaml (built in); {selected} is the fastest" in reason
    assert answer["new"] == answer["after"] and answer["new right"]


def test_a_kernel_config_that_is_named_is_asked_for_now_and_nothing_stands_in_for_it(ask, starter, better):
    answer, selected = ask("forced", starter, better), SELECTED.row.name
    assert answer["row"] == selected
    status, message = answer["missing"]
    assert status == "KERNEL_NOT_BUILT" and message.startswith(f"kernel: row {selected} of sm90 for out float32 is in no loaded library;")
    assert answer["asked"] == [["sm90", selected, FLOAT32, When.NOW]]
    assert answer["loaded"][:2] == [selected, None]


def test_a_plan_keeps_its_kernel_if_the_better_one_needs_more_workspace_than_it_announced(ask, tmp_path):
    generic = TABLE.row(TABLE.fallback)
    rows = (generic.model_copy(update={"name": "with_workspace"}), generic)
    bucket = TABLE.buckets[-1].model_copy(update={"kernel": "with_workspace"})
    table = only(TABLE, generic.name).model_copy(update={"arch": "sm_stand_in", "buckets": (bucket,), "grouped": None})
    full = table.model_copy(update={"rows": rows})
    kernels = host_library(tmp_path / "kernels", table, index_table=full)
    entry = 'WORKSPACE_KERNEL(scaled_mm_kernel_with_workspace_fp32, "with_workspace")'
    answer = ask("workspaces", kernels, host_library(tmp_path / "better", table.model_copy(update={"rows": ()}), entry, index_table=full))
    assert answer["sizes"] == [0, 8 * (3 + 1 + 15)] and answer["right"] == [True, True]
    for name in ("plain", "points"):
        row, waits_for, reason = answer[name]
        assert (row, waits_for) == (generic.name, None)
        assert reason.endswith(f"with_workspace was built later and needs a larger workspace than this plan announced, so {generic.name} stays")
    assert answer["new"][:2] == ["with_workspace", None] and answer["new size"] == 8 * 16 * 64 + 4 and answer["new right"]


def test_a_grouped_plan_announces_enough_workspace_for_the_kernel_that_is_not_there_yet(ask, starter, better):
    answer = ask("experts", starter, better)
    assert answer["before"][:2] == [TABLE.grouped.fallback, GROUPED.row.name] and answer["size"] >= 64 * 7 + 132
    assert answer["after"][:2] == [GROUPED.row.name, None] and answer["launches"] > 0


@pytest.mark.parametrize("M, N, K", [(349, 832, 43200), (675, 1344, 31616)])
def test_a_plan_announces_enough_workspace_for_a_kernel_that_divides_tiles_along_k_and_is_not_there_yet(ask, starter, M, N, K):
    row = TABLE.select(M, N, K).row
    assert row.scheduler == "stream_k"
    m, n = (N, M) if row.swap_ab else (M, N)
    tiles = -(-m // (row.tile.m * row.cluster.m)) * row.cluster.m * -(-n // (row.tile.n * row.cluster.n)) * row.cluster.n
    needed = tiles * (row.tile.m * row.tile.n * 4 + 2 * 4)  # sums, and two counters (int8/c3x/gemm.cuh)
    answer = ask("divided", starter, M, N, K)
    assert answer["said"][:2] == [TABLE.fallback, row.name] and needed <= answer["size"] <= needed + 512


def test_a_better_kernel_that_the_device_cannot_run_is_reported_once_and_not_taken(ask, tmp_path):
    generic = TABLE.row(TABLE.fallback)
    rows = (generic.model_copy(update={"name": "prepare_fails"}), generic)
    bucket = TABLE.buckets[-1].model_copy(update={"kernel": "prepare_fails"})
    table = only(TABLE, generic.name).model_copy(update={"arch": "sm_stand_in", "buckets": (bucket,), "grouped": None})
    full = table.model_copy(update={"rows": rows})
    kernels = host_library(tmp_path / "kernels", table, index_table=full)
    entry = 'BROKEN_KERNEL(scaled_mm_kernel_prepare_fails_fp32, "prepare_fails", 0, prepare_fails, launch_fails)'
    answer = ask("refused", kernels, host_library(tmp_path / "better", table.model_copy(update={"rows": ()}), entry, index_table=full))
    assert answer["loaded"] == ["CUDA_ERROR", "kernel: row prepare_fails cannot run on device 0: no code for device 0"]
    assert answer["again"] == ["SUCCESS", ""] and answer["right"] and answer["choice"][0] == generic.name


def test_the_fastest_built_kernel_config_stands_in(ask, starter, library_of):
    selected, near, *_, far = [row.name for _, row in TABLE.fastest(16, 64, 128)]
    assert selected == SELECTED.row.name
    answer = ask("nearest", starter, library_of(near), library_of(far), near, far)
    assert answer["choice"][:2] == [near, SELECTED.row.name] and answer["right"]
    assert far not in [row for _, row, _, _ in answer["asked"]] and TABLE.fallback not in [row for _, row, _, _ in answer["asked"]]


def test_threads_may_share_a_plan_while_its_kernel_is_loaded(ask, starter, better):
    assert ask("threads", starter, better) == {"failed": [], "loaded": ["SUCCESS", ""], "row": SELECTED.row.name}


# ---- the package's own provider ---------------------------------------------------------------------------------------------


def test_in_the_background_the_fallback_is_compiled_at_once_and_the_selected_kernel_beside_the_program(ask, starter, better):
    answer = ask("package", starter, better, SCALED_MM_JIT="background")
    assert answer["before"][:2] == [TABLE.fallback, SELECTED.row.name] and answer["state"] == "is being compiled"
    assert answer["after"][:2] == [SELECTED.row.name, None] and answer["right"] == [True, True]
    assert sorted(answer["compiled"]) == sorted([TABLE.fallback, SELECTED.row.name])


def test_wait_compiles_the_selected_kernel_alone(ask, starter, better):
    answer = ask("package", starter, better, SCALED_MM_JIT="wait")
    assert answer["before"] == answer["after"] and answer["before"][:2] == [SELECTED.row.name, None]
    assert answer["compiled"] == [SELECTED.row.name]


def test_off_compiles_nothing_and_says_what_to_do(ask, starter, better):
    answer = ask("package", starter, better, SCALED_MM_JIT="off")
    status, message = answer["error"]
    assert (status, answer["compiled"]) == ("KERNEL_NOT_BUILT", []) and "SCALED_MM_JIT=off" in message and "scaled-mm build --arch sm90" in message


def test_off_runs_what_is_there(ask, starter, better):
    answer = ask("package", starter, better, starter, SCALED_MM_JIT="off")
    assert answer["before"] == answer["after"] and answer["before"][:2] == [TABLE.fallback, SELECTED.row.name] and answer["state"] is None
    assert answer["right"] == [True, True] and answer["compiled"] == []
