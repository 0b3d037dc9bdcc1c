"""A kind of product with a table takes the next free number of each list: those of other kinds and of row-wise operators stay as they are."""

from __future__ import annotations

import c_header
from fake_gpu import HERE

from scaled_mm.jit import cache, compile, library, toolchain
from scaled_mm.jit.paths import csrc_dir


def test_a_kind_after_every_other_one_has_its_table(tmp_path, fake_gpu):
    kinds = csrc_dir() / "problems" / "kinds.cpp"
    head, end, tail = kinds.read_text().partition("};\nconst int32_t kNumProblemKinds")
    head = head.replace("const ProblemKind* const kProblemKinds[]", "extern const ProblemKind kPretend;\nconst ProblemKind* const kProblemKinds[]")
    source = tmp_path / "kinds.cpp"
    source.write_text(f"{head}, &kPretend{end}{tail}")
    product, table = len(c_header.enum("scaledMMProduct_t")), len(c_header.enum("scaledMMTableKind_t"))
    sources = [source, HERE / "new_kind.cpp", *(path for path in library.core_sources() if path != kinds)]
    compile.run_ninja(tmp_path, "new_kind", toolchain.find_cxx(), sources, [*compile.cxx_flags(), "-O1"], [], ["-ldl"])
    done = fake_gpu.run([tmp_path / cache.LIBRARY, product, "sm90"], PRETEND_TABLE_KIND=str(table))
    assert done.returncode == 0 and done.stdout == "everything held\n", f"{done.stdout}\n{done.stderr}"
