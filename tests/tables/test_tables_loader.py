"""Whatever is wrong with a table is named with its file, line and reason; what is right is read as it stands."""

from __future__ import annotations

import pickle
import re

import pytest

from scaled_mm.errors import ArchitectureNotSupportedError, BadParamError, KernelNotFoundError, ScaledMMError, Status
from scaled_mm.kernels.family import FAMILIES
from scaled_mm.tables import Bucket, TableError, TileTable, check_table, load_table
from scaled_mm.tables.schema import Problem

LARGE = "{name: large, family: c3x, tile: [128, 128, 128], schedule: pingpong}"
ANY = "{name: any, family: generic, tile: [64, 64, 64]}"


def the_problem(table_file):
    """The one problem of a table, checked to be what the error says."""
    problems = check_table(table_file.path)
    assert len(problems) == 1, [str(problem) for problem in problems]
    with pytest.raises(TableError) as caught:
        load_table(table_file.path)
    problem = problems[0]
    assert str(caught.value) == f"{table_file.path}:{problem.line}: {problem.field}: {problem.reason}"
    return problem


def test_a_table_that_is_nested_too_deeply_is_refused_by_name(tmp_path):
    path = tmp_path / "deep.yaml"
    path.write_text("[" * 3000 + "]" * 3000)
    with pytest.raises(TableError, match="nested too deeply") as caught:
        load_table(path)
    assert str(caught.value).startswith(f"{path}: yaml: ") and check_table(path) == list(caught.value.problems)


def test_nested_and_flat_buckets_are_read_in_the_order_they_stand_in(table_file):
    table = load_table(table_file.path)
    assert table.buckets == (
        Bucket(m=16, n=8192, k=4096, kernel="small"),
        Bucket(m=16, n=8192, kernel="large"),
        Bucket(m=64, n=1024, kernel="small"),
        Bucket(kernel="large"),
    )
    assert table.arch == "sm90" and table.tuned is False and table.fallback == "any"
    assert table.source == str(table_file.path)


def test_rows_are_read_with_their_defaults(table_file):
    table = load_table(table_file.path)
    small, large, generic = table.rows
    assert small.tile == (64, 16, 256) and small.tile.k == 256 and small.swap_ab is True
    assert large.cluster == (1, 1) and large.scheduler == "persistent" and large.stages == "auto" and large.split_k == 1
    assert large.alignment == (16, 16, 16) and generic.alignment == (1, 1, 1)


@pytest.mark.parametrize(
    "size, row, bucket",
    [
        ((1, 8192, 4096), "small", 0),
        ((16, 8192, 4097), "large", 1),
        ((16, 8193, 1), "large", 3),
        ((17, 1024, 1), "small", 2),
        ((64, 1024, 99999), "small", 2),
        ((65, 1, 1), "large", 3),
    ],
)
def test_the_first_bucket_that_fits_wins_and_the_reason_names_it(table_file, size, row, bucket):
    selection = load_table(table_file.path).select(*size)
    assert (selection.row.name, selection.bucket_index) == (row, bucket)
    assert f"bucket {bucket} (" in selection.reason and str(table_file.path) in selection.reason


@pytest.mark.parametrize("size", [(-1, 1, 1), (1, 1.5, 1), (1, 1, True)])
def test_a_size_that_is_no_count_is_refused(table_file, size):
    with pytest.raises(BadParamError, match="expected an integer >= 0"):
        load_table(table_file.path).select(*size)


def test_an_unknown_row_name_is_refused_with_the_names_that_exist(table_file):
    with pytest.raises(KernelNotFoundError, match="'huge'.*small, large, any"):
        load_table(table_file.path).row("huge")


