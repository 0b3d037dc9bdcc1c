"""Records and the numbers made from them."""

import pytest
from pydantic import ValidationError

from scaled_mm.measure.record import Result, describe, write_atomically
from scaled_mm.measure.stats import geometric_mean


@pytest.mark.parametrize("fields", [{}, {"us": 1.0}, {"us": 1.0, "samples": [1.0], "failed": "x"}])
def test_a_result_is_either_measured_or_failed(fields):
    with pytest.raises(ValidationError):
        Result(**fields)


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = write_atomically(tmp_path / "deep" / "x.json", "1")
    with pytest.raises(TypeError):
        write_atomically(path, None)
    assert path.read_text() == "1"
    assert [file.name for file in path.parent.iterdir()] == ["x.json"]


def test_a_recorded_message_is_one_line():
    assert describe(RuntimeError("a\nb")) == "RuntimeError: a"
    assert describe(KeyError()) == "KeyError"


def test_geometric_mean():
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    with pytest.raises(ValueError, match="at least one"):
        geometric_mean([])
