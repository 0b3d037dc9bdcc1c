"""Checks a GGUF header against the size of the file, before the package gguf reads it.

The package's reader trusts every count and length: an array that claims 2^61 values exhausts memory. The check reads no tensor data, and
of arrays only the lengths of strings. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from typing import NamedTuple

from scaled_mm.errors import BadParamError

_UINT32, _STRING, _ARRAY, _BF16 = 4, 8, 9, 30
_WHOLE = {0: "<B", 1: "<b", 2: "<H", 3: "<h", _UINT32: "<I", 5: "<i", 10: "<Q", 11: "<q"}
# Minimum bytes of a value by type, of a key with its value, and of a tensor's description.
_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, _UINT32: 4, 5: 4, 6: 4, 7: 1, _STRING: 8, _ARRAY: 4 + 8, 10: 8, 11: 8, 12: 8}
_KEY_BYTES, _TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 4 + 8
_MOST_NAME_BYTES, _MOST_DIMS = 2**16 - 1, 4  # limits of the format
# Our own limits. The reader needs about 1.2 KB and 15 us per array value, and more per tensor, so a well-formed file of 1 GB could exhaust
# memory. The largest vocabularies have about 1.3 million array values, and models have thousands of tensors.
_MOST_KEYS, _MOST_VALUES, _MOST_ARRAYS, _MOST_LEVELS, _MOST_TENSORS = 2**16, 2**22, 2**18, 8, 2**18
_MOST_HEADER_BYTES = 2**32 - 1  # the reader adds offsets in uint32 if the file gives an alignment
_READER_KEYS = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count")  # the reader's names for the first fields, which it stores among the keys


def printable(name: str, most: int = 100) -> str:
    """`name` for an error message: quoted, escaped and shortened."""
    return repr(name if len(name) <= most else name[:most] + "...")


class GgufHeader(NamedTuple):
    """tensors: their names, in the order of the file. values: those of keys that hold one whole number or text."""

    tensors: list[str]
    values: dict[str, int | str]


def check_header(path: str, data: mmap.mmap, block_sizes: Mapping[int, tuple[int, int]]) -> GgufHeader:
    """Raises BadParamError unless `data`, the whole file, has a GGUF header whose counts, lengths and offsets fit its size.

    path: for error messages.
    block_sizes: (values, bytes) of a block by tensor type, for the types that the reader supports.
    """
    header = _Header(path, data)
    tensors, keys = header.check_counts()
    values = header.check_keys(keys)
    return GgufHeader(header.check_tensors(tensors, block_sizes), values)


class _Header:
    """A cursor over the header; `at` is the offset of the next byte."""

    def __init__(self, path: str, data: mmap.mmap):
        self.path, self.data, self.size = path, data, len(data)
        self.at, self.alignment, self.values, self.arrays = 0, 32, 0, 0

    def wrong(self, what: str, hint: str = "") -> BadParamError:
        return BadParamError(f"path: expected a GGUF file, got {self.path}: {what}{hint}")

    def need(self, size: int, what: str) -> None:
        if size > self.size - self.at:
            got = f"{what} at byte {self.at}: expected {size} bytes, got {max(self.size - self.at, 0)} up to the end"
            raise self.wrong(got, "; the file may be truncated")

    def limit(self, count: int, most: int, what: str) -> None:
        if count > most:
            raise self.wrong(f"expected at most {most} {what}, got {count}")

    def take(self, layout: str, what: str) -> tuple[int, ...]:
        self.need(size := struct.calcsize(layout), what)
        self.at += size
        return struct.unpack_from(layout, self.data, self.at - size)

    def name(self, what: str) -> str:
        (length,) = self.take("<Q", what)
        self.need(length, what)
        self.limit(length, _MOST_NAME_BYTES, f"bytes in a name, {what} at byte {self.at}")
        start, self.at = self.at, self.at + length
        try:
            return str(self.data[start : self.at], "utf-8")
        except UnicodeDecodeError as error:
            raise self.wrong(f"{what} at byte {start}: expected UTF-8, got {error}") from error

    def check_counts(self) -> tuple[int, int]:
        if (magic := self.data[:4]) != b"GGUF":
            raise self.wrong(f"expected it to begin with b'GGUF', got {magic!r}")
        _, version = self.take("<II", "version")
        if version and version & 0xFFFF == 0:
            raise BadParamError(f"path: expected a little-endian GGUF file, got {self.path}, which is of the other byte order")
        if version not in (2, 3):
            raise self.wrong(f"expected version 2 or 3, got {version}")
        tensors, keys = self.take("<QQ", "numbers of tensors and keys")
        self.need(tensors * _TENSOR_BYTES + keys * _KEY_BYTES, f"{tensors} tensors and {keys} keys")
        self.limit(keys, _MOST_KEYS, "keys")
        self.limit(tensors, _MOST_TENSORS, "tensors")
        return tensors, keys

    def check_keys(self, count: int) -> dict[str, int | str]:
        """The values that are one whole number or text."""
        seen, values = set(_READER_KEYS), {}
        for _ in range(count):
            name = self.name("key")
            what = f"key {printable(name)}"
            if name in seen:
                raise self.wrong(f"expected each key once, got {what} again")
            seen.add(name)
            (kind,) = self.take("<I", what)
            start = self.at
            self.check_values(kind, 1, what)
            if kind in _WHOLE:
                (values[name],) = struct.unpack_from(_WHOLE[kind], self.data, start)
            elif kind == _STRING:
                values[name] = str(self.data[start + 8 : self.at], "utf-8", "replace")
            if name == "general.alignment":
                (self.alignment,) = struct.unpack_from("<I", self.data, self.at - 4)
                if kind != _UINT32 or self.alignment.bit_count() != 1:
                    got = self.alignment if kind == _UINT32 else f"value type {kind}"
                    raise self.wrong(f"{what}: expected a power of two of value type {_UINT32}, uint32, got {got}")
        return values

    def check_values(self, kind: int, count: int, what: str, level: int = 0) -> None:
        """Skips `count` values of a type. level: the number of enclosing arrays."""
        if kind not in _VALUE_BYTES:
            raise self.wrong(f"{what}: expected a value type from 0 to 12, got {kind}")
        self.need(size := count * _VALUE_BYTES[kind], what)
        self.values += count
        self.limit(self.values, _MOST_VALUES, f"values up to {what}")
        self.limit(level, _MOST_LEVELS, f"levels of arrays in {what}")
        if kind == _STRING:
            self.skip_strings(count, what)
        elif kind == _ARRAY:
            self.arrays += count
            self.limit(self.arrays, _MOST_ARRAYS, f"arrays up to {what}")
            for _ in range(count):
                self.check_values(*self.take("<IQ", what), what, level + 1)
        else:
            self.at += size

    def skip_strings(self, count: int, what: str) -> None:
        """Skips strings in one loop without a call per string, because a vocabulary has hundreds of thousands."""
        unpack, data, at, last = struct.Struct("<Q").unpack_from, self.data, self.at, self.size - 8
        while count and at <= last:
            at += 8 + unpack(data, at)[0]
            count -= 1
        if count or at > self.size:
            raise self.wrong(f"{what}: got a string that reaches byte {at} of {self.size}", "; the file may be truncated")
        self.at = at

    def check_tensors(self, count: int, block_sizes: Mapping[int, tuple[int, int]]) -> list[str]:
        """Their names."""
        spans: dict[str, tuple[int, int]] = {}
        for _ in range(count):
            name = self.name("name of a tensor")
            if name in spans:
                raise self.wrong(f"expected each tensor once, got {printable(name)} again")
            spans[name] = self.tensor(f"tensor {printable(name)}", block_sizes)
        self.at += -self.at % self.alignment
        self.limit(self.at, _MOST_HEADER_BYTES, "bytes before the first tensor")
        end, before = 0, ""
        for name, (offset, size) in sorted(spans.items(), key=lambda item: item[1]):
            if offset < end:
                raise self.wrong(f"expected tensors that do not overlap, got {printable(before)} and {printable(name)}")
            end, before = offset + size, name
            self.need(end, f"data up to tensor {printable(name)}")
        return list(spans)

    def tensor(self, what: str, block_sizes: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
        """(offset from the first tensor, size), in bytes."""
        (n_dims,) = self.take("<I", what)
        self.limit(n_dims, _MOST_DIMS, f"dimensions of {what}")
        *dims, kind, offset = self.take(f"<{n_dims}QIQ", what)
        if kind not in block_sizes:
            raise self.wrong(f"{what}: expected a tensor type that the package gguf knows, got {kind}")
        block, block_bytes = block_sizes[kind]
        if not all(dims) or (values := math.prod(dims)) >= 2**63:
            raise self.wrong(f"{what}: expected dimensions of 1 or more whose product is less than 2^63, got {dims}")
        if (dims[0] if dims else 1) % block or (kind == _BF16 and not dims):  # the reader requires a dimension for bf16
            raise self.wrong(f"{what}: expected the first dimension, K, to be a multiple of {block}, got dimensions {dims}")
        if offset % self.alignment:
            raise self.wrong(f"{what}: expected an offset that is a multiple of {self.alignment}, got {offset}")
        return offset, values // block * block_bytes
