"""Where numbers come from: nvidia-smi, the commit, names of report folders."""

import torch

from scaled_mm.measure.environment import git_state, parse_smi, query_smi
from scaled_mm.tables.tuned import slug


def test_nvidia_smi_output_is_read_field_by_field():
    reading = parse_smi("580.1, 1980, 3201, 1980, 120.55, 700.00, [N/A]\n")
    assert reading.status == "read"
    assert reading.number("clocks.mem") == 3201 and reading.number("power.draw") == 120.55
    assert reading.number("temperature.gpu") is None
    assert parse_smi("No devices were found").status.startswith("nvidia-smi answered 'No devices")
    assert parse_smi("").values == {}


def test_a_cpu_has_no_nvidia_smi_reading():
    assert query_smi(torch.device("cpu")).status == "no GPU"


def test_report_folders_have_plain_names():
    assert slug("NVIDIA H100 80GB HBM3") == "h100-80gb-hbm3"
    assert slug("AMD EPYC 9654 96-Core") == "amd-epyc-9654-96-core"
    assert slug("***") == "unknown"


def test_a_folder_without_a_repository_has_no_commit(tmp_path):
    assert git_state(tmp_path) == (None, None)
