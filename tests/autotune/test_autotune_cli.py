"""`scaled-mm autotune`, `scaled-mm report` and `scaled-mm table check --cliffs`, with stand-ins where a GPU or a compiler would be."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections import Counter
from pathlib import Path

import pytest
import torch
from autotune_data import H200, Clock, Kernels, Measurer

from scaled_mm.autotune import measure, record, tune
from scaled_mm.autotune.candidates import candidates
from scaled_mm.autotune.report import REPORT_HTML, REPORT_MD
from scaled_mm.autotune.workbench import WORKBENCHES
from scaled_mm.bench.int8.plots import NAMES
from scaled_mm.cli import autotune, main, report
from scaled_mm.jit import library
from scaled_mm.kernels.gpu import facts
from scaled_mm.kernels.sections import OF_EXPERTS, TOP_LEVEL
from scaled_mm.measure import environment as environments
from scaled_mm.measure.record import Environment
from scaled_mm.tables import check_table, load_table
from scaled_mm.tables.tuned import tuned_path

DATA = Path(__file__).parents[1] / "tables" / "data" / "h200_rows.json"
WORDS = ["--shapes", "8B_o,16x28672x4096", "--m", "1,64,2048", "--top", "4", "--seed", "3"]


def environment(device=None) -> Environment:
    return Environment(
        device="cuda:0",
        gpu="NVIDIA H200",
        arch="sm90",
        cpu="a CPU",
        platform="Linux",
        python="3.12.0",
        torch="2.11.0",
        cuda="13.0",
        driver="580.1",
        cutlass="4.2.0.0",
        scaled_mm="0.1.0",
        git_commit="0123abc",
        git_dirty=False,
        multiprocessors=132,
        memory_bytes=150_000_000_000,
        cache_bytes=60 << 20,
        sm_max_mhz=1980.0,
        power_limit_w=700.0,
        nvidia_smi="read",
    )


class FakeMeasurer(Measurer):
    """The stand-in of the process, made from the setup that the real one gets."""

    outcomes: dict[str, str] = {}

    def __init__(self, setup):
        table = given_table(setup)
        part = table if setup["section"] == "gemm" else getattr(table, setup["section"])
        super().__init__({row.name: row for row in part.rows}, Clock(), outcomes=self.outcomes, experts=setup["experts"])
        self.starts = 1

    def __enter__(self):
        return self

    def __exit__(self, *_): ...


def given_table(setup):
    from scaled_mm.tables import TileTable

    assert set(setup) == {"table", "section", "experts", "device", "budget_ms", "seed"}
    return TileTable.model_validate(json.loads(json.dumps(setup["table"])))


@pytest.fixture
def machine(monkeypatch):
    """A machine with an H200 and a compiler."""
    monkeypatch.setattr(autotune, "_gpu", lambda args: torch.device("cuda:0"))
    monkeypatch.setattr(autotune, "_own_table", lambda device: (load_table("sm90"), H200))
    monkeypatch.setattr(environments, "read_environment", environment)
    monkeypatch.setattr(library, "nvcc_and_flags", lambda arch: None)
    monkeypatch.setattr(measure, "Measurer", FakeMeasurer)
    monkeypatch.setattr(tune, "BuiltKernels", lambda table: Kernels(Clock()))
    monkeypatch.setattr(FakeMeasurer, "outcomes", {})


def call(folder: Path, *words: str) -> int:
    return main(["autotune", *WORDS, "--out", str(folder), "--table", str(folder / "tuned" / "h200.yaml"), *words])


def test_one_command_writes_a_table_that_loads_a_report_and_every_sample(machine, tmp_path, capsys):
    assert call(tmp_path) == 0
    path = tmp_path / "tuned" / "h200.yaml"
    assert check_table(path) == []
    table, document = load_table(path), record.load(tmp_path)
    assert table.tuned and table.gpu == "NVIDIA H200" and document.table == str(path)
    assert autotune._without_machine(tuned_path("NVIDIA H200")) == "cutlass_configs/tuned/h200.yaml"
    assert [(one.M, one.N, one.K) for one in document.products] == [(1, 4096, 4096), (64, 4096, 4096), (2048, 4096, 4096), (16, 28672, 4096)]
    for product in document.products:
        served = table.select(product.M, product.N, product.K, constant_b=True).row.name
        assert served in (product.row, product.base_row) and product.how == "measured"
        assert product.speedup >= 0.99
    assert all(cell.samples for cell in document.cells) and document.accuracy.top1 == 4  # its times are the model's own
    files = {file.name for file in tmp_path.iterdir()}
    assert not files & set(NAMES)  # a bench of the GPU writes its plots to the same folder
    assert files == {"tuned", "autotune.json", "autotune.jsonl", "report.md", "report.html", "tuned.png", "rows.png", "cliffs.png"}
    shown = capsys.readouterr().out
    assert "over the table before, geometric mean of 4 products" in shown and "report.html" in shown


@pytest.mark.parametrize("section, experts", [("block_scaled", None), ("grouped", 32), ("grouped_block_scaled", 8)])
def test_another_kind_of_product_is_tuned_and_an_earlier_run_of_the_plain_one_is_kept(machine, tmp_path, section, experts):
    path = tmp_path / "tuned" / "h200.yaml"
    assert call(tmp_path / "plain", "--table", str(path)) == 0
    before = load_table(path)
    more = ["--experts", str(experts)] if experts else []
    assert call(tmp_path / "more", "--table", str(path), "--section", section, *more) == 0
    table, document = load_table(path), record.load(tmp_path / "more")
    assert (document.section, document.experts) == (section, experts or 1) and document.accuracy.top1 == 4
    assert {cell.row for cell in document.cells} <= {row.name for row in candidates(getattr(load_table("sm90"), section))}
    assert (table.rows, table.buckets) == (before.rows, before.buckets) and getattr(table, section).tuned
    for product in document.products:
        served = getattr(table, section).select(product.M, product.N, product.K, constant_b=True, gpu=H200, count=experts or 1).row.name
        assert served in (product.row, product.base_row) and product.speedup >= 0.99
    said = (tmp_path / "more" / REPORT_MD).read_text()
    assert {"block_scaled": "block-scaled products", "grouped": "grouped products, 32 experts with M rows each"}.get(section, "8 experts") in said


@pytest.mark.parametrize("words, expected", [(("--section", "grouped"), "the number of experts of"), (("--experts", "8"), "none: --section gemm")])
def test_experts_are_asked_for_where_they_belong(machine, tmp_path, capsys, words, expected):
    assert call(tmp_path, *words) == 2
    assert f"--experts: expected {expected}" in capsys.readouterr().err


def test_a_journal_with_a_line_that_cannot_be_read_says_so(machine, tmp_path, capsys):
    (tmp_path / "autotune.jsonl").write_text('{"key": "half of a li')
    assert call(tmp_path) == 0
    assert "autotune.jsonl: 1 lines cannot be read and are measured again" in " ".join(capsys.readouterr().out.split())


def test_the_report_says_what_failed_and_stands_alone(machine, tmp_path, monkeypatch):
    bad = next(name for name in call_plan() if name not in {row.name for row in load_table("sm90").rows})
    monkeypatch.setattr(FakeMeasurer, "outcomes", {bad: "crashed"})
    assert call(tmp_path) == 0
    text, page = (tmp_path / REPORT_MD).read_text(), (tmp_path / REPORT_HTML).read_text()
    for said in (f"{bad} crashed at 1x4096x4096: as the test wants it", "1 crashed", "Cliffs", "The model", "NVIDIA H200 (sm90)"):
        assert said in text and said in page
    assert page.count('src="data:image/png;base64,') == 3 and "http" not in page and 'src="' not in page.replace('src="data:', "")
    assert bad not in (tmp_path / "tuned" / "h200.yaml").read_text()


def call_plan() -> list[str]:
    return tune.make_plan(load_table("sm90"), [(1, 4096, 4096)], H200, 4).wanted[1, 4096, 4096]


def test_the_recorded_command_gives_the_same_arguments():
    parser = argparse.ArgumentParser()
    autotune.add_arguments(parser)
    args = parser.parse_args([*WORDS, "--budget", "2.5", "--out", "a folder"])
    line = autotune.command_line(args)
    assert line.startswith("scaled-mm autotune --shapes 8B_o,16x28672x4096 ")
    assert parser.parse_args(shlex.split(line)[2:]) == args


def test_a_run_in_which_nothing_is_timed_writes_no_table_and_ends_with_status_one(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(FakeMeasurer, "outcomes", {row.name: "failed" for row in load_table("sm90").rows})
    plain = FakeMeasurer.measure
    monkeypatch.setattr(FakeMeasurer, "measure", lambda self, request: {"outcome": "failed", "message": "RuntimeError: refused"})
    assert call(tmp_path) == autotune.NOTHING_TIMED
    assert not (tmp_path / "tuned" / "h200.yaml").exists() and record.load(tmp_path).table is None
    assert "RuntimeError: refused" in (tmp_path / REPORT_MD).read_text()
    monkeypatch.setattr(FakeMeasurer, "measure", plain)


def test_another_architectures_table_goes_to_the_report_and_no_call_uses_it(machine, tmp_path, monkeypatch):
    monkeypatch.setenv("SCALED_MM_ARCH", "")  # set by the command, for itself and the process that times
    monkeypatch.setattr(autotune, "_own_table", lambda device: (load_table(os.environ["SCALED_MM_ARCH"]), facts("NVIDIA H200", "sm80", 132)))
    assert main(["autotune", "--shapes", "16x4096x4096", "--arch", "sm87", "--top", "2", "--out", str(tmp_path)]) == 0
    assert os.environ["SCALED_MM_ARCH"] == "sm80"
    assert load_table(tmp_path / "sm80.yaml").arch == "sm80" and record.load(tmp_path).table == str(tmp_path / "sm80.yaml")


@pytest.mark.gpu
def test_a_real_run_on_this_gpu_writes_a_table_that_beats_or_keeps_the_present_row(tmp_path):
    words = ["--shapes", "16x4096x4096,64x4096x4096", "--top", "2", "--budget", "8", "--budget-ms", "10", "--seed", "1"]
    assert main(["autotune", *words, "--out", str(tmp_path), "--table", str(tmp_path / "gpu.yaml")]) == 0
    document = record.load(tmp_path)
    assert check_table(tmp_path / "gpu.yaml") == [] and document.ended is None and document.unbuilt == {}
    assert [cell.message for cell in document.cells if cell.outcome != "timed"] == []
    for product in document.products:
        assert product.how == "measured" and product.us <= 1.01 * product.base_us and product.us > (product.roof_us or 0)


@pytest.mark.gpu
@pytest.mark.parametrize("section", [name for name in WORKBENCHES if name != TOP_LEVEL])
def test_a_real_run_on_another_kind_of_product_times_candidates_with_the_bits_of_the_reference(tmp_path, section):
    words = ["--shapes", "16x1024x1024", "--top", "2", "--budget", "8", "--budget-ms", "5", "--seed", "1", "--section", section]
    words += ["--experts", "4"] * (section in OF_EXPERTS)
    assert main(["autotune", *words, "--out", str(tmp_path), "--table", str(tmp_path / "gpu.yaml")]) == 0
    document = record.load(tmp_path)
    assert check_table(tmp_path / "gpu.yaml") == [] and document.ended is None and document.unbuilt == {}
    assert document.cells and [cell.message for cell in document.cells if cell.outcome != "timed"] == []


def test_shapes_may_come_from_a_file(machine, tmp_path):
    shapes = tmp_path / "shapes.txt"
    shapes.write_text("# my model\n1x4096x4096, 16x4096x4096\n\n8B_qkv  # a layer\n")
    assert main(["autotune", "--shapes", str(shapes), "--m", "8", "--arch", "sm90", "--dry-run"]) == 0
    args = argparse.Namespace(shapes=str(shapes), m="8")
    assert [(case.M, case.N, case.K) for case in autotune._cases(args)] == [(1, 4096, 4096), (16, 4096, 4096), (8, 6144, 4096)]


def test_a_file_of_shapes_that_is_no_text_is_refused_by_name(tmp_path, capsys):
    shapes = tmp_path / "shapes.txt"
    shapes.write_bytes(b"1x4096x4096 # gr\xf6\xdfer\n")
    assert main(["autotune", "--shapes", str(shapes), "--arch", "sm89", "--dry-run"]) == 2
    printed = capsys.readouterr()
    assert f"--shapes: expected a text file in UTF-8, got {shapes}" in printed.err and len(printed.err.splitlines()) == 1


@pytest.mark.parametrize("arch", ["sm75", "sm80", "sm89", "sm120"])
def test_a_dry_run_lists_candidates_of_any_architecture_without_a_gpu(arch, capsys):
    assert main(["autotune", "--shapes", "llama-70b", "--m", "1,4096", "--arch", arch, "--dry-run", "--top", "3"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{arch}: ") and "legal candidates" in first and len(rest) == 10
    assert all("c2x_" in line for line in rest)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shapes", "nonsense"], "--shapes: unknown shape 'nonsense'"),
        (["--shapes", ""], "--shapes: expected at least one shape"),
        (["--shapes", "1x4096x1000", "--arch", "sm90", "--dry-run"], "--shapes: expected sizes that tuned rows take, got 1x4096x1000"),
        (
            ["--shapes", "1x1x1000000", "--arch", "sm89", "--dry-run"],
            "--shapes: expected K <= 131071, beyond which a 32-bit accumulator is not exact, got 1x1x1000000",
        ),
        (["--shapes", f"{2**31}x64x64", "--arch", "sm89", "--dry-run"], "--shapes: expected M, N and K <= 2147483647, got 2147483648x64x64"),
        (["--m", "0"], "--m: M must be a positive integer or a range like 1-64, got '0'"),
        (["--arch", "sm70", "--dry-run"], "sm70"),
        (["--arch", "a file", "--dry-run"], "--arch: no tile table for 'a file'"),
        (["--device", "toaster"], "--device: expected cuda, cuda:<index> or cpu, got 'toaster'"),
        (["--device", "cpu"], "--device: expected a GPU, got the CPU"),
    ],
)
def test_arguments_that_make_no_sense_end_with_status_two_and_name_the_option(words, message, capsys):
    assert main(["autotune", *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == "" and len(printed.err.splitlines()) == 1


@pytest.mark.parametrize(("option", "values"), [("--budget", ["0", "-1", "nan", "x"]), ("--top", ["0", "x"]), ("--jobs", ["0"]), ("--seed", ["-1"])])
def test_numbers_out_of_range_are_refused_with_the_option_and_what_came(option, values, capsys):
    for value in values:
        with pytest.raises(SystemExit) as caught:
            main(["autotune", f"{option}={value}"])
        assert caught.value.code == 2
        assert f"argument {option}: expected a" in (printed := capsys.readouterr().err) and repr(value) in printed


def test_an_out_that_cannot_be_written_to_is_refused_before_anything_is_compiled(machine, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tune, "tune", lambda *_, **__: pytest.fail("tuned"))
    (tmp_path / "file").write_text("")
    assert main(["autotune", *WORDS, "--out", str(tmp_path / "file")]) == 2
    assert "--out: expected a folder that can be written to" in capsys.readouterr().err
    assert main(["autotune", *WORDS, "--out", str(tmp_path), "--table", str(tmp_path / "file" / "x.yaml")]) == 2
    assert "--table: expected a folder that can be written to" in capsys.readouterr().err


# ---- report -----------------------------------------------------------------------------------------------------------


def test_a_report_is_rendered_again_from_its_json_alone(machine, tmp_path, capsys):
    call(tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in (REPORT_MD, REPORT_HTML, "tuned.png")}
    for name in before:
        (tmp_path / name).unlink()
    assert main(["report", str(tmp_path)]) == 0
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_two_runs_are_compared_product_by_product(machine, tmp_path, capsys):
    call(tmp_path / "one")
    document = record.load(tmp_path / "one")
    for product in document.products:
        product.us *= 2
    record.save(document, tmp_path / "two")
    capsys.readouterr()
    assert main(["report", str(tmp_path / "one"), "--compare", str(tmp_path / "two")]) == 0
    shown = capsys.readouterr().out
    assert "is 2.000x as fast as" in shown and "geometric mean of 4 products" in shown and "28672" in shown


def test_a_benchmark_can_be_compared_with_itself():
    bench = Path(__file__).parents[2] / "reports" / "sm90" / "h200"
    times = Counter(kind for kind, *_ in report.times(bench))
    path = Counter(case["part"] for case in json.loads((bench / "path.json").read_text())["cases"])
    assert path["layer"] == 99 and times == {"int8": 99, "q4_0": 33, "q4_1": 33, "q5_0": 33, "q5_1": 33, "q8_0": 33, **path}
    assert main(["report", str(bench), "--compare", str(bench)]) == 0


def test_a_folder_without_a_run_is_refused_by_name(machine, tmp_path, capsys):
    assert main(["report", str(tmp_path / "none")]) == 2
    files = "autotune.json, bench.json, bench_gguf.json, bench_block.json, path.json, experts.json, block_scaled.json, decoder.json or parallel.json"
    assert f"DIR: expected a folder with {files}" in capsys.readouterr().err
    call(tmp_path / "one")
    assert main(["report", str(tmp_path / "one"), "--compare", str(tmp_path / "none")]) == 2
    assert f"--compare: expected a folder with {files}" in capsys.readouterr().err
    (tmp_path / "one" / "autotune.json").write_text('{"schema_version": 99}')
    assert main(["report", str(tmp_path / "one")]) == 2
    assert "autotune.json" in capsys.readouterr().err


# ---- table check --cliffs ---------------------------------------------------------------------------------------------


def check(*words) -> int:
    return main(["table", "check", *map(str, words)])


def test_the_sm90_table_has_no_cliff_by_the_times_it_was_drawn_from(tmp_path, capsys):
    read = lambda name: json.loads((DATA.parent / name).read_text())["cases"]  # noqa: E731
    cases = [case for case in read("h200_rows.json") if case["M"] <= 128]
    cases += [case for case in read("h200_loaded.json") if case["kind"] == "layer"]
    times = tmp_path / "rows.json"
    times.write_text(json.dumps({"cases": cases}))
    assert check("--arch", "sm90", "--cliffs", times) == 0
    assert "sm90.yaml: 0 cliffs among the 99 of 99 products" in capsys.readouterr().out


def test_a_cliff_is_a_problem_with_the_product_and_both_times(tmp_path, capsys):
    cases = json.loads(DATA.read_text())["cases"]
    [case] = [case for case in cases if (case["M"], case["N"], case["K"]) == (64, 4096, 4096)]
    row = load_table("sm90").select(64, 4096, 4096).row.name
    case["us"][row] = 99.0
    slow = tmp_path / "rows.json"
    slow.write_text(json.dumps({"cases": cases}))
    assert check("--arch", "sm90", "--cliffs", slow) == 1
    assert "sm90.yaml: buckets: a cliff at N=4096 K=4096: M=64 takes 99.00 us" in capsys.readouterr().out
    assert check("--arch", "sm90", "--cliffs", slow, "--json") == 1
    [table] = json.loads(capsys.readouterr().out)["tables"]
    assert [problem["field"] for problem in table["problems"]] == ["buckets"]


def test_cliffs_are_looked_for_in_the_times_of_every_kind_of_run(machine, tmp_path, capsys):
    call(tmp_path)
    assert check("--table", tmp_path / "tuned" / "h200.yaml", "--cliffs", tmp_path / "autotune.json") == 0
    assert "among the 4 of 4 products" in capsys.readouterr().out
    rows = [{"M": 1, "N": 4096, "K": 4096, "rows": {load_table("sm90").select(1, 4096, 4096, constant_b=True).row.name: 6.0}, "failed": {}}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    assert check("--arch", "sm90", "--cliffs", tmp_path / "rows.json") == 0
    assert check("--arch", "sm90", "--cliffs", Path(__file__).parents[2] / "reports/sm90/h200/bench.json") == 0


@pytest.mark.parametrize("text", [None, "no JSON", "[]", '{"cases": [{"M": 1}]}', "3"])
def test_a_file_without_measured_times_is_refused_by_name(text, tmp_path, capsys):
    path = tmp_path / "times.json"
    if text is not None:
        path.write_text(text)
    assert check("--arch", "sm90", "--cliffs", path) == 2
    assert "--cliffs: expected measured times" in (printed := capsys.readouterr().err) and "times.json" in printed


def test_times_of_rows_that_no_table_chooses_are_refused(tmp_path, capsys):
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"cases": [{"M": 1, "N": 64, "K": 64, "us": {"no such row": 1.0}}]}))
    assert check("--cliffs", path) == 2
    assert "--cliffs: expected times of rows that the table chooses" in capsys.readouterr().err
