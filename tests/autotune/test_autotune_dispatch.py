"""A tuned table serves the GPU model that it was measured on, and no other."""

from __future__ import annotations

import types

import pytest
import torch

import scaled_mm
from scaled_mm.autotune.write import tuned_table, write_table
from scaled_mm.cli import main
from scaled_mm.core import binding
from scaled_mm.jit import codegen, dispatch, library, toolchain
from scaled_mm.kernels.sections import OTHER_SECTIONS
from scaled_mm.tables import Bucket, TableError, load_table, loader, tuned

WINNER = "c3x_64x32x256_pp_swap"
TUNED = Bucket(m=16, m_min=9, n=4096, n_min=4096, k=4096, k_min=4096, kernel=WINNER)


@pytest.fixture
def configs(tmp_path, monkeypatch):
    """A folder of tables with one that is tuned for an H200, where 16 x 4096 x 4096 takes another row than in sm90.yaml."""
    for path in loader.configs_dir().glob("sm*.yaml"):
        (tmp_path / path.name).write_text(path.read_text())
    for module in (loader, tuned):
        monkeypatch.setattr(module, "configs_dir", lambda: tmp_path)
    monkeypatch.setattr("scaled_mm.tables.configs_dir", lambda: tmp_path)
    base = load_table("sm90")
    write_table(tuned_table(base, "NVIDIA H200", base.rows, [TUNED]), tmp_path / "tuned" / "h200.yaml", ["a test"])
    return tmp_path


@pytest.fixture
def machine(monkeypatch):
    """`machine(("NVIDIA H200", 9, 0), ...)`: what torch says of this machine's GPUs."""

    def have(*gpus):
        found = [types.SimpleNamespace(name=name, major=major, minor=minor) for name, major, minor in gpus]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(found))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found[index])

    monkeypatch.setattr(toolchain, "find_nvcc", lambda: "an nvcc")
    monkeypatch.setattr(toolchain, "find_cutlass", lambda: "headers")
    return have


H200, H100, L40S = ("NVIDIA H200", 9, 0), ("NVIDIA H100 80GB HBM3", 9, 0), ("NVIDIA L40S", 8, 9)


def test_the_gpu_that_a_table_was_tuned_on_gets_it(configs, machine):
    machine(H200, L40S, H200)
    table = dispatch.machine_table("sm90")
    assert table.tuned and table.gpu == "NVIDIA H200" and table.select(16, 4096, 4096).row.name == WINNER
    assert table.select(4096, 8192, 8192).row == load_table("sm90").select(4096, 8192, 8192).row
    assert not dispatch.machine_table("sm89").tuned and not dispatch.machine_table("sm80").tuned


@pytest.mark.parametrize("gpus", [(), (H100,), (L40S,), (H200, H100)], ids=["no GPU", "another model", "another architecture", "two models"])
def test_every_other_machine_gets_the_architectures_table(configs, machine, gpus):
    machine(*gpus)
    assert dispatch.machine_table("sm90") == load_table("sm90")


def test_the_other_rows_of_the_architecture_can_still_be_asked_for_by_name(configs, machine):
    machine(H200)
    path = configs / "tuned" / "h200.yaml"  # as an earlier version wrote them: the rows of its buckets alone
    base = load_table("sm90")
    old = load_table(path).model_copy(update=dict(rows=(base.row(WINNER), base.row(base.fallback)), times={}, buckets=(Bucket(kernel=WINNER),)))
    write_table(old, path, [])
    assert [row.name for row in dispatch.machine_table("sm90").rows] == [WINNER, "generic_64x64x64"]
    table = dispatch.callable_table("sm90")
    assert {row.name for row in table.rows} == {row.name for row in base.rows} and table.buckets == (Bucket(kernel=WINNER),)


def test_without_nvcc_a_tuned_table_needs_a_library_of_its_own(configs, machine, monkeypatch):
    machine(H200)
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    monkeypatch.setattr(library, "arch_library", lambda table: None)
    with pytest.warns(UserWarning, match="h200.yaml is not used: no library was built from it"):
        assert not dispatch.machine_table("sm90").tuned
    monkeypatch.setattr(library, "arch_library", lambda table: "a library" if table.tuned else None)
    assert dispatch.machine_table("sm90").tuned


