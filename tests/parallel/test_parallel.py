"""Tensor parallelism over gloo, 2, 3 and 4 processes on a CPU: the bits of one process. The checks are in `parallel_checks`; each group of processes
runs all of them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import parallel_checks
import pytest

import scaled_mm as sm
from scaled_mm import parallel

WORKER = Path(__file__).with_name("worker.py")
CHECKS = [
    "row_parallel_has_the_bits_of_one_process",
    "modules_have_the_bits_of_one_process",
    "an_mlp_has_the_bits_of_one_process",
    "numbers_that_are_not_finite_arrive_on_every_rank",
    "the_usual_way_depends_on_the_number_of_ranks",
    "what_differs_between_ranks_is_refused_on_all",
    "parts_of_rows_are_checked",
    "models_that_cannot_be_split_are_refused",
    "a_whole_model_has_the_bits_of_one_process",
]
OF_MODELS = CHECKS[-2:]


def start(size: int, names: list[str], folder: Path) -> list[subprocess.Popen]:
    command = [sys.executable, str(WORKER)]
    return [
        subprocess.Popen([*command, str(rank), str(size), str(folder), ",".join(names)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for rank in range(size)
    ]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(size, check) -> what each rank raised, "" for nothing; None for a check after a failed one."""
    have_models = True
    try:
        import transformers  # noqa: F401
    except ImportError:
        have_models = False
    names = [name for name in CHECKS if have_models or name not in OF_MODELS]
    found = {}
    for size in (2, 3, 4):
        folder = tmp_path_factory.mktemp(f"ranks{size}")
        errors = [process.communicate(timeout=300)[1] for process in start(size, names, folder)]
        for rank in range(size):
            path = folder / f"{rank}.json"
            of_rank = json.loads(path.read_text()) if path.exists() else {names[0]: errors[rank][-2000:]}
            for name in names:
                found.setdefault((size, name), []).append(of_rank.get(name))
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_every_rank_agrees(results, name, size):
    if (size, name) not in results:
        pytest.skip("needs transformers")
    assert hasattr(parallel_checks, name)
    assert results[size, name] == [""] * size, "\n".join(map(str, results[size, name]))


def test_a_rank_that_dies_ends_the_others_with_an_error_before_the_timeout(tmp_path):
    begin = time.monotonic()
    processes = start(3, ["one_rank_raises_alone"], tmp_path)
    for process in processes:
        process.communicate(timeout=50)
    assert time.monotonic() - begin < 50 and processes[1].returncode == 7
    for rank in (0, 2):
        assert "RuntimeError" in json.loads((tmp_path / f"{rank}.json").read_text())["one_rank_raises_alone"]


def test_without_a_group_the_argument_is_named():
    with pytest.raises(sm.BadParamError, match="group: expected an initialized torch.distributed"):
        parallel.parallelize_(None)


@pytest.mark.parametrize("rows, size, counts", [(7, 3, [3, 3, 1]), (2, 4, [1, 1, 0, 0]), (0, 2, [0, 0]), (8, 4, [2, 2, 2, 2])])
def test_rows_are_divided_in_order(rows, size, counts):
    parts = [parallel.rows_of(rows, rank, size) for rank in range(size)]
    assert [part.stop - part.start for part in parts] == counts and [row for part in parts for row in range(part.start, part.stop)] == [*range(rows)]
