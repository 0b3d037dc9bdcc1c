"""Generate the translation units: one per kernel from its table row, and one that lists the kernels of a library.

The text generated here is the only place where a row's fields become C++.
"""

from __future__ import annotations

from scaled_mm import gguf_formats
from scaled_mm.core.binding import GGUF_MODES
from scaled_mm.errors import KernelNotBuiltError
from scaled_mm.tables import rules_block_scaled, rules_c2x, rules_decode, rules_gguf
from scaled_mm.tables.rules import C3X_ARCHES, SHARED_MEMORY
from scaled_mm.tables.schema import KernelRow, TileTable
from scaled_mm.tables.tuned import slug

# Output dtypes every row is built for: suffix of the symbol -> (C++ type, scaledMMDtype_t).
OUT_DTYPES = {"bf16": ("__nv_bfloat16", 3), "fp16": ("__half", 2), "fp32": ("float", 4), "int32": ("int32_t", 1)}
# A row of GGUF products is built for every format of a weight instead; such a kernel serves every out dtype.
WEIGHT_FORMATS = {name: (f"scaled_mm::gguf::{name.upper()}", one.code) for name, one in gguf_formats.WEIGHT_FORMATS.items()}
BUILT_FOR = OUT_DTYPES | WEIGHT_FORMATS
_OUT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "int32": 4}
_SCHEDULES = {"warp_specialized": "WarpSpecialized", "pingpong": "Pingpong", "cooperative": "Cooperative"}
_RASTERS = {"heuristic": "Heuristic", "along_m": "AlongM", "along_n": "AlongN"}
_INT64_MAX = "INT64_MAX"

ZERO_POINT_TERMS = "zero_point_terms"


def out_dtypes(row: KernelRow) -> tuple[str, ...]:
    """The suffixes of BUILT_FOR that a row is built for, of a block row formats: a block-scaled sum is a float32, so no int32."""
    if row.gguf:
        return tuple(WEIGHT_FORMATS)
    return tuple(name for name in OUT_DTYPES if name != "int32" or not row.block_scaled)


def symbol(row: str, out_dtype: str | None) -> str:
    """The C symbol of a kernel's entry."""
    return f"scaled_mm_kernel_{row}_{out_dtype}" if out_dtype else f"scaled_mm_kernel_{row}"


def _block_source(row: KernelRow, fmt: str, limit: int) -> tuple[str, str, str]:
    """(header, C++ type, check of its shared memory) of a block row for one format, on GPUs with `limit` bytes of shared memory."""
    cxx_format, stages = WEIGHT_FORMATS[fmt][0], rules_gguf.stages(row, fmt, limit)
    bytes_ = rules_gguf.shared_memory(row, fmt, limit)
    check = f'static_assert(Row::kSharedMemory <= {bytes_}, "the shared memory that the table\'s rules reckon with");\n'
    if row.family == "gguf_mma":
        sizes = f"{row.tile.m}, {row.tile.n // rules_gguf.BAND_ROWS}, {rules_gguf.warps(row)}, {stages}"
        return "gguf/mma.cuh", f"scaled_mm::gguf::Mma<{cxx_format}, {sizes}>", check
    sizes = f"{row.tile.m}, {row.tile.n}, {row.split_k}, {stages}"
    return "gguf/wgmma.cuh", f"scaled_mm::gguf::Wgmma<{cxx_format}, {sizes}>", check