def test_a_table_of_another_version_serves_and_says_so(configs, machine):
    machine(H200)
    path = configs / "tuned" / "h200.yaml"
    text = path.read_text()
    assert f"version: {scaled_mm.__version__}\n" in text
    path.write_text(text.replace(f"version: {scaled_mm.__version__}", "version: 0.0.7"))
    with pytest.warns(UserWarning, match="h200.yaml was measured with scaled_mm 0.0.7, this is"):
        assert dispatch.machine_table("sm90").tuned


def test_a_file_for_another_gpu_than_its_name_says_is_refused_with_a_warning_and_the_architectures_table_serves(configs, machine):
    machine(H200)
    path = configs / "tuned" / "h200.yaml"
    path.write_text(path.read_text().replace("gpu: NVIDIA H200", "gpu: NVIDIA H20"))
    message = "h200.yaml: gpu: expected 'NVIDIA H200' in the table tuned for NVIDIA H200, got 'NVIDIA H20'"
    with pytest.raises(TableError, match=message):
        tuned.load_tuned("sm90", [H200[0]])
    with pytest.warns(UserWarning, match=f"{message}.*The tuned table is not used, the table of sm90 is; `scaled-mm autotune` writes a new one"):
        assert dispatch.machine_table("sm90") == load_table("sm90")


def test_a_tuned_table_of_an_earlier_version_is_named_with_its_old_keys_and_the_architectures_table_serves(configs, machine):
    machine(H200)
    path = configs / "tuned" / "h200.yaml"
    path.write_text(path.read_text().replace("family:", "generation:"))
    with pytest.raises(TableError) as caught:
        load_table(path)
    assert {problem.reason for problem in caught.value.problems} == {"renamed to family"}
    with pytest.warns(UserWarning, match=r"h200.yaml.*generation: renamed to family \(and .* more: `scaled-mm table check --table .*h200.yaml`\)"):
        assert dispatch.machine_table("sm90") == load_table("sm90")


def test_a_warning_of_a_tuned_table_comes_once(configs, machine, recwarn):
    machine(H200)
    path = configs / "tuned" / "h200.yaml"
    path.write_text(path.read_text() + "block: {}\n")
    for _ in range(3):
        assert dispatch.machine_table("sm90") == load_table("sm90")
    assert len([one for one in recwarn if "block: renamed to gguf" in str(one.message)]) == 1


def test_the_core_is_given_the_tuned_table_and_its_name(configs, machine, monkeypatch):
    machine(H200)
    seen = []
    monkeypatch.setattr(binding, "call", lambda name, *arguments: seen.append((name, arguments)))
    monkeypatch.setattr(library, "arch_library", lambda table: f"library of {table.source}" if table.tuned else None)
    binding._provide("sm90", None, -1)
    registered = {argument[0]._obj.kind: argument[0]._obj for name, argument in seen if name == "scaledMMRegisterTable"}
    assert (registered[0].source, registered[0].tuned) == (b"tuned/h200.yaml", 1)
    assert registered[1].tuned == registered[2].tuned == 0  # grouped and block-scaled products were not measured
    assert seen[-1] == ("scaledMMLoadKernels", (f"library of {configs}/tuned/h200.yaml".encode(),))


def test_a_library_built_from_a_tuned_table_names_it_and_calls_only_its_products_tuned(configs):
    text = codegen.library_source("sm90", [], load_table(configs / "tuned" / "h200.yaml"))
    assert text.count('"tuned/h200.yaml (built in)"') == 1 and text.count('"sm90.yaml (built in)"') == len(OTHER_SECTIONS)
    assert library._arch_key(load_table(configs / "tuned" / "h200.yaml")) != library._arch_key(load_table("sm90"))


def test_table_explain_says_which_table_serves_this_machine(configs, machine, capsys):
    machine(H200)
    assert main(["table", "explain", "16", "4096", "4096"]) == 0
    assert "  table   tuned on NVIDIA H200\n" in (shown := capsys.readouterr().out) and WINNER in shown
    machine()
    assert main(["table", "explain", "16", "4096", "4096"]) == 0
    assert "  table   not tuned\n" in capsys.readouterr().out
