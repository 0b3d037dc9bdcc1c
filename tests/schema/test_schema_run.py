"""The runner: what it draws, what becomes of solutions that are wrong, and the commands."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from schema_data import ROOT, collection, edit, small_folder

from scaled_mm import cli, schema
from scaled_mm.schema import constraints, runner
from scaled_mm.schema.catalog.entry import OURS

NAME = "gemm_q4_0_w4a16"
SOLUTION = f"solutions/scaled_mm/gemm_q4_0/{NAME}/scaled_mm_{NAME}.json"
RIGHT = (
    "import torch\nimport scaled_mm\n\n\ndef right(activation, weight_q):\n"
    "    return scaled_mm.gemm_q4_0(weight_q.view(torch.uint8), activation).t()\n\n\n"
)
HEAD = "import torch\n\n\ndef run(activation, weight_q):\n"
SIZE = "activation.shape[0], weight_q.shape[0]"

DIGESTS = {
    "quantize_q4_0": "5fdd6898531ec506",
    "gemm_int8_scaled": "092d1e2ceb4f32da",
    "gemm_q5_1_w5a16": "ba0a3bdb75199fc6",
    "softmax_d128": "2730033a4a108ebb",
}


@pytest.mark.parametrize(
    "text, status, said",
    [
        (f"{HEAD}    return torch.zeros({SIZE})\n", "INCORRECT_NUMERICAL", r"expected \|\|out - ref"),
        (f"{HEAD}    return torch.full(({SIZE}), float('nan'))\n", "INCORRECT_NUMERICAL", ""),
        (f"{HEAD}    return torch.zeros({SIZE}, dtype=torch.float64)\n", "INCORRECT_DTYPE", "output out: expected float32, got float64"),
        (f"{HEAD}    return torch.zeros(3, 4)\n", "INCORRECT_SHAPE", r"output out: expected \[5, 48\], got \[3, 4\]"),
        (f"{HEAD}    return torch.zeros({SIZE}), 1\n", "INCORRECT_SHAPE", r"expected 1 outputs \(out\), got 2"),
        (f"{HEAD}    return 3\n", "INCORRECT_DTYPE", "output out: expected a tensor, got int"),
        (f"{HEAD}    raise ValueError('no')\n", "RUNTIME_ERROR", "ValueError: no"),
        ("def run(:\n", "COMPILE_ERROR", "SyntaxError"),
        ("import no_such_package\n", "COMPILE_ERROR", "ModuleNotFoundError"),
        ("x = 1\n", "COMPILE_ERROR", "no attribute 'run'"),
        (f"{HEAD}    raise SystemExit(0)\n", "RUNTIME_ERROR", "SystemExit"),
        (f"{HEAD}    return torch.zeros({SIZE}, device='meta')\n", "RUNTIME_ERROR", "expected a strided tensor on cpu, got torch.strided on meta"),
        (f"{HEAD}    return torch.zeros({SIZE}).to_sparse()\n", "RUNTIME_ERROR", "got torch.sparse_coo on cpu"),
        (f"{HEAD}    activation.zero_()\n    return torch.zeros({SIZE})\n", "RUNTIME_ERROR", "input activation: expected it to be left as it was"),
        (
            f"{RIGHT}kept = []\n\n\ndef run(activation, weight_q):\n    kept or kept.append(right(activation, weight_q))\n    return kept[0]\n",
            "INCORRECT_NUMERICAL",
            "after it was timed, on other numbers",
        ),
        (
            f"{RIGHT}count = [0]\n\n\ndef run(activation, weight_q):\n    count[0] += 1\n    return right(activation, weight_q) * (count[0] == 1)\n",
            "INCORRECT_NUMERICAL",
            "after it was timed",
        ),
    ],
)
def test_what_a_solution_does_wrong_is_its_status(tmp_path, text, status, said, capsys):
    root = small_folder(tmp_path)
    edit(root / SOLUTION, sources=[{"path": "main.py", "content": text}])
    wrong, right = sorted(schema.load(root).solutions[NAME], key=lambda one: one.author, reverse=True)
    definition, workload = collection().definitions[NAME], collection().workloads[NAME][0]
    traces = schema.evaluate(definition, [wrong, right], workload, "cpu", root)
    assert [one.evaluation.status for one in traces] == [status, "PASSED"]
    assert re.search(said, traces[0].evaluation.log) and traces[0].evaluation.performance is None
    assert traces[1].evaluation.performance.speedup_factor > 0
    assert cli.main(["schema", "run", "--root", str(root), "--device", "cpu", "--out", str(tmp_path / "out")]) == 1
    assert status in capsys.readouterr().err
    line = json.loads((tmp_path / f"out/traces/{OURS}/gemm_q4_0/{NAME}.jsonl").read_text())
    assert line["evaluation"]["status"] == status


def test_a_solution_in_another_language_is_a_compile_error_that_says_so(tmp_path):
    root = small_folder(tmp_path)
    edit(root / SOLUTION, spec__language="triton")
    ours = next(one for one in schema.load(root).solutions[NAME] if one.author == OURS)
    (trace,) = schema.evaluate(collection().definitions[NAME], [ours], collection().workloads[NAME][0], "cpu")
    assert trace.evaluation.status == "COMPILE_ERROR" and "spec.language: expected 'python', which is what this reader builds" in trace.evaluation.log


def test_a_solution_that_is_given_its_outputs_is_told_which_field_to_change(tmp_path):
    root = small_folder(tmp_path)
    edit(root / SOLUTION, spec__destination_passing_style=None)  # the format's default is true
    ours = next(one for one in schema.load(root).solutions[NAME] if one.author == OURS)
    with pytest.raises(schema.SchemaError, match="spec.destination_passing_style: expected false"):
        schema.build_solution(ours)
    edit(root / SOLUTION, spec__destination_passing_style=False, sources=[{"path": path, "content": "x = 1\n"} for path in ("main.py", "b.py")])
    ours = next(one for one in schema.load(root).solutions[NAME] if one.author == OURS)
    with pytest.raises(schema.SchemaError, match="sources: expected one file, .*got 2"):
        schema.build_solution(ours)


def test_the_solution_that_the_guide_shows_runs(tmp_path):
    text = re.search(r"```json\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    root = small_folder(tmp_path, ("silu_h4096",))
    path = root / "solutions/me/silu/silu_h4096/me_silu_h4096.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert cli.main(["schema", "validate", "--root", str(root)]) == 0
    arguments = ["schema", "run", "--root", str(root), "--solution", "me_*", "--workload", "*_t1", "--device", "cpu", "--out", str(root)]
    assert cli.main(arguments) == 0
    (trace,) = schema.load(root).traces["silu_h4096"]
    assert trace.evaluation.log == f"scaled-mm schema run --solution me_silu_h4096 --workload silu_h4096_t1 --device cpu --root {root}\n"


def test_a_draw_is_the_same_every_time_and_differs_by_name_and_workload():
    definition = collection().definitions["gemm_q4_1_q8_1_w4a8_n4096_k4096"]
    first, second = collection().workloads[definition.name][:2]
    inputs = schema.draw(definition, first)
    assert all(torch.equal(a, b) for a, b in zip(inputs, schema.draw(definition, first)))
    assert not torch.equal(inputs[1], schema.draw(definition, second)[1])
    rows = inputs[1].flatten(1)
    assert not torch.equal(rows[0], rows[1024]) and len(torch.unique(rows[:64], dim=0)) == 64
    state = torch.get_rng_state()
    schema.draw(definition, first)
    assert torch.equal(torch.get_rng_state(), state)  # nobody's random numbers are moved


def test_files_of_inputs_are_read_where_they_are(tmp_path):
    root = small_folder(tmp_path)
    definition, workload = collection().definitions[NAME], collection().workloads[NAME][0]
    ((name, tensors),) = schema.blob_tensors(definition, workload).items()
    from safetensors.torch import save_file

    save_file({"weight_q": torch.zeros_like(tensors["weight_q"])}, root / name)
    assert schema.draw(definition, workload, root=root)[1].count_nonzero() == 0
    assert torch.equal(schema.draw(definition, workload)[1], tensors["weight_q"])


def test_pages_are_drawn_within_their_bounds():
    definition = collection().definitions["paged_decode_attention_h32_kv8_d128_bs16"]
    for workload in collection().workloads[definition.name]:
        lens, tables = schema.draw(definition, workload)[3:5]
        assert lens.min() >= 1 and lens.max() <= workload.axes["max_blocks"] * 16
        assert len(tables.unique()) == tables.numel() and 0 <= tables.min() and tables.max() < workload.axes["num_blocks"]


@pytest.mark.parametrize(
    "expression, sizes, true",
    [
        ("K == 32 * KB", {"K": 64, "KB": 2}, True),
        ("K == 32 * KB", {"K": 65, "KB": 2}, False),
        ("1 <= K < 9 and not K % 2", {"K": 8}, True),
        ("1 <= K < 9 and not K % 2", {"K": 10}, False),
        ("K // KB == 3 or KB > 7", {"K": 7, "KB": 2}, True),
        ("K // KB == 3", {"K": 7, "KB": 0}, False),
        ("K - 2 != -KB", {"K": 1, "KB": 1}, False),
    ],
)
def test_constraints_are_evaluated(expression, sizes, true):
    constraints.check(expression, set(sizes))
    assert constraints.holds(expression, sizes) is true


def test_the_list_shows_groups_and_counts(capsys):
    assert cli.main(["schema", "list", "--group", "attention", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["op_type"] for row in rows} == {"softmax", "rope", "paged_decode_attention"} and all(row["solutions"] == 2 for row in rows)
    assert cli.main(["schema", "list"]) == 0
    out = capsys.readouterr().out
    for group in ("gemm", "quantization", "activation", "normalization", "attention"):
        assert re.search(rf"^{group} ", out, re.MULTILINE)
    assert f"{len(collection().definitions)} definitions" in out and all(name in out for name in collection().definitions)
    assert cli.main(["schema", "list", "--group", "sports"]) == 2
    assert "--group: expected one of gemm, quantization" in capsys.readouterr().err


def test_show_shows_a_definition_and_a_solution(capsys):
    assert cli.main(["schema", "show", NAME]) == 0
    out = capsys.readouterr().out
    for said in ("weight_q: int8 [N, KB, Q4_0_BYTES], q4_0 blocks", "K == 32 * KB", "def run(activation, weight_q):", f"scaled_mm_{NAME}", "M = 5"):
        assert said in out
    assert cli.main(["schema", "show", f"scaled_mm_{NAME}"]) == 0
    assert "scaled_mm.gemm_q4_0(" in capsys.readouterr().out
    assert cli.main(["schema", "show", "gemm_q4_0_w4a61"]) == 2
    assert NAME in capsys.readouterr().err


def test_run_prints_a_table_or_json_and_keeps_what_was_there(tmp_path, capsys):
    arguments = ["schema", "run", "--definition", "quantize_q4_[01]", "--workload", "*_r16_*", "--device", "cpu", "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "4 of 4 passed" in out and "same bits" in out and out.count("PASSED") == 4
    file = tmp_path / "traces/scaled_mm/quantize/quantize_q4_0.jsonl"
    before = file.read_text()
    assert cli.main([*arguments, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 4  # and nothing else
    file.write_text(file.read_text().rstrip("\n"))  # as somebody's editor left it
    assert cli.main([*arguments, "--json"]) == 0
    assert file.read_text().startswith(before) and len(file.read_text().splitlines()) == 3


def test_run_says_what_it_left_out_and_refuses_to_do_nothing(capsys):
    arguments = ["schema", "run", "--device", "cpu", "--definition", "quantize_q4_0"]
    assert cli.main([*arguments, "--limit", "1"]) == 0
    assert "2 of 2 passed, 1 workloads of more than 1 million elements left out (--limit)" in capsys.readouterr().out
    assert cli.main([*arguments, "--workload", "nothing"]) == 2
    assert "--workload: expected the name of one or a pattern that fits one, got 'nothing'" in capsys.readouterr().err
    assert cli.main([*arguments, "--solution", "scaled_mm_quantize_q4_0", "--solution", "typo"]) == 2
    assert "--solution: expected the name of one or a pattern that fits one, got 'typo'" in capsys.readouterr().err
    assert cli.main([*arguments, "--workload", "silu*"]) == 2
    assert "expected something to run" in capsys.readouterr().err
    assert cli.main(["schema", "run", "--definition", "gemm_q9*"]) == 2
    assert "definition: expected the name of one, got 'gemm_q9*'" in capsys.readouterr().err


def test_draw_writes_what_workloads_name(tmp_path, capsys):
    assert cli.main(["schema", "draw", "--definition", "dequantize_q4_0", "--out", str(tmp_path)]) == 0
    assert "2 files" in capsys.readouterr().out
    assert cli.main(["schema", "draw", "--definition", "dequantize_q4_0", "--out", str(tmp_path)]) == 0
    assert "0 files" in capsys.readouterr().out  # what is there stays
    assert cli.main(["schema", "draw", "dequantize_q5_0", "--workload", "*_r16_*", "--out", str(tmp_path)]) == 0
    assert "1 files" in capsys.readouterr().out
    for workload in collection().workloads["dequantize_q4_0"]:
        drawn = schema.draw(collection().definitions["dequantize_q4_0"], workload)
        assert torch.equal(schema.draw(collection().definitions["dequantize_q4_0"], workload, root=tmp_path)[0], drawn[0])
        assert (tmp_path / workload.inputs["q"].path).is_file()


def test_a_trace_cannot_be_changed():
    definition, workload = collection().definitions["silu_h4096"], collection().workloads["silu_h4096"][0]
    trace = schema.evaluate(definition, collection().solutions["silu_h4096"][:1], workload, "cpu")[0]
    with pytest.raises(ValueError, match="frozen"):
        trace.solution = "another"
    for mapping in (trace.workload.axes, trace.workload.inputs, trace.evaluation.correctness.extra, trace.evaluation.correctness.extra["y"]):
        with pytest.raises(TypeError, match="frozen"):
            mapping["T"] = 99
    with pytest.raises(ValueError, match="frozen"):
        trace.evaluation.performance.latency_ms = 0.0


def test_draws_have_the_bits_that_they_had():
    """Of integers, which no CPU's instructions round: a digest that was taken once."""
    import hashlib

    digests = {}
    for name in ("quantize_q4_0", "gemm_int8_scaled", "gemm_q5_1_w5a16", "softmax_d128"):
        definition, workload = collection().definitions[name], collection().workloads[name][0]
        digest = hashlib.sha256()
        for value in schema.draw(definition, workload):
            digest.update(value.contiguous().view(torch.uint8).numpy().tobytes())
        digests[name] = digest.hexdigest()[:16]
    assert digests == DIGESTS


