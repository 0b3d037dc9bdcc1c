"""Texts and windows of calibration and evaluation."""

from __future__ import annotations

import hashlib

import pytest
import torch

import scaled_mm as sm
from scaled_mm.models.data import default_text, windows


class Letters:
    def __call__(self, text, **_):
        return type("Encoding", (), {"input_ids": torch.arange(len(text))[None]})


DIGESTS = {False: "ca34460a0242", True: "bda3b7069734"}


def test_the_texts_are_those_of_the_recorded_figures():
    """Decision 0025 and the guide to models have figures that follow from them."""
    for of_evaluation, digest in DIGESTS.items():
        assert hashlib.sha256(default_text(of_evaluation).encode()).hexdigest().startswith(digest)


def test_no_paragraph_is_in_both_texts():
    calibration, evaluation = (set(default_text(of_evaluation).split("\n\n")) for of_evaluation in (False, True))
    assert not calibration & evaluation and min(sum(map(len, text)) for text in (calibration, evaluation)) > 50_000


CASES = [(1000, 10, 64, 10), (200, 10, 64, 3), (40, 10, 64, 1), (640, 10, 64, 10), (64, 1, 64, 1)]


@pytest.mark.parametrize("length, count, tokens, expected", CASES)
def test_windows_are_spread_over_the_text_without_overlap(length, count, tokens, expected):
    found = windows("x" * length, Letters(), count, tokens)
    assert len(found) == expected and all(window.shape == (1, min(tokens, length)) for window in found)
    starts = [int(window[0, 0]) for window in found]
    assert starts[0] == 0 and all(after - before >= min(tokens, length) for before, after in zip(starts, starts[1:]))
    assert expected == 1 or starts[-1] > length - 2 * tokens - length // count


def test_a_text_without_tokens_is_refused():
    with pytest.raises(sm.ScaledMMError, match="text: expected at least 2 tokens, got 1"):
        windows("x", Letters(), 1, 8)