def test_editing_a_row_and_loading_again_changes_the_result(table_file):
    before = load_table(table_file.path)
    table_file.replace("tile: [64, 16, 256]", "tile: [64, 32, 128]").replace("{n: 8192, kernel: large}", "{n: 8192, kernel: small}")
    after = load_table(table_file.path)
    assert before.select(1, 1, 1).row.tile == (64, 16, 256)
    assert after.select(1, 1, 1).row.tile == (64, 32, 128)
    assert (before.select(1, 1, 5000).row.name, after.select(1, 1, 5000).row.name) == ("large", "small")


def test_a_table_and_its_rows_cannot_be_changed_after_loading(table_file):
    table = load_table(table_file.path)
    with pytest.raises(ValueError, match="frozen"):
        table.rows[0].swap_ab = False
    with pytest.raises(ValueError, match="frozen"):
        table.fallback = "small"
    assert isinstance(table, TileTable) and isinstance(table.rows, tuple) and isinstance(table.buckets, tuple)


def test_a_bucket_for_constant_weights_serves_no_others(table_file):
    table_file.replace("{n: 8192, kernel: large}", "{n: 16384, constant_b: true, kernel: large}\n      - {n: 8192, kernel: small}")
    table = load_table(table_file.path)
    assert [bucket.constant_b for bucket in table.buckets] == [False, True, False, False, False]
    assert (table.select(16, 8192, 9999).row.name, table.select(16, 8192, 9999, constant_b=True).row.name) == ("small", "large")
    assert table.select(16, 8192, 9999, constant_b=True).reason.startswith("bucket 1 (M <= 16, N <= 16384, any K, constant b) of ")
    assert table.select(16, 8192, 4096, constant_b=True).bucket_index == 0  # those of all weights come first where they stand first