def test_drawn_values_are_nearly_normal():
    definition, workload = collection().definitions["quantize_q4_0"], collection().workloads["quantize_q4_0"][1]
    x = schema.draw(definition, workload)[0].double()
    assert x.mean().abs() < 0.01 and abs(x.std() - 1) < 0.01 and 3 < x.abs().max() < 4


def test_times_are_milliseconds_and_speed_is_the_reference_over_the_solution(tmp_path):
    root = small_folder(tmp_path)
    slow = "import time\n" + RIGHT + "def run(activation, weight_q):\n    time.sleep(0.02)\n    return right(activation, weight_q)\n"
    edit(root / SOLUTION, sources=[{"path": "main.py", "content": slow}])
    ours = next(one for one in schema.load(root).solutions[NAME] if one.author == OURS)
    (trace,) = schema.evaluate(collection().definitions[NAME], [ours], collection().workloads[NAME][0], "cpu")
    measured = trace.evaluation.performance
    assert 20 <= measured.latency_ms < 200
    assert measured.speedup_factor == pytest.approx(measured.reference_latency_ms / measured.latency_ms)


def two_outputs(compare: str) -> schema.Definition:
    tensor = {"shape": ["M"], "dtype": "float32"}
    return schema.Definition(
        name="two",
        op_type="add_rms_norm",
        axes={"M": {"type": "var"}},
        inputs={"x": tensor},
        outputs={"y": tensor, "z": tensor},
        reference="def run(x):\n    return x, x\n",
        tags=[f"compare:{compare}"],
    )


