"""`scaled-mm table explain M N K --format`: who serves a product with a weight in a GGUF format."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from scaled_mm.cli import table as command
from scaled_mm.gguf_formats import WEIGHT_FORMATS
from scaled_mm.kernels.registry import family_of
from scaled_mm.tables import available_tables, configs_dir, load_table
from scaled_mm.tables.rules import shared_memory_of


@pytest.fixture
def explain(capsys):
    """explain(*arguments) -> (exit status, stdout)"""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)

    def explain(*arguments):
        status = command.run(parser.parse_args(["explain", *map(str, arguments)]))
        return status, capsys.readouterr().out

    return explain


@pytest.mark.parametrize("arch", [arch for arch, _ in available_tables()])
@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
def test_it_names_the_row_of_the_table_what_it_costs_and_what_auto_is(explain, arch, fmt):
    table = load_table(arch)
    for tokens in (1, 16, 64, 4096):
        auto = next(rule.mode for rule in table.gguf.auto if rule.m is None or tokens <= rule.m)
        minima = fmt in ("q4_1", "q5_1")
        selection = table.gguf.select(tokens, 4096, 14336, mode=auto, minima=minima)
        stages = family_of(selection.row).stages(selection.row, fmt, shared_memory_of(table))
        status, out = explain(tokens, 4096, 14336, "--arch", arch, "--format", fmt)
        assert status == 0 and f"a {fmt} weight, K=14336: {selection.row.name}\n" in out and selection.reason in out
        assert (f"{stages} stages of the weight" if stages > 1 else "no stages") in out and f"auto is {auto}" in out
        of_q8_1 = table.gguf.select(tokens, 4096, 14336, mode="w4a8", minima=minima).row.name
        assert (f"with q8_1 activations {of_q8_1}" in out) is (of_q8_1 != selection.row.name)
        tokens_of_a_tile, rows_of_a_tile, _ = selection.row.tile
        assert f"a tile is {tokens_of_a_tile} tokens x {rows_of_a_tile} rows" in out
        assert ("a tile has 128 tokens" in out) is (tokens_of_a_tile > 128)


BELOW_8_BITS = tuple(name for name, one in WEIGHT_FORMATS.items() if one.bits < 8)


@pytest.mark.parametrize("arch, one_more", [("sm80", BELOW_8_BITS), ("sm89", ()), ("sm90", tuple(WEIGHT_FORMATS))])
@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
def test_it_says_what_one_or_two_tokens_that_lie_well_have(explain, arch, one_more, fmt):
    _, out = explain(1, 4096, 4096, "--arch", arch, "--format", fmt)
    staged = arch == "sm89" and WEIGHT_FORMATS[fmt].bits == 8  # one stage: no kernel of this row reads in place
    assert ("take shared memory too, if they fit" in out) is ("one or two such tokens have a kernel of their own" in out) is not staged
    assert ("with one stage more, if that fits" in out) is (fmt in one_more)
    _, out = explain(64, 4096, 4096, "--arch", arch, "--format", fmt)
    assert "one or two such tokens" not in out and "take shared memory too" not in out


def test_json_has_the_choice_and_the_row_of_the_format(explain):
    table = load_table("sm90")
    status, out = explain(512, 4096, 4096, "--format", "q8_0", "--json")
    answer, selection = json.loads(out), table.gguf.select(512, 4096, 4096, mode="w16a16")
    assert status == 0 and (answer["kernel"], answer["bucket"], answer["reason"]) == (selection.row.name, selection.bucket_index, selection.reason)
    memory = family_of(selection.row).shared_memory(selection.row, "q8_0", shared_memory_of(table))
    assert answer["row"]["estimate"]["shared_memory_bytes"] == memory and answer["auto"] == "w16a16" and answer["format"] == "q8_0"
    exact, rounding = (json.loads(explain(12, 4096, 4096, "--format", fmt, "--json")[1])["kernel"] for fmt in ("q4_0", "q5_1"))
    of_minima = table.gguf.select(12, 4096, 4096, mode="w16a16", minima=True)
    assert rounding == of_minima.row.name != exact == table.gguf.select(12, 4096, 4096, mode="w16a16").row.name
    assert set(answer["modes"]) == {"w4a8", "w4a16", "w16a16"}


@pytest.mark.parametrize("modes, first", [("[{mode: w4a16}]", "gguf_mma_16x16_x2"), ("[{m: 8, mode: w4a16}, {mode: w4a8}]", "gguf_mma_32x32_x2")])
def test_a_row_for_q8_1_activations_is_told_apart(explain, tmp_path, modes, first):
    text = (configs_dir() / "sm80.yaml").read_text()
    head, block = text.split("\ngguf:\n")
    block = block.replace("auto:\n    - {mode: w4a16}\n", f"auto: {modes}\n", 1)
    block = block.replace("buckets:\n", "buckets:\n    - {m: 16, mode: w4a8, kernel: gguf_mma_32x32_x2}\n", 1)
    path = tmp_path / "own.yaml"
    path.write_text(f"{head}\ngguf:\n{block}")
    status, out = explain(9, 4096, 4096, "--table", path, "--format", "q4_0")
    assert status == 0 and out.splitlines()[0].endswith(f": {first}")
    assert ("note    with q8_1 activations gguf_mma_32x32_x2" in out) is (first != "gguf_mma_32x32_x2")


def test_the_choice_of_every_mode_is_told_apart_and_follows_the_number_of_sms(explain, tmp_path):
    head, block = (configs_dir() / "sm90.yaml").read_text().split("\ngguf:\n")
    block = "".join(line for line in block.splitlines(keepends=True) if "mode: w16a16, " not in line)
    block = block.replace("  buckets:\n", "  buckets:\n    - {mode: w16a16, kernel: fastest}\n", 1)
    path = tmp_path / "own.yaml"
    path.write_text(f"{head}\ngguf:\n{block}")
    section = load_table(path).gguf
    many, few = (json.loads(explain(200, 8192, 4096, "--table", path, "--format", "q4_0", "--json", *sms)[1]) for sms in ((), ("--sms", 66)))
    assert many["kernel"] == section.select(200, 8192, 4096, mode="w16a16").row.name != few["kernel"]
    assert many["modes"]["w4a16"]["kernel"] == section.select(200, 8192, 4096, mode="w4a16").row.name == few["modes"]["w4a16"]["kernel"]
    _, out = explain(4, 4096, 4096, "--table", path, "--format", "q4_0")
    assert ": gguf_mma_16x8_x2\n" in out and "note    in mode w16a16, as for float32 activations, gguf_wgmma_cluster_128x16_" in out
    _, out = explain(200, 8192, 4096, "--table", path, "--format", "q4_0")
    assert "note    in mode w4a16, as for float32 outputs and unpacked weights, gguf_wgmma_128x256_k16_x2" in out


def test_quantized_activations_are_staged_and_keep_wgmma_where_few_tokens_that_lie_well_do_not(explain):
    for rows, reads, stages in ((12544, "gguf_mma_16x16_x2", "gguf_mma_16x16_x2"), (14336, "gguf_mma_16x16_x2", "gguf_wgmma_128x16_k16_x3")):
        answer = json.loads(explain(11, rows, 4096, "--format", "q4_0", "--json")[1])
        assert (answer["kernel"], answer["modes"]["w4a8"]["kernel"]) == (reads, stages)


def test_a_tuned_table_without_the_section_leaves_it_to_the_architecture(explain, tmp_path):
    text = (configs_dir() / "sm90.yaml").read_text()
    path = tmp_path / "own.yaml"
    path.write_text(text[: text.index("\ngguf:\n") + 1])
    assert load_table(path).gguf is None
    for how in ((), ("--json",)):
        assert explain(16, 4096, 4096, "--table", path, "--format", "q4_0", *how) == explain(
            16, 4096, 4096, "--arch", "sm90", "--format", "q4_0", *how
        )


@pytest.mark.parametrize("fmt", ["q4_0", "q8_0"])
def test_it_refuses_what_the_core_refuses_and_no_smaller_product(explain, fmt):
    import scaled_mm as sm

    edge, large, long = 2**30 + 1, 2**31 - 1, 2**31 - 32  # edge times 2^30 is above 2^60
    cases = [
        ((1, 1, 31), "multiple of 32"),
        ((1, 1, 32), None),
        ((3, 5, 0), None),
        ((edge, 2**30, 32), "out"),
        ((2**30, 2**30, 32), None),
        ((large, 1, long), "activation"),
        ((2**29, 1, long), None),
        ((large, 0, long), "activation"),
        ((1, large, long), "weight"),
        ((0, large, long), "weight"),
        ((1, 2**30, 2**30 + 32), None if WEIGHT_FORMATS[fmt].block_bytes <= 18 else "weight"),
    ]
    for (tokens, rows, k), reason in cases:
        status, out = explain(tokens, rows, k, "--format", fmt, "--json")
        answer = json.loads(out)
        described = dict(out=sm.TensorDesc((rows, tokens), torch.float32, strides=(1, rows)), activation=sm.TensorDesc((tokens, k), torch.float16))
        if reason is None:
            assert status == 0 and answer["kernel"] is not None
            sm.create_block_descriptor(sm.Handle("cpu"), weight=sm.TensorDesc((rows, k), fmt), **described).destroy()
        else:
            assert status == 1 and answer["kernel"] is None and reason in answer["reason"] and answer["format"] == fmt
            assert explain(tokens, rows, k, "--format", fmt)[1].startswith(f"M={tokens} tokens, N={rows} rows of a {fmt} weight, K={k}: refused\n")
            with pytest.raises(sm.ScaledMMError):
                sm.create_block_descriptor(sm.Handle("cpu"), weight=sm.TensorDesc((rows, k), fmt), **described)


def test_what_does_not_go_together_is_refused(explain, capsys):
    with pytest.raises(SystemExit) as caught:
        explain(1, 1, 32, "--format", "q8_1")
    assert caught.value.code == 2 and "--format" in capsys.readouterr().err


def test_a_product_without_tokens_or_rows_has_no_notes_but_that(explain):
    for M, N in ((0, 4096), (1, 0)):
        _, out = explain(M, N, 4096, "--arch", "sm90", "--format", "q4_0")
        assert [line.strip() for line in out.splitlines() if "note" in line] == ["note    there is nothing to compute: no kernel is launched"]