def _config(row: KernelRow, cxx_out: str) -> tuple[str, str]:
    """(header, C++ type) of a row. KernelNotBuiltError for a legal row whose kernel is not written yet."""
    if row.scheduler != "persistent" or (row.split_k != 1 and row.family not in ("c2x", "decode")):
        raise KernelNotBuiltError(f"{row.name}: no kernel has scheduler {row.scheduler} with split_k {row.split_k} yet")
    if row.block_scaled:
        return _block_scaled_config(row, cxx_out)
    tile = f"{row.tile.m}, {row.tile.n}, {row.tile.k}"
    if row.family == "generic":
        if row.grouped:
            return "int8/grouped/generic.cuh", f"scaled_mm::grouped::Generic<{tile}, {cxx_out}>"
        return "int8/generic/gemm.cuh", f"scaled_mm::generic::Gemm<{tile}, {cxx_out}>"
    if row.family == "c3x":
        stages = 0 if row.stages == "auto" else row.stages
        swap = "true" if row.swap_ab else "false"
        early = "true" if row.early_weights else "false"
        if row.grouped:
            # Consecutive tiles share the weights: along the tokens, which are the MMA's n when the operands are swapped.
            raster = {"heuristic": "along_n" if row.swap_ab else "along_m"}.get(row.raster, row.raster)
            return (
                "int8/grouped/c3x.cuh",
                f"scaled_mm::grouped::C3x<{tile}, {row.cluster.m}, {row.cluster.n}, "
                f"scaled_mm::grouped::{_SCHEDULES[row.schedule]}, {stages}, {swap}, "
                f"scaled_mm::c3x::Raster::{_RASTERS[raster]}, {row.swizzle}, {cxx_out}>",
            )
        return (
            "int8/c3x/gemm.cuh",
            f"scaled_mm::c3x::Gemm<{tile}, {row.cluster.m}, {row.cluster.n}, "
            f"scaled_mm::c3x::{_SCHEDULES[row.schedule]}, {stages}, {swap}, "
            f"scaled_mm::c3x::Raster::{_RASTERS[row.raster]}, {row.swizzle}, {row.prefetch}, {early}, {cxx_out}>",
        )
    if row.family == "decode":
        persistent = "true" if row.schedule else "false"
        sizes = f"{row.tile.m}, {row.tile.n}, {row.split_k}, {row.cluster.m}, {row.stages}, {persistent}"
        return "int8/decode/gemm.cuh", f"scaled_mm::decode::Gemm<{sizes}, {cxx_out}>"
    if row.family == "c2x":
        warp = f"{row.warp.m}, {row.warp.n}, {row.warp.k}"
        gemm = f"scaled_mm::c2x::Gemm<{tile}, {warp}, {row.stages}, {row.swizzle}, {row.split_k}, {cxx_out}>"
        if row.grouped:
            return "int8/grouped/c2x.cuh", f"scaled_mm::grouped::C2x<{gemm}, {cxx_out}>"
        return "int8/c2x/gemm.cuh", gemm
    raise AssertionError(f"no template for family {row.family}")  # the table's rules let none through


def _block_scaled_config(row: KernelRow, cxx_out: str) -> tuple[str, str]:
    if row.family == "generic":
        return "int8/block_scaled/generic.cuh", f"scaled_mm::block_scaled::Generic<{row.tile.m}, {row.tile.n}, {cxx_out}>"
    sizes = f"{row.tile.m}, {row.tile.n}, {row.warp.m}, {row.warp.n}, {row.stages}, {row.swizzle}"
    return "int8/block_scaled/c2x.cuh", f"scaled_mm::block_scaled::C2x<{sizes}, {cxx_out}>"


def _shared_memory(row: KernelRow, out_bytes: int) -> int | None:
    """What the rules say exactly; None: an estimate from above, or a kernel that needs no asking."""
    if row.family == "decode":
        return rules_decode.cost(row, out_bytes).shared_memory
    if row.family != "c2x":
        return None
    return (rules_block_scaled.cost(row, out_bytes) if row.block_scaled else rules_c2x.cost(row)).shared_memory


def kernel_source(row: KernelRow, out_dtype: str, limit: int = SHARED_MEMORY[C3X_ARCHES[0]]) -> str:
    """The translation unit of one kernel: a row of the table for one output dtype, or one format of a block product's weight.

    limit: bytes of shared memory that a thread block may have on every GPU of the table.
    """
    if out_dtype not in out_dtypes(row):
        what = "a format of the weight" if row.gguf else "an out dtype"
        raise KernelNotBuiltError(f"{row.name}: expected {what} of {', '.join(out_dtypes(row))}, got {out_dtype}")
    name = symbol(row.name, out_dtype)
    if row.gguf:
        header, config, check = _block_source(row, out_dtype, limit)
    else:
        header, config = _config(row, OUT_DTYPES[out_dtype][0])
        expected, check = _shared_memory(row, _OUT_BYTES[out_dtype]), ""
        if expected is not None:
            check = f'static_assert(Row::kSharedMemory == {expected}, "the shared memory that the table\'s rules reckon with");\n'
    return (
        f'// Generated from row {row.name} of the tile table.\n#include "{header}"\n'
        f"using Row = {config};\n{check}"
        f'extern "C" const scaled_mm::Kernel {name};\n'
        f'const scaled_mm::Kernel {name} = Row::entry("{row.name}");\n'
    )


