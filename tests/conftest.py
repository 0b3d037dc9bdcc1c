"""Fixtures shared by all tests: the device; the random numbers of torch; the smoke set; and the rule that GPU tests are left out in one visible
line."""

from __future__ import annotations

import os
import signal
import zlib

import pytest
from smoke import SMOKE

os.environ["SCALED_MM_JIT"] = "wait"  # of child processes too: tests name the kernel that must run. Tests of the other modes set their own
# Before torch is loaded here and in processes that tests start. Where other programs use the CPU too, its threads otherwise spin while they wait:
# the products of the reference then take milliseconds instead of microseconds.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch  # noqa: E402

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts programs in the background, and they their children, which tests interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if getattr(item, "originalname", None) in SMOKE.get(item.path.name, ()) and not item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.smoke)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter, exitstatus, config) -> None:
    if torch.cuda.is_available():
        return
    count = sum(1 for report in terminalreporter.stats.get("skipped", []) if "no CUDA GPU" in str(report.longrepr))
    if count:
        terminalreporter.write_line(f"not run: {count} GPU tests, there is no CUDA GPU here (they run by `pytest -m gpu`)")


@pytest.hookimpl(tryfirst=True)  # before fixtures, which may draw
def pytest_runtest_setup(item: pytest.Item) -> None:
    """torch's default generators start alike whichever tests ran before: a test has the same data alone, in a suite and on every machine."""
    torch.manual_seed(zlib.crc32(item.nodeid.encode()))


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param
