"""Tensor parallelism over gloo, 2, 3 and 4 processes on a CPU: the bits of one process. The checks are in `linear_checks`, `expert_checks` and
`model_checks`; each group of processes runs all of them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import scaled_mm as sm
from scaled_mm import parallel

WORKER = Path(__file__).with_name("worker.py")
CHECKS = [
    "linear_checks:row_parallel_has_the_bits_of_one_process",
    "linear_checks:modules_have_the_bits_of_one_process",
    "linear_checks:gathered_inputs_have_the_bits_of_one_process",
    "linear_checks:column_parallel_layers_of_a_divided_input_have_the_bits_of_one_process",
    "linear_checks:rows_that_are_not_finite_are_gathered",
    "linear_checks:wrong_gathers_are_refused_on_all",
    "linear_checks:columns_are_gathered",
    "linear_checks:a_descriptor_has_the_bits_of_one_process",
    "linear_checks:wrong_descriptors_are_refused_on_all",
    "linear_checks:rows_are_gathered",
    "linear_checks:an_mlp_has_the_bits_of_one_process",
    "linear_checks:numbers_that_are_not_finite_arrive_on_every_rank",
    "linear_checks:the_usual_way_depends_on_the_number_of_ranks",
    "linear_checks:what_differs_between_ranks_is_refused_on_all",
    "linear_checks:parts_of_rows_are_checked",
    "linear_checks:layers_can_be_copied_but_not_pickled",
    "linear_checks:outputs_of_other_rows_are_not_gathered",
    "linear_checks:arguments_that_change_the_collectives_must_be_the_same",
    "expert_checks:experts_have_the_bits_of_one_process",
    "expert_checks:odd_sizes_and_strides_of_experts",
    "expert_checks:infinite_results_of_experts_arrive",
    "expert_checks:wrong_experts_are_refused_on_all",
    "model_checks:a_whole_model_has_the_bits_of_one_process",
    "model_checks:mixtures_have_the_bits_of_one_process",
    "model_checks:feed_forward_networks_are_split_alone",
    "model_checks:models_that_cannot_be_split_are_refused",
    "model_checks:checkpoints_are_read_in_parts",
    "model_checks:checkpoints_that_cannot_be_split_are_refused_on_all",
]
SLOW = ("mixtures_have_the_bits_of_one_process", "checkpoints_are_read_in_parts", "checkpoints_that_cannot_be_split_are_refused_on_all")
RUNS = [(size, name) for size in (2, 3, 4) for name in CHECKS if size < 4 or not name.endswith(SLOW)]
RUNS.append((2, "model_checks:compiled_models_have_the_bits_of_eager_ones"))
RUNS.append((8, "model_checks:feed_forward_networks_are_split_alone"))


def start(size: int, names: list[str], folder: Path, backend: str = "gloo", together: bool = False) -> list[subprocess.Popen]:
    """The processes of a group; together: the one that forks them. What they write to stderr is in `folder`."""
    command = [sys.executable, str(WORKER)]
    found = []
    for rank in ["all"] if together else range(size):
        with (folder / f"{rank}.err").open("w") as errors:
            arguments = [*command, str(rank), str(size), str(folder), ",".join(names), backend]
            found.append(subprocess.Popen(arguments, stdout=errors, stderr=errors, start_new_session=together))
    return found


def wait(processes: list[subprocess.Popen], seconds: float) -> None:
    """Waits for all, and leaves none behind."""
    end = time.monotonic() + seconds
    try:
        for process in processes:
            process.wait(max(0.1, end - time.monotonic()))
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL) if os.getpgid(process.pid) == process.pid else process.kill()
            process.wait()


def run_ranks(size: int, names: list[str], folder: Path, backend: str = "gloo") -> dict[str, list[str | None]]:
    """Check -> what each rank raised, "" for nothing; None for a check after a failed one."""
    wait(start(size, names, folder, backend, together=backend == "gloo" and not torch.cuda.is_available()), 600)
    found: dict[str, list[str | None]] = {name: [] for name in names}
    for rank in range(size):
        path = folder / f"{rank}.json"
        of_rank = json.loads(path.read_text()) if path.exists() else {name: (folder / f"{rank}.err").read_text()[-2000:] for name in names[:1]}
        for name in names:
            found[name].append(of_rank.get(name))
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(size, check) -> what each rank raised: see `run_ranks`."""
    have_models = importlib.util.find_spec("transformers") is not None
    found = {}
    for size in sorted({size for size, _ in RUNS}):
        names = [name for of, name in RUNS if of == size and (have_models or not name.startswith("model_checks"))]
        raised = run_ranks(size, names, tmp_path_factory.mktemp(f"ranks{size}"))
        found |= {(size, name): errors for name, errors in raised.items()}
    return found


@pytest.mark.parametrize("size, name", RUNS)
def test_every_rank_agrees(results, name, size):
    if (size, name) not in results:
        pytest.skip("needs transformers")
    assert results[size, name] == [""] * size, "\n".join(map(str, results[size, name]))


def test_a_rank_that_dies_ends_the_others_with_an_error_before_the_timeout(tmp_path):
    processes = start(3, ["linear_checks:one_rank_exits"], tmp_path)
    wait(processes, 300)
    ended = time.time()
    assert processes[1].returncode == 7 and ended - (tmp_path / "exit").stat().st_mtime < 50  # the group's timeout is 60 s
    for rank in (0, 2):
        assert "RuntimeError" in json.loads((tmp_path / f"{rank}.json").read_text())["linear_checks:one_rank_exits"]


def test_without_a_group_the_argument_is_named():
    with pytest.raises(sm.BadParamError, match="group: expected an initialized torch.distributed"):
        parallel.parallelize_(None)


@pytest.mark.parametrize("layer", [parallel.RowParallelInt8Linear(8, 4), parallel.ExpertParallelInt8Experts(2, 8, 4)])
def test_a_layer_that_from_shard_has_not_made_says_so(layer):
    x = torch.zeros(3, 8), torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3, 1)
    with pytest.raises(sm.BadParamError, match=f"group: expected a {type(layer).__name__} made by from_shard"):
        layer(*x[: 1 if isinstance(layer, parallel.RowParallelInt8Linear) else 3])


@pytest.mark.parametrize("rows, size, counts", [(7, 3, [3, 3, 1]), (2, 4, [1, 1, 0, 0]), (0, 2, [0, 0]), (8, 4, [2, 2, 2, 2])])
def test_rows_are_divided_in_order(rows, size, counts):
    parts = [parallel.part_of(rows, rank, size) for rank in range(size)]
    assert [part.stop - part.start for part in parts] == counts and [row for part in parts for row in range(part.start, part.stop)] == [*range(rows)]