def zero_point_terms_source() -> str:
    """The translation unit of the kernel that sums over K for the zero points."""
    name = symbol(ZERO_POINT_TERMS, None)
    return (
        '// Generated.\n#include "int8/prepare/zero_point_terms.cuh"\n'
        f'extern "C" const scaled_mm::Kernel {name};\n'
        f"const scaled_mm::Kernel {name} = scaled_mm::zero_point_terms::entry();\n"
    )


def _table_lines(table: TileTable, name: str, kind: int) -> list[str]:
    """A table as C++ constants, the last of them a scaledMMTable_t called `name`."""
    index = {row.name: i for i, row in enumerate(table.rows)}
    source = f"tuned/{slug(table.gpu)}.yaml" if table.gpu else f"{table.arch}.yaml"
    rows = [f'{{"{row.name}", {", ".join(map(str, row.alignment))}, {row.store_bytes}}}' for row in table.rows]
    buckets = [
        "{"
        + ", ".join(str(bound) if bound else _INT64_MAX for bound in (bucket.m, bucket.n, bucket.k))
        + ", "
        + ", ".join(map(str, (index[bucket.kernel], bucket.flags, *bucket.least)))
        + "}"
        for bucket in table.buckets
    ]
    modes = [f"{{{rule.m or _INT64_MAX}, {GGUF_MODES.index(rule.mode)}, 0}}" for rule in table.auto]
    mode_lines = [f"const scaledMMTableMode_t {name}_modes[] = {{" + ", ".join(modes) + "};"] if modes else []
    return [
        *mode_lines,
        f"const scaledMMTableRow_t {name}_rows[] = {{" + ", ".join(rows) + "};",
        f"const scaledMMTableBucket_t {name}_buckets[] = {{" + ", ".join(buckets) + "};",
        f'const scaledMMTable_t {name} = {{"{table.arch}", "{source} (built in)", {name}_rows, {len(rows)}, {name}_buckets, '
        f"{len(buckets)}, {index[table.fallback]}, {int(table.tuned)}, {kind}, 0, {f'{name}_modes' if modes else 'nullptr'}, {len(modes)}}};",
    ]


def library_source(arch: str, symbols: list[str], table: TileTable | None = None) -> str:
    """The translation unit with the one function that a kernel library exports, and the tables if it brings them."""
    lines = ['// Generated: what this library holds.\n#include "core/kernel_abi.h"\n']
    lines += [f'extern "C" const scaled_mm::Kernel {name};' for name in symbols]
    lines.append("namespace {")
    lines.append("const scaled_mm::Kernel* const kernels[] = {" + ", ".join(f"&{name}" for name in symbols) + "};")
    tables = {f"table_{kind}": (kind, section) for kind, section in enumerate(table.by_kind) if section} if table else {}
    for name, (kind, section) in tables.items():
        lines += _table_lines(section, name, kind)
    pointers = ", ".join(f"&{name}" for name in tables)
    lines.append(f"const scaledMMTable_t* const tables[] = {{{pointers or 'nullptr'}}};")
    lines.append(
        f'const scaled_mm::KernelLibrary library = {{SCALED_MM_KERNEL_ABI_VERSION, "{arch}", kernels, {len(symbols)}, tables, {len(tables)}}};'
    )
    lines.append("}\nconst scaled_mm::KernelLibrary* scaled_mm_kernel_library(void) { return &library; }\n")
    return "\n".join(lines)
