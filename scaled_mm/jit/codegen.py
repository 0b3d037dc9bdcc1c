"""Generates the translation units: one per kernel, and one that lists the kernels of a library.

The family of a kernel config (`scaled_mm.kernels`) turns its fields into a C++ type; this module writes the source around it.
"""

from __future__ import annotations

from collections.abc import Sequence

from scaled_mm.errors import KernelNotBuiltError
from scaled_mm.kernels.arch import ARCHES, DEFAULT_ARCH
from scaled_mm.kernels.config import KernelConfig
from scaled_mm.kernels.dtypes import BUILT_FOR, GGUF_MODES, OUT_DTYPES, WEIGHT_FORMATS
from scaled_mm.kernels.registry import family_of
from scaled_mm.tables.schema import TileTable
from scaled_mm.tables.select import FASTEST, time_fields
from scaled_mm.tables.tuned import slug

__all__ = [
    "BUILT_FOR",
    "OUT_DTYPES",
    "ROWWISE",
    "WEIGHT_FORMATS",
    "ZERO_POINT_TERMS",
    "kernel_source",
    "library_source",
    "out_dtypes",
    "row_source",
    "rowwise_names",
    "rowwise_source",
    "symbol",
    "together",
    "zero_point_terms_source",
]

_INT64_MAX = "INT64_MAX"

ZERO_POINT_TERMS = "zero_point_terms"

ROWWISE = {
    "rowwise_quantize": ("rowwise/launch.cuh", "rowwise::entry<scaled_mm::rowwise::PlainElements<{x}>, scaled_mm::rowwise::ScaledElements<{x}>>"),
    "rowwise_norm": ("rowwise/launch.cuh", "rowwise::entry<scaled_mm::rowwise::Norm<{x}>>"),
    "rowwise_activation": ("rowwise/launch.cuh", "rowwise::entry<scaled_mm::rowwise::Gated<{x}>>"),
    "rowwise_rope": ("rowwise/rope_launch.cuh", "rowwise::rope_entry<{x}>"),
    "rowwise_int8_block": ("rowwise/int8_block_launch.cuh", "rowwise::int8_block_entry<{x}>"),
    "gguf_quantize": ("gguf/quantize_launch.cuh", "gguf::quantize_entry<{x}>"),
    "moe_sort": ("rowwise/moe_sort_launch.cuh", "rowwise::moe_sort_entry<{x}>"),
    "moe_quantize": ("rowwise/moe_launch.cuh", "rowwise::moe_quantize_entry<{x}>"),
    "moe_combine": ("rowwise/moe_launch.cuh", "rowwise::moe_combine_entry<{x}>"),
    "topk_softmax": ("rowwise/topk_softmax_launch.cuh", "rowwise::topk_softmax_entry<{x}>"),
}
"""The kernels of row-wise operators, which no table lists: the header and the entry of each, for x of a dtype."""

_INTEGERS = ("moe_sort",)
"""Those of ROWWISE whose x is int32; the others' is a float."""


def out_dtypes(config: KernelConfig) -> tuple[str, ...]:
    """The keys of BUILT_FOR that a kernel config is built for: output dtypes, or GGUF formats of the weight."""
    return family_of(config).built_for


def symbol(row: str, out_dtype: str | None) -> str:
    """The C symbol of a kernel's entry."""
    return f"scaled_mm_kernel_{row}_{out_dtype}" if out_dtype else f"scaled_mm_kernel_{row}"


