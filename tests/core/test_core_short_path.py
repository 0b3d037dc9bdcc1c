"""The short way from Python to the core (csrc/python), on a machine that pretends to have a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from scaled_mm.core import fast
from scaled_mm.errors import BadTensorShapeError, Status
from scaled_mm.products.gemm import GEMM, scaled_mm

SCRIPT = Path(__file__).with_name("short_path_script.py")


@pytest.fixture(scope="module")
def answer(fake_gpu, short_path):
    done = fake_gpu.run([sys.executable, SCRIPT, fake_gpu.kernels, short_path])
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout)


def test_a_plain_product_takes_the_short_path_and_is_right(answer):
    assert answer["plain"] == "right"


def test_a_call_of_any_kind_is_planned_and_run_with_a_workspace_if_its_kernel_needs_one(answer):
    ran = answer["runs"]
    assert (ran["plain"], ran["plain workspaces"]) == ("right", 0)
    assert ran["zero points"] == "right" and len(ran["workspaces"]) == 1 and ran["workspaces"][0] > 0
    assert ran["grouped"] == "right"
    left = dict.fromkeys(("a batch", "a batch of b", "no b", "negated"), "left")
    right = dict.fromkeys(("plain", "zero points", "grouped", "no rows", "no columns"), "right")
    assert ran["made"] == {**right, **left, "another K": f"status {Status.BAD_TENSOR_SHAPE.value}"}


def test_what_a_call_lacks_is_left_to_the_operator_which_names_it(answer):
    ran = answer["runs"]
    assert (ran["without offsets"], ran["twelve"]) == ("left", "left")
    assert ran["a list"] == "run: expected 5 arguments and a tuple of tensors"


def test_a_lazily_negated_scale_is_left_to_the_operator_with_gaps_or_without(answer):
    assert {answer[name] for name in ("negated with gaps", "negated and packed", "negated by name")} == {"left"}


def test_autograd_is_told_that_an_output_has_changed(answer):
    assert answer["calls"] == 1 and answer["version moved"]


def test_an_output_that_wants_a_gradient_is_left_to_the_operator(answer):
    assert answer["an output that wants a gradient"] == "left"


def test_an_output_of_inference_mode_is_written_inside_and_left_to_the_operator_outside(answer):
    assert answer["an output of inference mode, inside"] == "right" and answer["an output of inference mode, outside"] == "left"


def test_a_weight_may_be_read_early_only_if_it_is_a_constant_one(answer):
    assert answer["constant b: a tensor, a weight that is not, one that is"] == [False, False, True]


def test_tracing_sees_the_operator_and_not_the_short_path(answer):
    assert answer["traced"] and answer["calls while tracing"] == 0


@pytest.mark.parametrize("made", ["a tensor", "a status", "left", "out is given", "another device"])
def test_the_extension_allocates_out_on_the_current_device_or_leaves_the_product_to_python(monkeypatch, made):
    a, b, calls = torch.zeros(2, 16, dtype=torch.int8), torch.zeros(16, 8, dtype=torch.int8), []

    class Extension:
        def multiply(self, *arguments):
            calls.append(arguments)
            return {"a tensor": torch.ones(2, 8), "a status": Status.BAD_TENSOR_SHAPE.value}.get(made, NotImplemented)

    monkeypatch.setattr(fast, "module", Extension())
    monkeypatch.setattr(fast, "_handles", {3: (None, 77)})
    monkeypatch.setattr(fast, "_current_device", lambda: 2 if made == "another device" else 3)
    inputs, out = (a, b, *[None] * 7), torch.zeros(2, 8) if made == "out is given" else None
    if made == "a status":
        with pytest.raises(BadTensorShapeError):
            fast.run(GEMM.spec, inputs, torch.float32, out, True, 5)
    else:
        found = fast.run(GEMM.spec, inputs, torch.float32, out, True, 5)  # of tensors on a CPU: left to the operator
        assert torch.equal(found, torch.ones(2, 8)) if made == "a tensor" else found is NotImplemented
    expected = [(77, GEMM.spec.code, 3, True, torch.float32, 2, 5, inputs)]
    assert len(calls) == 0 if made in ("out is given", "another device") else calls == expected


@pytest.mark.parametrize("handles", [{}, {0: (None, 77)}], ids=["no GPU was used", "a forked process of one that used a GPU"])
def test_a_cpu_product_needs_no_current_gpu(monkeypatch, handles):
    def refuse() -> int:
        raise RuntimeError("Found no NVIDIA driver on your system.")

    monkeypatch.setattr(fast, "module", object())
    monkeypatch.setattr(fast, "_handles", handles)
    monkeypatch.setattr(fast, "_current_device", refuse)
    a, b = torch.ones(2, 16, dtype=torch.int8), torch.ones(16, 8, dtype=torch.int8)
    assert torch.equal(scaled_mm(a, b, torch.ones(2, 1), torch.ones(1, 8), out_dtype=torch.float32), torch.full((2, 8), 16.0))
