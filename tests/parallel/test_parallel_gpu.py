"""Parallelism on GPUs: one process with NCCL, two on one GPU with gloo, which sends through the host, and a process for each GPU with NCCL. The
checks are in `gpu_checks`."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from test_parallel import run_ranks

pytestmark = pytest.mark.gpu
CHECKS = [
    "gpu_checks:linear_layers_have_the_bits_of_a_cpu",
    "gpu_checks:gathered_inputs_have_the_bits_of_a_cpu",
    "gpu_checks:gathered_rows_with_a_nan_arrive",
    "gpu_checks:rows_with_a_nan_arrive_on_every_rank",
    "gpu_checks:a_descriptor_has_the_bits_of_a_cpu",
    "gpu_checks:experts_have_the_bits_of_a_cpu",
    "gpu_checks:models_have_the_bits_of_one_process",
]


@pytest.mark.parametrize("backend, size", [("nccl", 1), ("gloo", 2), ("nccl", "all")])
@pytest.mark.parametrize("name", CHECKS)
def test_every_rank_has_the_bits_of_one_process(name, backend, size, tmp_path):
    if size == "all" and (size := torch.cuda.device_count()) < 2:
        pytest.skip("needs two GPUs")
    if "models" in name and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers")
    assert run_ranks(size, [name], tmp_path, backend)[name] == [""] * size