def kernel_source(config: KernelConfig, out_dtype: str, limit: int = ARCHES[DEFAULT_ARCH].shared_memory) -> str:
    """The translation unit of one kernel, for one output dtype or one GGUF format. KernelNotBuiltError for a field that no kernel implements yet.

    limit: bytes of shared memory that a thread block may opt in to on every GPU of the table.
    """
    family = family_of(config)
    if out_dtype not in family.built_for:
        raise KernelNotBuiltError(f"{config.name}: expected {family.built_for_what} of {', '.join(family.built_for)}, got {out_dtype}")
    stream_k = config.scheduler == "stream_k"
    if (stream_k and config.schedule not in family.stream_k_schedules) or (config.split_k != 1 and not family.splits_k):
        what = f"schedule {config.schedule}, scheduler {config.scheduler} and split_k {config.split_k}"
        raise KernelNotBuiltError(f"{config.name}: no {family.title} kernel has {what}")
    name = symbol(config.name, out_dtype)
    code, check = family.code(config, out_dtype, limit), ""
    if code.shared_memory is not None:
        compare = "<=" if code.at_most else "=="
        check = f'static_assert(Row::kSharedMemory {compare} {code.shared_memory}, "the shared memory that the table\'s rules reckon with");\n'
    return (
        f'// Generated from row {config.name} of the tile table.\n#include "{code.header}"\n'
        f"using Row = {code.type};\n{check}"
        f'extern "C" const scaled_mm::Kernel {name};\n'
        f'const scaled_mm::Kernel {name} = Row::entry("{config.name}");\n'
    )


def row_source(config: KernelConfig, limit: int = ARCHES[DEFAULT_ARCH].shared_memory) -> str:
    """One translation unit with every kernel of a kernel config. The compiler instantiates what they share once."""
    return together([(config, out_dtype) for out_dtype in out_dtypes(config)], limit)


def together(kernels: Sequence[tuple[KernelConfig, str]], limit: int) -> str:
    """One translation unit with several kernels of one header, each as in `kernel_source`, in a namespace of its own."""
    bodies, includes = [], {}
    for config, out_dtype in kernels:
        comment, include, body = kernel_source(config, out_dtype, limit).split("\n", 2)
        includes[include] = None
        bodies.append(f"{comment}\nnamespace of_{symbol(config.name, out_dtype)} {{\n{body}}}\n")
    return "\n".join((*includes, *bodies))


def zero_point_terms_source() -> str:
    """The translation unit of the kernel that computes the zero-point terms, sums over K."""
    name = symbol(ZERO_POINT_TERMS, None)
    return (
        '// Generated.\n#include "int8/prepare/zero_point_terms.cuh"\n'
        f'extern "C" const scaled_mm::Kernel {name};\n'
        f"const scaled_mm::Kernel {name} = scaled_mm::zero_point_terms::entry();\n"
    )


def rowwise_names() -> list[tuple[str, str]]:
    """(name, dtype of x) of every row-wise kernel."""
    return [(name, dtype) for name in ROWWISE for dtype in OUT_DTYPES if (dtype == "int32") == (name in _INTEGERS)]


def rowwise_source(row: str, dtype: str) -> str:
    """The translation unit of one row-wise kernel."""
    name, (header, entry) = symbol(row, dtype), ROWWISE[row]
    made = entry.format(x=OUT_DTYPES[dtype].cxx)
    return (
        f'// Generated.\n#include "{header}"\n'
        f'extern "C" const scaled_mm::Kernel {name};\n'
        f'const scaled_mm::Kernel {name} = scaled_mm::{made}("{row}", {OUT_DTYPES[dtype].code});\n'
    )


def _table_lines(table: TileTable, name: str, kind: int) -> list[str]:
    """A table as C++ constants, the last of them a scaledMMTable_t called `name`."""
    index = {FASTEST: -1} | {row.name: i for i, row in enumerate(table.rows)}
    source = f"tuned/{slug(table.gpu)}.yaml" if table.gpu else f"{table.arch}.yaml"
    models = ["{" + ", ".join(map(str, time_fields(table, row))) + "}" for row in table.rows]
    rows = [
        f'{{"{row.name}", {", ".join(map(str, row.alignment))}, {row.store_bytes}, {model}, {row.block_size}, 0}}'
        for row, model in zip(table.rows, models)
    ]
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
    """The translation unit with the one function that a kernel library exports, and the library's tables if it contains them."""
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