BROKEN = {
    # name: (old, new, field, a piece of the offending line, a piece of the reason)
    "unknown key of the table": ("fallback: any", "fallback: any\ncolour: red", "colour", "colour", "unknown key"),
    "unknown key of a row": (
        ANY,
        ANY.replace("}", ", warps: 4}"),
        "rows[2].warps",
        "warps: 4",
        "unknown key; known keys: name",
    ),
    "unknown key of a GGUF row": (
        "    split_k: 1",
        "    split_k: 1\n    warps: 4",
        "rows[0].warps",
        "warps: 4",
        "unknown key",
    ),
    "unknown key of a bucket": ("{kernel: large}", "{kernel: large, o: 1}", "buckets[2].o", "o: 1", "unknown key"),
    "unknown key of a case": (
        "{n: 8192, kernel: large}",
        "{q: 1, kernel: large}",
        "buckets[0].cases[1].q",
        "q: 1",
        "unknown key",
    ),
    "key beside cases": ("  - m: 16\n", "  - m: 16\n    k: 9\n", "buckets[0].k", "k: 9", "next to cases"),
    "m inside a case": (
        "{n: 8192, kernel: large}",
        "{m: 3, kernel: large}",
        "buckets[0].cases[1].m",
        "m: 3",
        "already has an m",
    ),
    "duplicate name": (ANY, f"{ANY}\n  - {LARGE}", "rows[3].name", None, "'large' is taken by the row on line 13"),
    "key that stands twice": (
        "    stages: auto",
        "    stages: auto\n    stages: 4",
        "rows[0].stages",
        "stages: 4",
        "stands twice, first on line 11",
    ),
    "bucket with an unknown row": (
        "{kernel: large}",
        "{kernel: huge}",
        "buckets[2].kernel",
        "huge",
        "no row is named 'huge'",
    ),
    "case with an unknown row": (
        "{n: 8192, kernel: large}",
        "{n: 8192, kernel: huge}",
        "buckets[0].cases[1].kernel",
        "huge",
        "no row is named",
    ),
    "bucket within an earlier one": (
        "{m: 64, n: 1024, kernel: small}",
        "{m: 16, n: 1024, kernel: small}",
        "buckets[1]",
        "m: 16, n: 1024",
        "unreachable: bucket 1 (M <= 16, N <= 8192",
    ),
    "constant bucket within one of all weights": (
        "{m: 64, n: 1024, kernel: small}",
        "{m: 16, n: 1024, constant_b: true, kernel: small}",
        "buckets[1]",
        "constant_b: true",
        "unreachable: bucket 1 (M <= 16, N <= 8192",
    ),
    "last bucket for constant weights": (
        "  - {kernel: large}\n",
        "  - {constant_b: true, kernel: large}\n",
        "buckets[2]",
        "constant_b",
        "must be open",
    ),
    "bucket after the open one": (
        "  - {kernel: large}\n",
        "  - {kernel: large}\n  - {kernel: small}\n",
        "buckets[3]",
        "- {kernel: small",
        "unreachable: bucket 3",
    ),
    "last bucket closed in m": (
        "{kernel: large}",
        "{m: 9999, kernel: large}",
        "buckets[2]",
        "9999",
        "must be open in m, n and k",
    ),
    "last bucket closed in k": (
        "{kernel: large}",
        "{k: 9999, kernel: large}",
        "buckets[2]",
        "9999",
        "must be open in m, n and k",
    ),
    "last bucket bounded from below": ("  - {kernel: large}\n", "  - {m_min: 2, kernel: large}\n", "buckets[2]", "m_min: 2", "must be open"),
    "lower bound above the upper one": (
        "{m: 64, n: 1024, kernel: small}",
        "{m: 64, m_min: 65, n: 1024, kernel: small}",
        "buckets[1].m_min",
        "m_min: 65",
        "expected 64 or less, which is m, got 65",
    ),
    "negative lower bound": (
        "{m: 64, n: 1024, kernel: small}",
        "{m: 64, n: 1024, n_min: -1, kernel: small}",
        "buckets[1].n_min",
        "n_min: -1",
        "greater than or equal to 0, got -1",
    ),
    "bucket within an earlier one for all that lower bounds": (
        "{m: 64, n: 1024, kernel: small}",
        "{m: 16, m_min: 9, n: 1024, kernel: small}",
        "buckets[1]",
        "m_min: 9",
        "unreachable: bucket 1 (M <= 16, N <= 8192",
    ),
    "bound of zero": (
        "{m: 64, n: 1024",
        "{m: 64, n: 0",
        "buckets[1].n",
        "n: 0",
        "expected a positive integer or open, got 0",
    ),
    "bound that is no number": (
        "  - m: 16",
        "  - m: many",
        "buckets[0].m",
        "many",
        "expected a positive integer or open, got 'many'",
    ),
    "bound left empty": ("n: 1024", "n: ", "buckets[1].n", "n: ,", "empty: write a positive integer or open"),
    "fallback without a row": ("fallback: any", "fallback: none", "fallback", "fallback", "no row is named 'none'"),
    "fallback that needs alignment": (
        "fallback: any",
        "fallback: large",
        "fallback",
        "fallback",
        "any strides: a generic row",
    ),
    "unknown architecture": ("arch: sm90", "arch: sm91", "arch", "arch", "unknown architecture 'sm91'"),
    "missing architecture": ("arch: sm90\n", "", "arch", "fallback", "required key is missing"),
    "missing name": (
        ANY,
        f"{ANY}\n  - {{family: generic, tile: [32, 32, 32]}}",
        "rows[3].name",
        "[32, 32, 32]",
        "required key",
    ),
    "name that is no word": (
        "    split_k: 1\n",
        "    split_k: 1\n  - {name: A-1, family: generic, tile: [16, 16, 16]}\n",
        "rows[1].name",
        "A-1",
        "pattern",
    ),
    "tile with a word": (
        "tile: [64, 16, 256]",
        "tile: [64, wide, 256]",
        "rows[0].tile[1]",
        "wide",
        "valid integer, got 'wide'",
    ),
    "tile of two": ("tile: [64, 16, 256]", "tile: [64, 16]", "rows[0].tile[2]", "[64, 16]", "a value is missing"),
    "tile of four": ("tile: [64, 16, 256]", "tile: [64, 16, 256, 1]", "rows[0].tile", "256, 1", "too many values"),
    "tile of zero": ("tile: [64, 16, 256]", "tile: [64, 0, 256]", "rows[0].tile[1]", "[64, 0", "greater than 0"),
    "unknown family": (
        LARGE,
        LARGE.replace("c3x", "c4x"),
        "rows[1].family",
        "c4x",
        f"'c3x', 'c2x', {', '.join(map(repr, list(FAMILIES)[2:-1]))} or {list(FAMILIES)[-1]!r}, got 'c4x'",
    ),
    "unknown schedule": (LARGE, LARGE.replace("pingpong", "tennis"), "rows[1].schedule", "tennis", "got 'tennis'"),
    "stages that are no number": (
        "stages: auto",
        "stages: some",
        "rows[0].stages",
        "some",
        "expected auto or a positive integer",
    ),
    "swap_ab that is a number": ("swap_ab: true", "swap_ab: 1", "rows[0].swap_ab", "swap_ab", "valid boolean, got 1"),
    "split_k of zero": ("split_k: 1", "split_k: 0", "rows[0].split_k", "split_k", "greater than 0, got 0"),
    "row that is a number": (ANY, f"{ANY}\n  - 7", "rows[3]", "- 7", "got 7"),
}


