"""Block-scaled products through the C core on a machine that pretends to have a GPU: dispatch, launches and refusals."""

from __future__ import annotations

import json

import pytest

from scaled_mm.measure.shapes import random_cases
from scaled_mm.tables import available_tables, load_table


@pytest.fixture
def ask(fake_gpu):
    def ask(function: str, *arguments):
        done = fake_gpu.python(function, *arguments, script="fake_gpu_block_scaled.py")
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout)

    return ask


def test_every_block_scaled_product_is_launched_with_what_gives_the_bits_of_the_reference(ask, fake_gpu):
    answer = ask("products", fake_gpu.kernels, 800)
    table = load_table("sm90").block_scaled
    assert sum(answer["rows"].values()) == 800 and answer["rows"][table.fallback] > 100 and len(answer["rows"]) > 2, answer


def test_what_calculate_and_a_forced_row_refuse(ask, fake_gpu):
    answer = ask("refusals", fake_gpu.kernels)
    assert answer.pop("right")
    expected = {
        "no a_scale": ("NULL_POINTER", "a_scale: expected a data pointer, got null"),
        "no bias": ("NULL_POINTER", "bias: expected a data pointer, got null"),
        "odd pointer": ("BAD_TENSOR_ALIGNMENT", "a: expected a data pointer aligned to 16 bytes as the descriptor says"),
        "overlap": ("BAD_PARAM", "out: expected memory apart from every input, got an overlap with a"),
        "unknown row": ("KERNEL_NOT_FOUND", "kernel: expected a block-scaled row of sm90 ("),
        "unaligned K": ("BAD_PARAM", "cannot take this product: the row stride of a is not a multiple of the row's alignment"),
        "small blocks": ("BAD_PARAM", "cannot take this product: the blocks of scales are smaller than the row's kernel takes"),
        "fine": ("SUCCESS", ""),
    }
    assert answer.keys() == expected.keys()
    for name, (status, message) in answer.items():
        assert status == expected[name][0] and expected[name][1] in message, (name, status, message)


@pytest.mark.parametrize("arch", [arch for arch, _ in available_tables()])
def test_every_architecture_has_block_scaled_rows_and_all_of_them_are_used(arch):
    table = load_table(arch).block_scaled
    used = {table.fastest(case.M, case.N // 16 * 16, case.K // 16 * 16)[0][1].name for case in random_cases(1500, 1)} | {table.fallback}
    assert used == {row.name for row in table.rows} and all(row.section == "block_scaled" for row in table.rows)
    assert table.row(table.fallback).alignment == (1, 1, 1)
