"""Grouped products through the C core on a machine that pretends to have a GPU: dispatch, launches and refusals."""

from __future__ import annotations

import json

import pytest

from scaled_mm.measure.shapes import random_cases
from scaled_mm.tables import available_tables, load_table


@pytest.fixture
def ask(fake_gpu):
    def ask(function: str, *arguments):
        done = fake_gpu.python(function, *arguments, script="fake_gpu_grouped.py")
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout)

    return ask


def test_every_grouped_product_is_launched_with_what_gives_the_bits_of_the_reference(ask, fake_gpu):
    answer = ask("grouped_products", fake_gpu.kernels, 600)
    table = load_table("sm90").grouped
    assert sum(answer["rows"].values()) == 600 and answer["rows"][table.fallback] > 100 and len(answer["rows"]) > 2, answer


def test_the_expected_number_of_rows_selects_the_kernel_config(ask, fake_gpu):
    answer = ask("expected_rows", fake_gpu.kernels)
    assert answer.pop("negative") == ["BAD_PARAM", "expected_rows: expected a number of rows below 2^30, or 0 for all, got -1"]
    assert answer.pop("with the other flag") == answer["64"][0]
    assert len(answer) == 7 and all(row == wanted for row, wanted in answer.values()), answer
    assert len({row for row, _ in answer.values()}) >= 3, answer


def test_what_calculate_and_a_forced_row_refuse(ask, fake_gpu):
    answer = ask("grouped_refusals", fake_gpu.kernels)
    size = answer.pop("size")
    expected = {
        "no workspace": ("INSUFFICIENT_WORKSPACE", f"workspace: expected at least {size} bytes, got 0"),
        "small workspace": ("INSUFFICIENT_WORKSPACE", f"workspace: expected at least {size} bytes, got {size - 1}"),
        "workspace in a": ("BAD_PARAM", "workspace: expected memory apart from every tensor, got an overlap with a"),
        "no offsets": ("NULL_POINTER", "expert_offsets: expected a data pointer, got null"),
        "no bias": ("NULL_POINTER", "bias: expected a data pointer, got null"),
        "odd pointer": ("BAD_TENSOR_ALIGNMENT", "a: expected a data pointer aligned to 16 bytes as the descriptor says"),
        "unknown row": ("KERNEL_NOT_FOUND", "kernel: expected a grouped row of sm90 ("),
        "unaligned K": ("BAD_PARAM", "cannot take this product: the row stride of a is not a multiple of the row's alignment"),
        "fine": ("SUCCESS", ""),
    }
    assert answer.keys() == expected.keys()
    for name, (status, message) in answer.items():
        assert status == expected[name][0] and expected[name][1] in message, (name, status, message)


@pytest.mark.parametrize("arch", [arch for arch, _ in available_tables()])
def test_every_architecture_has_grouped_rows_and_all_of_them_are_used(arch):
    table = load_table(arch).grouped
    sizes = [(case.M, case.N // 16 * 16, case.K // 16 * 16) for case in random_cases(1500, 1)]
    used = {table.fastest(*size, count=experts)[0][1].name for size in sizes for experts in (1, 8, 256)} | {table.fallback}
    assert used == {row.name for row in table.rows} and all(row.section == "grouped" for row in table.rows)
    assert table.row(table.fallback).alignment == (1, 1, 1)