@pytest.mark.parametrize("old, new, field, on_line, reason", BROKEN.values(), ids=BROKEN)
def test_a_broken_table_is_refused_with_the_line_of_the_offending_node(table_file, old, new, field, on_line, reason):
    table_file.replace(old, new)
    problem = the_problem(table_file)
    assert (problem.file, problem.field) == (str(table_file.path), field)
    assert problem.line == (15 if on_line is None else table_file.line_of(on_line))  # None: the text stands twice
    assert reason in problem.reason


def test_a_table_error_is_a_scaled_mm_error_with_status_bad_param(table_file):
    table_file.replace("fallback: any", "fallback: none")
    with pytest.raises(ScaledMMError) as caught:
        load_table(table_file.path)
    assert isinstance(caught.value, TableError) and caught.value.status is Status.BAD_PARAM


@pytest.mark.parametrize("rows", ["rows:\n", "rows: []\n"])
def test_a_table_with_zero_rows_is_refused(table_file, rows):
    table_file.path.write_text(f"arch: sm90\nfallback: any\n{rows}buckets:\n  - {{kernel: any}}\n")
    reasons = {problem.field: (problem.line, problem.reason) for problem in check_table(table_file.path)}
    assert reasons["rows"] == (3, "a table needs at least one row")
    assert "no row is named" in reasons["buckets[0].kernel"][1] and "no row is named" in reasons["fallback"][1]


@pytest.mark.parametrize(
    "buckets, reason",
    [("buckets:\n", "at least one bucket"), ("", "required key is missing"), ("buckets: 3\n", "expected a list")],
)
def test_a_table_without_buckets_is_refused(table_file, buckets, reason):
    text = table_file.path.read_text()
    table_file.path.write_text(text[: text.index("buckets:")] + buckets)
    problems = check_table(table_file.path)
    assert problems[0].field == "buckets" and any(reason in problem.reason for problem in problems)


def test_every_problem_of_a_file_is_reported_in_the_order_of_its_lines(table_file):
    table_file.replace("arch: sm90", "arch: sm91").replace("swap_ab: true", "swap_ab: 1").replace("{kernel: large}", "{kernel: huge}")
    problems = check_table(table_file.path)
    assert [problem.field for problem in problems] == ["arch", "rows[0].swap_ab", "buckets[2].kernel"]
    with pytest.raises(TableError) as caught:
        load_table(table_file.path)
    assert str(caught.value).splitlines() == [str(problem) for problem in problems]


def test_a_bucket_that_names_a_broken_row_is_not_reported_itself(table_file):
    table_file.replace(LARGE, LARGE.replace("pingpong", "tennis"))
    assert the_problem(table_file).field == "rows[1].schedule"


