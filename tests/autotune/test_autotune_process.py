"""The isolated process, with a real child that crashes, hangs and prints."""

from __future__ import annotations

import time

import pytest
from autotune_data import child_command

from scaled_mm.autotune.measure import Measurer
from scaled_mm.errors import InternalError


@pytest.fixture
def measurer(tmp_path):
    with Measurer({}, child_command(tmp_path), answer_timeout_s=1.5, start_timeout_s=30) as made:
        yield made


def ask(measurer, row: str) -> dict:
    return measurer.measure({"row": row, "library": "none", "M": 1, "N": 2, "K": 3})


def test_a_child_answers_one_cell_after_another_whatever_is_printed(measurer):
    for _ in range(3):
        assert ask(measurer, "works") == {"outcome": "timed", "us": 5.0, "samples": [5.0], "spread": 0.0}
    assert measurer.starts == 1


def test_a_crash_is_the_outcome_of_its_cell_and_the_next_one_gets_a_new_child(measurer):
    ask(measurer, "works")
    assert ask(measurer, "crashes") == {"outcome": "crashed", "message": "its process ended with status 7: illegal memory access"}
    assert ask(measurer, "works")["outcome"] == "timed"
    assert ask(measurer, "aborts")["message"].startswith("its process ended with signal SIGABRT")
    assert ask(measurer, "works")["outcome"] == "timed" and measurer.starts == 3


def test_a_hang_is_killed_in_time_and_the_next_cell_gets_a_new_child(measurer):
    begin = time.monotonic()
    assert ask(measurer, "hangs") == {"outcome": "hung", "message": "no answer in 1.5 s; its process was killed"}
    assert time.monotonic() - begin < 10
    assert ask(measurer, "works")["outcome"] == "timed" and measurer.starts == 2


def test_a_refused_row_keeps_its_child_and_one_that_lost_the_gpu_does_not(measurer):
    assert ask(measurer, "fails") == {"outcome": "failed", "message": "RuntimeError: refused"}
    assert measurer.starts == 1
    assert ask(measurer, "loses the GPU")["outcome"] == "failed"
    assert ask(measurer, "works")["outcome"] == "timed" and measurer.starts == 2


def test_a_child_that_cannot_start_is_an_error_with_its_last_words(tmp_path):
    with Measurer({"start": "fails"}, child_command(tmp_path)) as measurer:
        with pytest.raises(InternalError, match="the process that times kernels ended with status 4: no such GPU"):
            ask(measurer, "works")


def test_leaving_ends_the_child(tmp_path):
    with Measurer({}, child_command(tmp_path)) as measurer:
        ask(measurer, "works")
        child = measurer._child
    assert child.poll() is not None
