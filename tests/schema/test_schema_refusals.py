"""Files that are wrong are refused one by one, with file, field and reason."""

from __future__ import annotations

import json
import math
import re

import pytest
from schema_data import edit, small_folder

from scaled_mm import cli, schema
from scaled_mm.errors import BadParamError

NAME = "gemm_q4_0_w4a16"
DEFINITION = f"definitions/gemm_q4_0/{NAME}.json"
SOLUTION = f"solutions/scaled_mm/gemm_q4_0/{NAME}/scaled_mm_{NAME}.json"
WORKLOADS = f"workloads/gemm_q4_0/{NAME}.jsonl"
TRACES = f"traces/scaled_mm/gemm_q4_0/{NAME}.jsonl"
TEXT = "import torch\n\n\ndef run(activation, weight_q):\n    return torch.zeros(activation.shape[0], weight_q.shape[0], device=activation.device)\n"


@pytest.fixture
def folder(tmp_path):
    root = small_folder(tmp_path)
    assert schema.load(root).definitions
    return root


@pytest.mark.parametrize(
    "file, fields, said",
    [
        (
            DEFINITION,
            {"inputs__weight_q__dtype": "uint8"},
            "inputs.weight_q.dtype: expected one of float32, .*, got 'uint8'; packed blocks are stored as int8",
        ),
        (DEFINITION, {"inputs__weight_q__dtype": "q4_0"}, "inputs.weight_q.dtype: expected one of .*, got 'q4_0'; packed blocks are stored as int8"),
        (DEFINITION, {"outputs__out__dtype": "float12"}, r"outputs.out.dtype: expected one of .*, got 'float12' \("),
        (DEFINITION, {"reference": "import torch\n"}, "reference: expected a top-level function run, there is none"),
        (DEFINITION, {"reference": "def run(:\n"}, "reference: expected Python, got .* in line 1"),
        (
            DEFINITION,
            {"reference": TEXT.replace("activation, weight_q", "weight_q, activation")},
            r"reference: expected run\(activation, weight_q\), .*got run\(weight_q",
        ),
        (
            DEFINITION,
            {"reference": TEXT.replace("weight_q)", "weight_q=None)", 1)},
            "reference: expected run with positional parameters and no defaults",
        ),
        (DEFINITION, {"axes__L": {"type": "var"}}, "axes.L: expected a var axis to be in the shape of an input"),
        (DEFINITION, {"axes__L": {"type": "const", "value": 3}}, "axes.L: expected an axis that a tensor has; none does"),
        (DEFINITION, {"axes__L": {"type": "var"}, "outputs__out__shape": ["M", "L"]}, "axes.L: expected a var axis to be in the shape of an input"),
        (DEFINITION, {"axes__M": {"type": "const"}}, "axes.M: expected a value for a const axis"),
        (DEFINITION, {"axes__M": {"type": "var", "value": 3}}, "axes.M: expected no value for a var axis"),
        (DEFINITION, {"axes__M": {"type": "const", "value": 0}}, "axes.M.value: .*greater than or equal to 1, got 0"),
        (DEFINITION, {"axes__M": {"type": "expr"}}, "axes.M.type: .*'const' or 'var', got 'expr'"),
        (DEFINITION, {"inputs__activation__shape": ["M", "Q"]}, "inputs.activation.shape: expected names of axes .*, got 'Q'"),
        (DEFINITION, {"outputs__activation": {"shape": ["M"], "dtype": "int8"}}, r"outputs: expected names that no input has, got \['activation'\]"),
        (DEFINITION, {"name": "another"}, f"name: expected the file of this to be gemm_q4_0/another, got gemm_q4_0/{NAME}"),
        (DEFINITION, {"name": "Gemm Q4"}, "name: .*pattern.*, got 'Gemm Q4'"),
        (DEFINITION, {"op_type": "gemm_q4_1"}, f"op_type: expected the file of this to be gemm_q4_1/{NAME}, got gemm_q4_0/{NAME}"),
        (DEFINITION, {"op_type": "gemm_q3_k"}, "op_type: expected one of gemm_fp32, .*, got 'gemm_q3_k'"),
        (DEFINITION, {"constraints": ["K == 32 * L"]}, "constraints.0: expected names of axes .*, got L"),
        (DEFINITION, {"constraints": ["K =="]}, "constraints.0: expected an expression, got 'K =='"),
        (DEFINITION, {"constraints": ["K * 2"]}, r"constraints.0: expected a comparison, got 'K \* 2'"),
        (DEFINITION, {"constraints": ["K == abs(KB)"]}, "constraints.0: expected axes, integers, .*got 'abs.KB.'"),
        (DEFINITION, {"constraints": ["K // (K - 1) == 2 or K ** 2 == 4"]}, r"constraints.0: expected axes, integers, .*got 'Pow'"),
        (DEFINITION, {"constraints": ["K == " + "-" * 500 + "K"]}, "constraints.0: expected at most 400 characters, got 506"),
        (DEFINITION, {"reference": TEXT + "x = " + "-" * 20000 + "1\n"}, "reference: expected Python, got "),
        (DEFINITION, {"axes__M": {"type": "const", "value": 10**30}}, "axes.M.value: "),
        (DEFINITION, {"constraints": ["K.real == 1"]}, "constraints.0: expected axes, integers, .*got 'K.real'"),
        (DEFINITION, {"tags": ["logical:weight_q=q4_0"]}, "tags: expected one compare:bits or compare:norm=<bound>, got 0"),
        (DEFINITION, {"tags": ["compare:norm=2"]}, "tags: expected compare:bits or compare:norm=<bound between 0 and 1>, got compare:norm=2"),
        (
            DEFINITION,
            {"tags": ["compare:bits", "logical:weight_q=q5_0"]},
            "tags: logical:weight_q=q5_0: expected int8 with an axis of blocks and a last const axis of 22 bytes",
        ),
        (DEFINITION, {"tags": ["compare:bits", "logical:weights=q4_0"]}, "tags: logical:weights=q4_0 names no input or output"),
        (DEFINITION, {"tags": ["compare:bits", "logical:weight_q=q3_k"]}, "tags: logical:weight_q=: expected one of q4_0, .*, got 'q3_k'"),
        (DEFINITION, {"refrence": "x"}, "refrence: expected no such field"),
        (DEFINITION, {"outputs": None}, "outputs: expected this field, it is missing"),
        (DEFINITION, {"inputs": {}}, "inputs: .*at least 1 item"),
        (SOLUTION, {"definition": "gemm_q9"}, "definition: expected the name of a definition that is there and right, got 'gemm_q9'"),
        (SOLUTION, {"author": "somebody"}, "author: expected the file of this to be somebody/gemm_q4_0"),
        (SOLUTION, {"name": f"pytorch_{NAME}"}, f"name: expected the file of this to be .*pytorch_{NAME}"),
        (SOLUTION, {"sources": []}, "sources: .*at least 1 item"),
        (SOLUTION, {"spec__entry_point": "other.py::run"}, "spec.entry_point: expected a file of the sources"),
        (SOLUTION, {"spec__entry_point": "main.py"}, "spec.entry_point: .*pattern"),
        (SOLUTION, {"spec__language": "fortran"}, "spec.language: .*got 'fortran'"),
        (SOLUTION, {"sources__0__path": "../main.py"}, "sources.0.path: expected a path that stays inside its folder, got '../main.py'"),
        (
            WORKLOADS,
            {"solution": "x", "evaluation": {"status": "TIMEOUT", "environment": {"hardware": "h"}, "timestamp": "t"}},
            "line 1: solution: expected null in workloads/",
        ),
        (WORKLOADS, {"workload__axes__M": -1}, "line 1: workload.axes.M: .*greater than or equal to 0"),
        (WORKLOADS, {"workload__axes__M": None}, r"line 1: axes: expected values of \['M', 'N', 'K', 'KB'\]"),
        (WORKLOADS, {"workload__axes__K": 128}, r"line 1: constraints.0: expected K == 32 \* KB to hold, got K = 128, KB = 8"),
        (WORKLOADS, {"workload__inputs__weight_q": {"type": "random"}}, "line 1: workload.inputs.weight_q: expected safetensors for q4_0 blocks"),
        (
            WORKLOADS,
            {"workload__inputs__activation": {"type": "scalar", "value": 1}},
            "line 1: workload.inputs.activation: expected a tensor, got type 'scalar'",
        ),
        (WORKLOADS, {"workload__inputs__activation": None}, r"line 1: workload.inputs: expected \['activation', 'weight_q'\]"),
        (
            WORKLOADS,
            {"workload__inputs__weight_q__path": "/etc/passwd"},
            "line 1: workload.inputs.weight_q.path: expected a path that stays inside its folder",
        ),
        (WORKLOADS, {"workload__axes__M": 2**31}, "line 1: workload.axes.M: .*less than or equal to 2147483647"),
        (WORKLOADS, {"workload__inputs__weight_q__type": None}, "line 1: workload.inputs.weight_q: expected a type: random, scalar or safetensors"),
        (WORKLOADS, {"definition": "gemm_q9"}, "line 1: definition: expected the name of a definition"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_bad_file_is_refused_with_file_field_and_reason(folder, file, fields, said):
    edit(folder / file, **fields)
    with pytest.raises(schema.SchemaError, match=f"^{file}: {said}"):
        schema.load(folder)
    assert issubclass(schema.SchemaError, BadParamError)


LATENCIES = ("latency_ms", "reference_latency_ms", "speedup_factor")


@pytest.mark.parametrize(
    "trace, said",
    [
        ({"solution": None, "evaluation": None}, "solution: expected the name of one in traces/, got null"),
        ({"solution": "nobody"}, f"solution: expected a solution of {NAME}, got 'nobody'"),
        ({"solution": f"pytorch_{NAME}"}, "author: expected the file of this to be pytorch/gemm_q4_0"),
        ({"evaluation__status": "FINE"}, "evaluation.status: expected one of PASSED, .*, got 'FINE'"),
        ({"evaluation__status": "PASSED"}, "evaluation: correctness: expected one with status PASSED"),
        ({"evaluation__performance": {"latency_ms": 1.0}}, "evaluation: performance: expected none with status TIMEOUT"),
        ({"evaluation__correctness": {"max_absolute_error": -1.0}}, "evaluation.correctness.max_absolute_error: expected NaN or at least 0"),
        *(
            ({"evaluation__performance": {field: value}}, f"evaluation.performance.{field}: Input should be a finite number, got ")
            for field in LATENCIES
            for value in (math.inf, "Infinity", math.nan, "NaN")
        ),
        ({"workload__uuid": "another"}, f"workload: expected one of {NAME}'s, as it is in workloads/, got uuid 'another'"),
        ({"evaluation": None}, "evaluation: expected a solution and its evaluation, or neither"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_bad_trace_is_refused(folder, trace, said):
    line = json.loads((folder / WORKLOADS).read_text().splitlines()[0])
    line |= {"solution": f"scaled_mm_{NAME}", "evaluation": {"status": "TIMEOUT", "environment": {"hardware": "h"}, "timestamp": "t"}}
    path = folder / TRACES
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(line) + "\n")
    assert len(schema.load(folder).traces[NAME]) == 1
    for name, value in trace.items():
        *way, last = name.split("__")
        (line[way[0]] if way else line)[last] = value
        if last == "correctness":
            line["evaluation"]["status"] = "INCORRECT_NUMERICAL"
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(schema.SchemaError, match=f"^{TRACES}: line 1: {said}"):
        schema.load(folder)


def test_a_field_twice_is_refused(folder):
    text = (folder / DEFINITION).read_text()
    (folder / DEFINITION).write_text(text.replace('"op_type"', '"name": "gemm_q4_0_other", "op_type"', 1))
    with pytest.raises(schema.SchemaError, match=f"^{DEFINITION}: name: expected this field once, it is there twice"):
        schema.load(folder)


@pytest.mark.parametrize(
    "dtype, value, said", [("int32", 1.5, "finite int32, got 1.5"), ("float32", True, "finite float32, got True"), ("bool", 1, "finite bool, got 1")]
)
def test_a_scalar_of_another_kind_is_refused(tmp_path, dtype, value, said):
    root = small_folder(tmp_path, ("rmsnorm_h4096",))
    path = root / "workloads/rmsnorm/rmsnorm_h4096.jsonl"
    path.write_text(path.read_text().splitlines()[0])
    edit(root / "definitions/rmsnorm/rmsnorm_h4096.json", inputs__epsilon__dtype=dtype)
    edit(path, workload__inputs__epsilon__value=value)
    with pytest.raises(schema.SchemaError, match=f"workload.inputs.epsilon.value: expected a {said}"):
        schema.load(root)


def test_what_is_no_plain_file_or_folder_is_reported(folder):
    (folder / "definitions/gemm_q4_0/gone.json").symlink_to("nowhere")
    (folder / "solutions/elsewhere").symlink_to(folder / "definitions")
    (folder / "workloads/x.jsonl").mkdir()
    _, problems = schema.read(folder)
    assert [str(one).split(":")[0] for one in problems] == ["definitions/gemm_q4_0/gone.json", "solutions/elsewhere", "workloads/x.jsonl"]


def test_two_solutions_of_a_name_are_refused(folder):
    other = small_folder(folder, ("gemm_q5_0_w5a16",)) / "solutions/scaled_mm/gemm_q5_0/gemm_q5_0_w5a16"
    (other / "scaled_mm_gemm_q5_0_w5a16.json").rename(other / f"scaled_mm_{NAME}.json")
    edit(other / f"scaled_mm_{NAME}.json", name=f"scaled_mm_{NAME}")
    with pytest.raises(schema.SchemaError, match=f"name: expected one solution of a name, scaled_mm_{NAME} is there already"):
        schema.load(folder)


@pytest.mark.parametrize(
    "text, said",
    [
        ("def run(:\n", "sources.0.content: expected Python, got SyntaxError"),
        ("def walk(activation, weight_q):\n    return run\n", "spec.entry_point: expected main.py to have 'run' at its top level; it does not"),
    ],
)
def test_a_solution_that_cannot_be_built_is_reported(folder, text, said, capsys):
    edit(folder / SOLUTION, sources=[{"path": "main.py", "content": text}])
    assert cli.main(["schema", "validate", "--root", str(folder), "--no-run"]) == 1
    assert capsys.readouterr().err.startswith(f"{SOLUTION}: {said}")


def test_a_definition_that_copies_a_text_and_says_otherwise_is_refused(folder, capsys):
    copied = DEFINITION.replace(NAME, "gemm_q4_0_copy")
    (folder / copied).write_text((folder / DEFINITION).read_text())
    edit(folder / copied, name="gemm_q4_0_copy", outputs__out__dtype="int32")
    lines = (folder / WORKLOADS).read_text().splitlines()[:1]
    (folder / WORKLOADS.replace(NAME, "gemm_q4_0_copy")).write_text(
        "\n".join(lines).replace(f'"definition":"{NAME}"', '"definition":"gemm_q4_0_copy"') + "\n"
    )
    assert cli.main(["schema", "validate", "--root", str(folder)]) == 1
    assert f"{copied}: gemm_q4_0_copy: " in capsys.readouterr().err  # its inputs' file is not its own, or its output no int32


def test_a_file_of_inputs_that_is_not_there_is_an_error_unless_it_is_a_drawn_one(folder):
    text = (folder / WORKLOADS).read_text().splitlines()[0]
    path = json.loads(text)["workload"]["inputs"]["weight_q"]["path"]
    (folder / path).unlink()
    collection = schema.load(folder)
    schema.draw(collection.definitions[NAME], collection.workloads[NAME][0], root=folder)
    (folder / WORKLOADS).write_text(text.replace(path, "my/weights.safetensors") + "\n")
    collection = schema.load(folder)
    with pytest.raises(schema.SchemaError, match="workload.inputs.weight_q.path: expected the file my/weights.safetensors, there is none"):
        schema.draw(collection.definitions[NAME], collection.workloads[NAME][0], root=folder)
    assert cli.main(["schema", "validate", "--root", str(folder)]) == 1


def test_what_is_no_json_or_no_utf8_is_refused(folder):
    for contents in (b"{", b"", b"[]", b"\xff\xfe"):
        (folder / DEFINITION).write_bytes(contents)
        with pytest.raises(schema.SchemaError, match=f"^{DEFINITION}: "):
            schema.load(folder)


def test_a_file_of_another_kind_or_with_nothing_is_refused(folder):
    (folder / "definitions/gemm_q4_0/notes.txt").write_text("x")
    with pytest.raises(schema.SchemaError, match=r"^definitions/gemm_q4_0/notes.txt: name: expected \*.json in definitions/"):
        schema.load(folder)
    (folder / "definitions/gemm_q4_0/notes.txt").unlink()
    (folder / WORKLOADS).write_text("\n")
    with pytest.raises(schema.SchemaError, match=f"^{WORKLOADS}: expected a line for each, the file is empty"):
        schema.load(folder)


def test_a_workload_twice_is_refused(folder):
    text = (folder / WORKLOADS).read_text()
    (folder / WORKLOADS).write_text(text + text.splitlines()[0] + "\n")
    with pytest.raises(schema.SchemaError, match="workload.uuid: expected one workload of an uuid"):
        schema.load(folder)


def test_a_folder_with_nothing_in_it_is_an_error(tmp_path, capsys):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(schema.SchemaError, match="there is no"):
            schema.load(folder)
        for command in (["list"], ["validate"], ["show", NAME], ["run"], ["draw", "--out", str(tmp_path / "out")]):
            assert cli.main(["schema", *command, "--root", str(folder)]) != 0
            assert "there is no" in capsys.readouterr().err
    (tmp_path / "definitions").mkdir()
    with pytest.raises(schema.SchemaError, match="there is no definition"):
        schema.load(tmp_path)


def test_every_problem_is_reported_one_by_one(folder, capsys):
    edit(folder / SOLUTION, author="somebody")
    edit(folder / WORKLOADS, workload__axes__K=128)
    collection, problems = schema.read(folder)
    assert [str(one).split(":")[0] for one in problems] == [SOLUTION, WORKLOADS] and list(collection.definitions) == [NAME]
    assert cli.main(["schema", "validate", "--root", str(folder), "--no-run"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert cli.main(["schema", "validate", "--root", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert len(err.splitlines()) == 3 and err.startswith(SOLUTION) and "3 problems" in out
    assert err.splitlines()[2].startswith(f"{DEFINITION}: workloads: expected one at least")  # none is left that is right
    with pytest.raises(schema.SchemaError, match="1 more problems: scaled-mm schema validate"):
        schema.load(folder)


@pytest.mark.parametrize(
    "text, said",
    [
        (
            TEXT.replace("torch.zeros(", "float('nan') * torch.zeros("),
            "reference: expected finite numbers, 240 of 240 of output out are NaN or infinite",
        ),
        (TEXT.replace("torch.zeros(", "1 / torch.zeros("), "reference: expected finite numbers, 240 of 240"),
        (TEXT.replace("weight_q.shape[0]", "3"), r"reference: output out: expected \[5, 48\], got \[5, 3\]"),
        (TEXT.replace("device=activation.device", "dtype=torch.int32"), "reference: output out: expected float32, got int32"),
        (TEXT.replace("    return torch", "    raise KeyError('x')\n    return torch"), "reference: expected it to run, got KeyError: 'x'"),
        (TEXT.replace("import torch", "import no_such_package"), "reference: expected a text that can be executed, got ModuleNotFoundError"),
        (TEXT.replace("    return ", "    raise SystemExit(0)\n    return "), "reference: expected it to run, got SystemExit: 0"),
        (TEXT.replace("    return ", "    activation.zero_()\n    return "), "reference: expected it to leave input activation as it was"),
        (TEXT.replace("    return ", "    return 1, "), r"reference: expected 1 outputs \(out\), got 2"),
    ],
    ids=["nan", "infinity", "shape", "dtype", "raises", "import", "exits", "changes", "outputs"],
)
def test_a_reference_that_gives_nonsense_is_refused(folder, text, said, capsys):
    edit(folder / DEFINITION, reference=text)
    assert cli.main(["schema", "validate", "--root", str(folder)]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"{DEFINITION}: {NAME}: ") and re.search(said, err), err
    assert cli.main(["schema", "validate", "--root", str(folder), "--no-run"]) == 0
    assert cli.main(["schema", "run", "--root", str(folder)]) == 2  # nothing passes by such a reference


def test_files_of_inputs_that_are_not_what_the_definition_says_are_refused(folder):
    import torch
    from safetensors.torch import save_file

    collection = schema.load(folder)
    definition, workload = collection.definitions[NAME], collection.workloads[NAME][0]
    ((path, tensors),) = schema.blob_tensors(definition, workload).items()
    for spoilt, said in (
        ({"other": tensors["weight_q"]}, "expected the tensor 'weight_q' of input weight_q, got other"),
        ({"weight_q": tensors["weight_q"][:1].clone()}, r"weight_q: expected torch.int8 \[48, 8, 18\], got torch.int8 \[1, 8, 18\]"),
        ({"weight_q": tensors["weight_q"].view(torch.uint8)}, "weight_q: expected torch.int8 .*, got torch.uint8"),
    ):
        save_file(spoilt, folder / path)
        with pytest.raises(schema.SchemaError, match=said):
            schema.draw(definition, workload, root=folder)
    (folder / path).write_bytes(b"nothing")
    with pytest.raises(schema.SchemaError, match="expected a safetensors file"):
        schema.draw(definition, workload, root=folder)
