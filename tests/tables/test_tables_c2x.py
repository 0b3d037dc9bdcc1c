"""Rows of the CUTLASS 2.x kernels, and the tables of every architecture that runs them."""

from __future__ import annotations

import pytest

from scaled_mm.errors import ArchitectureNotSupportedError
from scaled_mm.kernels.arch import ARCHES
from scaled_mm.kernels.gpu import typical
from scaled_mm.kernels.registry import config_cost, config_findings, family_of
from scaled_mm.tables import KernelRow, available_tables, check_table, load_table

TABLES = [load_table(arch) for arch, _ in available_tables()]
C2X = [table for table in TABLES if any(row.family == "c2x" for row in table.rows)]
MULTIPROCESSORS = {arch.name: arch.typical.multiprocessors for arch in ARCHES.values() if arch.typical} | {"sm89": 128}  # RTX 4090
WIDTHS = (1024, 2048, 4096, 6144, 8192, 12288, 28672)


def row(**changes) -> KernelRow:
    fields = dict(name="row", family="c2x", tile=[128, 128, 64], warp=[64, 64, 64], stages=5)
    return KernelRow.model_validate({**fields, **changes})


def test_the_published_rows_are_legal():
    assert config_findings(row(), "sm80") == []
    assert config_findings(row(tile=[16, 64, 128], warp=[16, 64, 64]), "sm89") == []
    assert config_findings(row(tile=[256, 128, 64], stages=3), "sm89") == []
    assert config_findings(row(tile=[128, 128, 128], stages=2), "sm75") == []  # the whole 64 KB
    assert config_findings(row(tile=[64, 128, 128], stages=4, swizzle=8, split_k=4), "sm120") == []


ILLEGAL = {
    # name: (architecture, changes, field, a piece of the reason)
    "no warp tile": ("sm80", dict(warp=None), "warp", "needs a warp tile"),
    "a warp that does not divide the tile": ("sm80", dict(warp=[48, 64, 64]), "warp", "warp m = 48 does not divide tile m = 128"),
    "a warp below the instruction": ("sm80", dict(tile=[8, 64, 64], warp=[8, 64, 64]), "warp", "on sm80 a multiple of 16"),
    "a warp below Turing's loads": ("sm75", dict(warp=[16, 64, 64], stages=2), "warp", "on sm75 a multiple of 32"),
    "a warp of one step along k": ("sm80", dict(warp=[64, 64, 32]), "warp", "warp k = 32; on sm80 a multiple of 64"),
    "tile k of 32": ("sm80", dict(tile=[128, 128, 32], warp=[64, 64, 32]), "tile", "expected 64 or 128"),
    "tile k of 256": ("sm80", dict(tile=[64, 64, 256]), "tile", "expected 64 or 128"),
    "16 warps": ("sm80", dict(tile=[256, 256, 64]), "warp", "4 x 4 x 1 = 16 warps, at most 8"),
    "256 accumulators": ("sm80", dict(warp=[64, 128, 64]), "warp", "256 registers per thread, at most 128"),
    "more threads than vectors": ("sm80", dict(tile=[16, 256, 64], warp=[16, 64, 64]), "tile", "tile m * k = 1024 bytes; 4 warps load 2048"),
    "more warps than rows to store": ("sm80", dict(tile=[64, 64, 128], warp=[32, 32, 64]), "warp", "4 warps share 8 rows of 64 columns"),
    "stages left open": ("sm80", dict(stages="auto"), "stages", "says how many"),
    "two stages beyond Turing": ("sm80", dict(stages=2), "stages", "at least 3"),
    "three stages on Turing": ("sm75", dict(stages=3), "stages", "Turing has no asynchronous copies"),
    "more shared memory than SM86 has": ("sm86", dict(tile=[64, 128, 128]), "stages", "122880 bytes of shared memory, sm86 has 101376"),
    "more shared memory than SM80 has": ("sm80", dict(stages=11), "stages", "180224 bytes of shared memory, sm80 has 166912"),
    "a split of three": ("sm80", dict(split_k=3), "split_k", "expected one of 1, 2, 4, 8"),
    "a cluster": ("sm80", dict(cluster=[2, 1]), "cluster", "leave it out"),
    "a schedule": ("sm80", dict(schedule="pingpong"), "schedule", "leave it out"),
    "swap_ab": ("sm80", dict(swap_ab=True), "swap_ab", "leave it out"),
    "a raster": ("sm80", dict(raster="along_m"), "raster", "leave it out"),
}


@pytest.mark.parametrize("arch, changes, field, reason", ILLEGAL.values(), ids=ILLEGAL)
def test_an_illegal_row_is_refused_with_field_and_reason(arch, changes, field, reason):
    findings = config_findings(row(**changes), arch)
    assert any(where == field and reason in why for where, why in findings), findings


def test_a_warp_tile_is_for_c2x_rows_alone():
    for fields in (dict(family="generic", tile=[64, 64, 64], stages="auto"), dict(family="c3x", schedule="pingpong", stages="auto")):
        assert [field for field, _ in config_findings(row(**fields), "sm90")] == ["warp"]


def test_an_illegal_c2x_row_is_reported_with_its_line(tmp_path):
    path = tmp_path / "table.yaml"
    path.write_text(
        "arch: sm86\nfallback: any\nrows:\n"
        "  - {name: deep, family: c2x, tile: [64, 128, 128], warp: [64, 64, 64], stages: 5}\n"
        "  - {name: any, family: generic, tile: [64, 64, 64]}\n"
        "buckets: [{kernel: deep}]\n"
    )
    assert [(p.line, p.field) for p in check_table(path)] == [(4, "rows[0].stages")]


