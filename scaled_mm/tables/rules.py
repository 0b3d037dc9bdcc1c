"""The rules for a table as a whole, checked without nvcc: the architectures served, the buckets, the fallback and the modes.

Every broken rule gives the field and a reason in numbers; the loader adds file and line. The rules for kernel configs are in their family's
module in `scaled_mm.kernels`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

from scaled_mm.kernels.arch import ARCHES
from scaled_mm.kernels.config import KernelConfig
from scaled_mm.kernels.registry import family_of
from scaled_mm.kernels.sections import SECTIONS
from scaled_mm.tables.schema import Bucket, ModeRule, TileTable, Times
from scaled_mm.tables.select import FASTEST, describe_bucket

PREDICTED_MODE = "w16a16"
"""The only mode of GGUF products for which there are `times`."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """A broken rule. where: the path of the node, such as ("rows", 3, "tile") or ("buckets", 5, "kernel")."""

    where: tuple[str | int, ...]
    reason: str


def shared_memory_of(table: TileTable) -> int:
    """Bytes that one thread block may opt in to on every GPU that a table serves."""
    return min(ARCHES[served].shared_memory for served in table.serves)


def serves_findings(arch: str, serves: Sequence[str] | None) -> Iterator[tuple[int | None, str]]:
    """(index in `serves`, or None for the whole list; reason) for every architecture that a table cannot serve."""
    if serves is None:
        return
    if arch not in serves:
        yield None, f"expected {arch} among the architectures served, got {', '.join(serves) or 'none'}"
    for index, served in enumerate(serves):
        if served not in ARCHES:
            yield index, f"unknown architecture {served!r}; known: {', '.join(ARCHES)}"
        elif served in serves[:index]:
            yield index, f"{served} stands twice"
        elif (has := ARCHES[served].shared_memory) < (needs := ARCHES[arch].shared_memory):
            yield index, f"{served} has {has} bytes of shared memory, the rows may use {arch}'s {needs}"
        elif ARCHES[arch].wgmma and served != arch:
            yield index, f"wgmma kernels run on {arch} alone, not on {served}"


def contains(outer: Bucket, inner: Bucket) -> bool:
    """Whether every product that `inner` serves is one that `outer` serves."""
    pairs = ((outer.m, inner.m), (outer.n, inner.n), (outer.k, inner.k))
    if outer.flags & ~inner.flags or any(least > inner_least for least, inner_least in zip(outer.least, inner.least)):
        return False
    return all(big is None or (small is not None and small <= big) for big, small in pairs)


def bucket_findings(buckets: Sequence[Bucket], row_names: Sequence[str], has_modes: bool = False, times: Collection[str] = ()) -> list[Finding]:
    """Buckets that name no kernel config or are unreachable, and sizes that no bucket serves. times: the names in the section's `times`."""
    findings = []
    for index, bucket in enumerate(buckets):
        if bucket.kernel == FASTEST:
            if has_modes and bucket.mode != PREDICTED_MODE:
                findings.append(Finding(("buckets", index, "kernel"), f"only mode {PREDICTED_MODE} has predicted times: name a kernel config"))
            elif has_modes and not times:
                findings.append(Finding(("buckets", index, "kernel"), "no kernel config of this section has times: name one"))
        elif bucket.kernel not in row_names:
            findings.append(Finding(("buckets", index, "kernel"), f"no row is named {bucket.kernel!r}"))
        for axis in "mnk":
            least, most = getattr(bucket, f"{axis}_min"), getattr(bucket, axis)
            if most is not None and least > most:
                findings.append(Finding(("buckets", index, f"{axis}_min"), f"expected {most} or less, which is {axis}, got {least}"))
        for earlier in range(index):
            if contains(buckets[earlier], bucket):
                reason = f"unreachable: bucket {earlier} ({describe_bucket(buckets[earlier])}) comes first and takes all of {describe_bucket(bucket)}"
                findings.append(Finding(("buckets", index), reason))
                break
    if not buckets:
        findings.append(Finding(("buckets",), "a table needs at least one bucket"))
    elif (buckets[-1].m, buckets[-1].n, buckets[-1].k, *buckets[-1].least, buckets[-1].flags) != (None, None, None, 0, 0, 0, 0):
        reason = f"the last bucket must be open in m, n and k, this one takes {describe_bucket(buckets[-1])}"
        findings.append(Finding(("buckets", len(buckets) - 1), reason))
    return findings


def times_findings(times: Mapping[str, Times], fallback: str, rows: Sequence[KernelConfig], row_names: Sequence[str]) -> list[Finding]:
    """Entries of `times` for no kernel config, for the fallback, or with the coefficients of another formula. rows: the valid kernel configs.
    row_names: also those of invalid ones."""
    findings = [Finding(("times", name), f"no row is named {name!r}") for name in times if name not in row_names]
    for row in rows:
        if (entry := times.get(row.name)) is None:
            continue
        shares = family_of(row).most_parts(row) > 0
        if SECTIONS[row.section].has_modes and not shares:
            why = "only gguf_wgmma_cluster kernel configs, and gguf_wgmma ones of 32 or more tokens, have times in this section: leave it out"
            findings.append(Finding(("times", row.name), why))
            continue
        if not shares and entry.memory is None:
            findings.append(Finding(("times", row.name, "memory"), "required key is missing"))
        # A kernel config that shares tiles must be chosen alike on every GPU, for constant weights and others.
        foreign = {"memory": entry.memory, "wait": entry.wait} if shares else {}
        if not shares or family_of(row).splits_in_clusters:
            foreign |= {"sharing": entry.sharing, "two_tiles": entry.two_tiles}
        for key, value in foreign.items():
            why = "of gguf_wgmma kernel configs alone" if key in ("sharing", "two_tiles") else "the times of GGUF kernel configs have none"
            if value:
                findings.append(Finding(("times", row.name, key), f"{why}: leave it out"))
    if fallback in times:
        findings.append(Finding(("times", fallback), "the fallback is not chosen by time: leave it out"))
    return findings


def fallback_findings(fallback: str, rows: Sequence[KernelConfig], row_names: Sequence[str]) -> list[Finding]:
    """The fallback must exist and take any alignment. row_names: also those of invalid kernel configs."""
    if fallback not in row_names:
        return [Finding(("fallback",), f"no row is named {fallback!r}")]
    return [
        Finding(("fallback",), f"{fallback!r} is a {row.family} row; the fallback takes any strides: a generic row")
        for row in rows
        if row.name == fallback and row.alignment != (1, 1, 1)
    ]


def mode_findings(modes: Sequence[ModeRule]) -> list[Finding]:
    """Unreachable entries of `auto`, and numbers of tokens without a mode."""
    findings = []
    for index, rule in enumerate(modes):
        if index and (modes[index - 1].m is None or (rule.m is not None and rule.m <= modes[index - 1].m)):
            findings.append(Finding(("auto", index), f"unreachable: expected more tokens than the rule before, m <= {modes[index - 1].m or 'open'}"))
    if not modes or modes[-1].m is not None:
        findings.append(Finding(("auto",), "the last rule must be open: a mode without m"))
    return findings