@pytest.mark.parametrize(
    "kind, change, passed",
    [
        ("bits", lambda y, z: (y, z), True),
        ("bits", lambda y, z: (y, z.nextafter(torch.tensor(9.0))), False),
        ("bits", lambda y, z: (y.where(y != 0, -0.0), z), False),
        ("norm=1e-3", lambda y, z: (y * (1 + 0.9e-3), z), True),
        ("norm=1e-3", lambda y, z: (y * (1 + 3e-3), z), False),
        ("norm=1e-3", lambda y, z: (y, z * (1 + 3e-3)), False),
        ("norm=1e-3", lambda y, z: (y, z.where(z != 2, torch.nan)), False),
        ("norm=1e-3", lambda y, z: (y, z.where(z != 2, torch.inf)), False),
    ],
)
def test_outputs_are_compared_each_by_itself(kind, change, passed):
    expected = [torch.tensor([0.0, 1.0, 2.0, -3.0])] * 2
    outputs = change(*(one.clone() for one in expected))
    got, correctness = runner.compare(two_outputs(kind), outputs, expected)
    assert got is passed
    finite = all(bool(one.isfinite().all()) for one in outputs)
    difference = max(float((a - b).abs().max()) for a, b in zip(outputs, expected)) if finite else math.inf
    assert correctness.max_absolute_error == pytest.approx(difference)
    if finite:
        largest = max(float(((a - b).abs() / (b.abs() + 1e-8)).max()) for a, b in zip(outputs, expected))
        assert correctness.max_relative_error == pytest.approx(largest, rel=1e-5)