def test_the_shared_memory_of_a_row_is_its_ring_or_the_exchange_of_its_epilogue():
    cost = config_cost(row(), "sm80")
    assert (cost.stage_bytes, cost.stages, cost.shared_memory) == (256 * 64, 5, 5 * 256 * 64)
    assert cost.epilogue_bytes == 2 * 8 * (128 + 8) * 4 and cost.accumulators == 128
    sliced = config_cost(row(tile=[16, 64, 128], warp=[16, 64, 64]), "sm80")
    assert sliced.epilogue_bytes == 2 * 8 * (64 + 8) * 4 and sliced.accumulators == 32


# ---- the tables -------------------------------------------------------------------------------------------------------


def test_every_architecture_from_turing_on_has_one_table():
    served = [name for table in TABLES for name in table.serves]
    assert sorted(served) == sorted(ARCHES), "scaled_mm/kernels/arch.py, or `serves` of a table in cutlass_configs"
    for table in TABLES:
        for name in table.serves:
            assert load_table(name).source == table.source


def test_an_architecture_that_no_table_serves_is_refused_with_those_that_exist():
    with pytest.raises(ArchitectureNotSupportedError, match=f"'sm70'; there are: {', '.join(arch for arch, _ in available_tables())}$"):
        load_table("sm70")


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.arch)
def test_every_row_fits_every_architecture_that_the_table_serves(table):
    for name in table.serves:
        for r in table.rows:
            assert config_findings(r, name) == []
            assert config_cost(r, name).shared_memory <= ARCHES[name].shared_memory


@pytest.mark.parametrize("table", C2X, ids=lambda table: table.arch)
def test_every_row_name_describes_its_row(table):
    for r in table.rows:
        options = "".join(f"_{letter}{value}" for letter, value in (("z", r.swizzle), ("k", r.split_k)) if value > 1)
        names = {"generic": f"generic_{r.tile}", "c2x": f"c2x_{r.tile}_w{r.warp}_s{r.stages}{options}"}
        assert r.name == names.get(r.family, family_of(r).config_name(r))


def test_a_name_means_the_same_row_in_every_table():
    rows = [r for table in TABLES for r in table.rows]
    assert len(set(rows)) == len({r.name for r in rows})


def tiles(table, M: int, N: int, K: int) -> int:
    row = table.select(M, N, K).row
    return -(-M // row.tile.m) * -(-N // row.tile.n)


@pytest.mark.parametrize("arch", ["sm80", "sm89"])
def test_k_is_split_where_it_is_long_and_the_tiles_leave_multiprocessors_idle(arch):
    table, splits = load_table(arch), 0
    for M in (1, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512, 513, 1024, 1025, 2048, 2049, 8192):
        for N in WIDTHS:
            assert table.select(M, N, 512).row.split_k == 1
            for K in (4096, 8191, 8192, 28672):
                split = table.select(M, N, K).row.split_k > 1
                if split:  # a last wave that is not full leaves some idle too
                    assert tiles(table, M, N, K) < 3 * MULTIPROCESSORS[arch]
                splits += split
    assert splits > 0
    assert table.select(1, 512, 28672).row.split_k == 4 and table.select(1, 28672, 28672).row.split_k == 1


@pytest.mark.parametrize("K", [4096, 8192])
@pytest.mark.parametrize("table", C2X, ids=lambda table: table.arch)
def test_one_more_row_of_a_or_column_of_b_is_no_cliff(table, K):
    """The cliff of published tables: past an edge of M, wider tiles halve the blocks of a product that had not filled the GPU."""
    edges = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

    def us(M: int, N: int) -> float:
        return table.time_model(table.select(M, N, K).row).us(M, N, K, typical(table.arch))

    for M in edges:
        for N in WIDTHS:
            one, two = us(M, N), us(2 * M, N)
            assert one <= us(M + 1, N) <= 1.2 * max(two, one), f"M = {M}, N = {N}"
            assert us(M, N) <= us(M, N + 16) <= 1.2 * max(us(M, 2 * N), one), f"M = {M}, N = {N}"


def test_m_of_17_takes_hardly_longer_than_m_of_16_on_sm89():
    """With published tables it takes 1.3 to 2 times as long (vllm-project/vllm#56924)."""
    table = load_table("sm89")
    for N in WIDTHS:
        before, after = (table.time_model(table.select(M, N, 4096).row).us(M, N, 4096, typical("sm89")) for M in (16, 17))
        assert before <= after <= 1.15 * before


@pytest.mark.parametrize(
    "serves, field, reason",
    [
        ("[sm89]", "serves", "expected sm86 among the architectures served, got sm89"),
        ("[sm86, sm91]", "serves[1]", "unknown architecture 'sm91'"),
        ("[sm86, sm86]", "serves[1]", "sm86 stands twice"),
        ("[sm86, sm75]", "serves[1]", "sm75 has 65536 bytes of shared memory"),
        ("[]", "serves", "got none"),
        ("sm86", "serves", "valid list"),
    ],
)
def test_a_table_cannot_serve_what_it_is_not_made_for(tmp_path, serves, field, reason):
    path = tmp_path / "table.yaml"
    path.write_text(
        f"arch: sm86\nserves: {serves}\nfallback: any\nrows:\n  - {{name: any, family: generic, tile: [64, 64, 64]}}\nbuckets: [{{kernel: any}}]\n"
    )
    problems = check_table(path)
    assert [(p.line, p.field) for p in problems] == [(2, field)] and reason in problems[0].reason


def test_the_table_of_wgmma_kernels_serves_one_architecture(table_file):
    table_file.replace("arch: sm90\n", "arch: sm90\nserves: [sm90, sm100]\n")
    assert [(p.field, p.reason) for p in check_table(table_file.path)] == [("serves[1]", "wgmma kernels run on sm90 alone, not on sm100")]