@pytest.mark.parametrize(
    "text, line, reason",
    [
        ("arch: sm90\nrows: [1, 2\nbuckets: 3\n", 3, "expected ',' or ']'"),
        ("arch: sm90\nrows:\n\t- a\n", 3, "cannot start any token"),
        ("arch: sm90\nfallback: \x07\n", 2, "special characters are not allowed"),
        ("arch: sm90\n---\narch: sm80\n", 2, "another document"),
        ("", 1, "empty"),
        ("# nothing\n", 1, "empty"),
        ("- a\n- b\n", 1, "expected keys: arch"),
        ("arch: &a sm90\nfallback: *a\n", 1, "aliases are not supported"),
        ("arch: sm90\nfallback: !!python/name:os.system x\n", 2, "not a plain YAML value"),
        ("arch: sm90\n[1, 2]: x\n", 2, "a key must be a word"),
    ],
)
def test_a_file_that_is_no_plain_yaml_mapping_is_refused_with_its_line(tmp_path, text, line, reason):
    path = tmp_path / "table.yaml"
    path.write_text(text)
    problems = check_table(path)
    assert len(problems) == 1 and problems[0].line == line
    assert reason in problems[0].reason and str(problems[0]).startswith(f"{path}:{line}: ")


@pytest.mark.parametrize("value", ["", "7", "-1", "1e3", "x", "true", "null", "2020-01-01", "[]", "[[1]]", "{a: 1}", "0x"])
def test_whatever_one_value_becomes_the_table_loads_or_is_refused_with_a_line(table_file, value):
    good = table_file.path.read_text()
    refused = 0
    for token in re.finditer(r"(?<=[:\[,] )[\w]+|(?<=\[)\w+", good):
        table_file.path.write_text(good[: token.start()] + value + good[token.end() :])
        problems = check_table(table_file.path)
        assert all(problem.line and problem.reason for problem in problems)
        if not problems:
            assert load_table(table_file.path).select(1, 1, 1).bucket_index >= 0
        refused += bool(problems)
    assert refused > 10


def test_a_file_that_does_not_exist_or_is_not_text_is_refused_by_name(tmp_path):
    missing = tmp_path / "none.yaml"
    assert [str(problem) for problem in check_table(missing)] == [f"{missing}: cannot be read: No such file or directory"]
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"arch: \xff\xfe")
    assert "not UTF-8" in str(check_table(binary)[0])


def test_an_architecture_without_a_table_is_refused_with_those_that_exist():
    with pytest.raises(ArchitectureNotSupportedError, match="'sm10'; there are: .*sm90"):
        load_table("sm10")


def test_a_table_in_a_file_named_for_another_architecture_is_refused(table_file):
    problems = check_table(table_file.path, expected_arch="sm80")
    assert [(problem.line, problem.field) for problem in problems] == [(1, "arch")]
    assert "named for 'sm80'" in problems[0].reason


def test_a_table_error_survives_pickling():
    error = TableError([Problem("f.yaml", 3, "rows", "bad")])
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is TableError and copy.problems == error.problems and str(copy) == str(error) == "f.yaml:3: rows: bad"


def test_lower_bounds_of_a_bucket_leave_what_is_below_to_the_next(table_file):
    """As the autotuner writes them."""
    table_file.replace("buckets:\n", "buckets:\n  - {m: 64, m_min: 33, n: 1024, n_min: 1024, k_min: 512, kernel: large}\n")
    table = load_table(table_file.path)
    served = {
        (64, 1024, 512): 0,
        (33, 1024, 9999): 0,
        (32, 1024, 512): 3,
        (65, 1024, 512): 4,
        (64, 1023, 512): 3,
        (64, 1025, 512): 4,
        (64, 1024, 511): 3,
    }
    assert {product: table.select(*product).bucket_index for product in served} == served
    assert "bucket 0 (33 <= M <= 64, N = 1024, K >= 512)" in table.select(64, 1024, 512).reason