def test_every_output_of_a_reference_must_be_finite():
    definition = two_outputs("bits").model_copy(update={"reference": "def run(x):\n    return x, x / 0\n"})
    with pytest.raises(schema.SchemaError, match="3 of 3 of output z are NaN or infinite"):
        runner.reference_outputs(definition, schema.build_reference(definition), [torch.ones(3)])


def test_texts_may_have_dataclasses(tmp_path):
    root = small_folder(tmp_path)
    text = "from __future__ import annotations\nimport dataclasses\n" + RIGHT + "@dataclasses.dataclass\nclass One:\n    x: int\n\n\nrun = right\n"
    edit(root / SOLUTION, sources=[{"path": "main.py", "content": text}])
    assert schema.build_solution(next(one for one in schema.load(root).solutions[NAME] if one.author == OURS)).__name__ == "right"


def test_traces_that_other_tools_write_are_read_and_shown(tmp_path, capsys):
    root = small_folder(tmp_path)
    line = json.loads((root / f"workloads/gemm_q4_0/{NAME}.jsonl").read_text().splitlines()[0])
    evaluation = {"status": "PASSED", "environment": {"hardware": "h"}, "timestamp": "t", "log": "a\u2028b", "performance": {}}
    evaluation["correctness"] = {"max_relative_error": "NaN", "max_absolute_error": "Infinity", "extra": {"matched_ratio": 0.5}}
    path = root / f"traces/gemm_q4_0/{NAME}.jsonl"  # where flashinfer-bench's add_traces puts them
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(line | {"solution": f"scaled_mm_{NAME}", "evaluation": evaluation}, ensure_ascii=False) + "\n")
    assert len(schema.load(root).traces[NAME]) == 1
    assert cli.main(["schema", "show", NAME, "--root", str(root)]) == 0
    assert "PASSED" in capsys.readouterr().out
