"""What the first CUDA call of a process loads, with stand-ins for what needs a GPU: no thread, no driver and no compiler may keep it from loading."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

STAND_INS = """
import atexit, sys, threading
import torch
from scaled_mm.core import binding, dispatcher, fast
from scaled_mm.jit import library

calls = []
torch.version.cuda = "13.0"
binding.library = lambda: calls.append("core")
binding.compile_fallbacks = lambda arch: calls.append(f"fallbacks of {arch}")
fast.arch_of = lambda device: "sm90"
torch.cuda.current_device = lambda: 0
fast.build = lambda: calls.append("fast path, built")
fast.load = lambda: calls.append("fast path")
library.torch_library = lambda: "operators.so"
torch.ops.load_library = lambda path: calls.append(path)

def load(**options):
    try:
        dispatcher.load_cuda_operators(**options)
        dispatcher.load_cuda_operators(**options)
    except BaseException as error:
        calls.append(f"{type(error).__name__}: {error}")
    print(sorted(calls))
"""


def printed(script: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", STAND_INS + textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return eval(done.stdout)  # noqa: S307 - a list of strings that the script printed


LOADED = ["core", "fallbacks of sm90", "fast path", "fast path, built", "operators.so"]


def test_a_first_call_loads_everything_once():
    assert printed("load()") == LOADED


def test_without_kernels_the_device_is_not_asked_for():
    script = """
        def refuse():
            raise RuntimeError("Found no NVIDIA driver on your system")
        torch.cuda.current_device = refuse
        load(compiles_kernels=False)
    """
    assert printed(script) == [call for call in LOADED if "fallbacks" not in call]


@pytest.mark.parametrize("error", ['RuntimeError("Found no NVIDIA driver on your system")', 'OSError("read-only file system")'])
def test_what_keeps_the_fallback_from_compiling_does_not_keep_the_operators_from_loading(error):
    script = f"""
        def refuse(*_):
            raise {error}
        binding.compile_fallbacks = refuse
        load()
    """
    assert printed(script) == [call for call in LOADED if "fallbacks" not in call]


def test_a_first_call_on_a_thread_that_outlives_the_main_thread():
    script = """
        def serve():
            threading.main_thread().join()
            load()
        threading.Thread(target=serve).start()
    """
    assert set(LOADED) - {"fast path, built"} <= set(printed(script)) <= set(LOADED)


def test_a_first_call_at_exit():
    assert set(LOADED) - {"fast path, built"} <= set(printed("atexit.register(load)")) <= set(LOADED)


def test_a_first_call_where_no_thread_can_be_started():
    script = """
        def refuse(self):
            raise RuntimeError("can't start new thread")
        threading.Thread.start = refuse
        load()
    """
    assert printed(script) == [call for call in LOADED if call != "fast path, built"]


def test_a_load_that_failed_is_tried_again():
    script = """
        def fail_once(path):
            torch.ops.load_library = lambda path: calls.append(path)
            raise OSError("no space left")
        torch.ops.load_library = fail_once
        try:
            dispatcher.load_cuda_operators()
        except OSError:
            calls.clear()
        load()
    """
    assert printed(script) == LOADED
