"""The cuBLASLt peer against a library that only counts: what is created is destroyed, and no status is dropped."""

import ctypes

import pytest
import torch
from bench_data import CPU, SMALL

from scaled_mm.bench.int8.cublaslt import CublasLt
from scaled_mm.bench.int8.inputs import Inputs, WeightSets
from scaled_mm.measure import energy


class Counting:
    """Every function is there. failing: the name of one that fails with status 7."""

    def __init__(self, failing: str = ""):
        self.calls: list[str] = []
        self._failing = failing

    def __getattr__(self, name: str):
        def call(*arguments: object) -> int:
            self.calls.append(name.removeprefix("cublasLt"))
            if name == "cublasLtMatmulAlgoGetHeuristic":
                arguments[-1]._obj.value = 1
            return 7 if name == f"cublasLt{self._failing}" else 0

        return call


def make_inputs() -> Inputs:
    generator = torch.Generator(CPU).manual_seed(1)
    return Inputs(SMALL, WeightSets(SMALL.N, SMALL.K, CPU, generator, sets=2), generator)


def peer_of(library: Counting) -> CublasLt:
    peer = CublasLt()
    peer._library = library
    return peer


def test_what_is_created_is_destroyed():
    library = Counting()
    peer = peer_of(library)
    calls = peer.prepare(make_inputs())
    assert len(calls) == 2 and not [name for name in library.calls if name.endswith("Destroy")]
    peer.release()
    made, gone = ([name.removesuffix(end) for name in library.calls if name.endswith(end)] for end in ("Create", "Destroy"))
    assert sorted(made) == sorted(gone) == ["MatmulDesc", "MatmulPreference", *["MatrixLayout"] * 3]
    peer.release()
    assert len([name for name in library.calls if name.endswith("Destroy")]) == 5  # once each


@pytest.mark.parametrize("failing", ["MatmulDescCreate", "MatrixLayoutCreate", "MatmulAlgoGetHeuristic", "MatmulPreferenceSetAttribute"])
def test_a_status_is_an_error_that_names_the_function(failing):
    with pytest.raises(RuntimeError, match=f"cublasLt{failing}: status 7"):
        peer_of(Counting(failing)).prepare(make_inputs())


def test_the_heuristic_is_as_large_as_the_librarys():
    from scaled_mm.bench.int8.cublaslt import _Heuristic

    assert ctypes.sizeof(_Heuristic) == 96


def test_a_meter_that_is_missing_says_why(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    energy._meter.cache_clear()
    device = torch.device("cuda:0")
    assert energy.meter(device) is None and energy.unavailable(device) == "nvidia-ml-py is not installed"
    energy._meter.cache_clear()
