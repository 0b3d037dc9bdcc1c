"""GGUF files byte by byte: well-formed ones, and each way to break one, with what the refusal says."""

from __future__ import annotations

import struct

U8, U32, I32, F32, STRING, ARRAY, U64 = 0, 4, 5, 6, 8, 9, 10  # value types
TF32, TF16, TQ4_0, TI8, TI64, TBF16 = 0, 1, 2, 24, 27, 30  # tensor types
CUT = "; the file may be truncated$"


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def text(value: str | bytes) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return u64(len(value)) + value


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + u32(kind) + value


def array(kind: int, length: int, values: bytes = b"") -> bytes:
    return u32(kind) + u64(length) + values


def tensor(name: str | bytes = "t", dims: tuple[int, ...] = (8,), kind: int = TF32, offset: int = 0) -> bytes:
    return text(name) + u32(len(dims)) + u64(*dims) + u32(kind) + u64(offset)


def file(keys=(), tensors=(), data: bytes = bytes(256), version: int = 3, n_keys=None, n_tensors=None, alignment: int = 32) -> bytes:
    n_keys = len(keys) if n_keys is None else n_keys
    n_tensors = len(tensors) if n_tensors is None else n_tensors
    header = b"GGUF" + u32(version) + u64(n_tensors, n_keys) + b"".join((*keys, *tensors))
    return header + bytes(-len(header) % alignment) + data


def of_key(*arguments) -> bytes:
    return file([key(*arguments)], data=b"", alignment=1)


def of_tensor(**options) -> bytes:
    return file(tensors=[tensor(**options)])


def nested(levels: int) -> bytes:
    return of_key("a", ARRAY, array(ARRAY, 1) * (levels - 1) + array(U8, 1, b"x"))


ENDLESS = of_key("a", ARRAY, array(U32, 2**61))
VALID_KEYS = [key("general.architecture", STRING, text("llama")), key("tokens", ARRAY, array(STRING, 3, text("a") + text("") + text("ü")))]
VALID_TENSORS = [tensor("q", (64, 2), TQ4_0), tensor("f32", (4, 2), TF32, 96), tensor("bf16", (3,), TBF16, 128), tensor("i64", (), TI64, 160)]
VALID = file(VALID_KEYS, VALID_TENSORS, bytes(range(168)))

# name: the file, and what the error says of it.
MALFORMED: dict[str, tuple[bytes, str]] = {
    "array_length_2_61": (ENDLESS, "key 'a' at byte 49: expected 9223372036854775808 bytes, got 0 up to the end" + CUT),
    "array_length_2_64_of_bytes": (of_key("a", ARRAY, array(U8, 2**64 - 1)), "key 'a' at byte 49: expected 18446744073709551615 bytes.*" + CUT),
    "array_one_value_short": (of_key("a", ARRAY, array(U32, 4, bytes(15))), "expected 16 bytes, got 15 up to the end" + CUT),
    "array_length_cut": (of_key("a", ARRAY, u32(U32) + b"abc"), "key 'a' at byte 37: expected 12 bytes, got 7 up to the end" + CUT),
    "array_of_strings_2_61": (
        of_key("a", ARRAY, array(STRING, 2**61, text("x") * 9)),
        "expected 18446744073709551616 bytes, got 81 up to the end" + CUT,
    ),
    "array_of_strings_cut": (of_key("a", ARRAY, array(STRING, 9, text("xyz") * 8)), "key 'a': got a string that reaches byte 137 of 137" + CUT),
    "array_string_length_2_64": (
        of_key("a", ARRAY, array(STRING, 2, text("x") + u64(2**64 - 1))),
        "key 'a': got a string that reaches byte 18446744073709551681 of 66" + CUT,
    ),
    "array_of_unknown_type": (of_key("a", ARRAY, array(13, 1, bytes(8))), "key 'a': expected a value type from 0 to 12, got 13$"),
    "empty_array_of_unknown_type": (of_key("a", ARRAY, array(99, 0)), "key 'a': expected a value type from 0 to 12, got 99$"),
    "nested_array_length_2_61": (
        of_key("a", ARRAY, array(ARRAY, 1, array(U32, 2**61))),
        "expected 9223372036854775808 bytes, got 0 up to the end" + CUT,
    ),
    "array_of_arrays_2_61": (
        of_key("a", ARRAY, array(ARRAY, 2**61, array(U8, 0))),
        "expected 27670116110564327424 bytes, got 12 up to the end" + CUT,
    ),
    "arrays_in_9_levels": (nested(9), "expected at most 8 levels of arrays in key 'a', got 9$"),
    "arrays_in_100000_levels": (nested(100_000), "expected at most 8 levels of arrays in key 'a', got 9$"),
    "more_values_than_a_model_has": (
        of_key("a", ARRAY, array(U8, 2**22, bytes(2**22))),
        "expected at most 4194304 values up to key 'a', got 4194305$",
    ),
    "more_arrays_than_a_model_has": (
        of_key("a", ARRAY, array(ARRAY, 2**18, array(U8, 0) * 2**18)),
        "expected at most 262144 arrays up to key 'a', got 262145$",
    ),
    "string_length_2_62": (of_key("a", STRING, u64(2**62) + b"x"), "key 'a': got a string that reaches byte 4611686018427387949 of 46" + CUT),
    "unknown_value_type": (of_key("a", 13, bytes(64)), "key 'a': expected a value type from 0 to 12, got 13$"),
    "value_type_2_32": (of_key("a", 2**32 - 1, bytes(64)), "key 'a': expected a value type from 0 to 12, got 4294967295$"),
    "key_length_2_63": (file([u64(2**63) + b"a" * 64]), "key at byte 32: expected 9223372036854775808 bytes.*" + CUT),
    "key_of_70000_bytes": (of_key("a" * 70_000, U8, b"x"), "expected at most 65535 bytes in a name, key at byte 32, got 70000$"),
    "key_not_utf8": (of_key(b"\xff\xfe", U8, b"x"), "key at byte 32: expected UTF-8, got .*can't decode byte 0xff"),
    "key_twice": (file([key("a", U8, b"x")] * 2), "expected each key once, got key 'a' again$"),
    "key_of_the_reader": (of_key("GGUF.version", U8, b"x"), "expected each key once, got key 'GGUF.version' again$"),
    "number_of_keys_2_64": (file(VALID_KEYS, n_keys=2**64 - 1), "0 tensors and 18446744073709551615 keys at byte 24: .*" + CUT),
    "one_key_missing": (file(VALID_KEYS, n_keys=5, data=b""), CUT),
    "more_keys_than_a_model_has": (
        file([key(b"%d" % i, U8, b"x") for i in range(2**16 + 1)]),
        "expected at most 65536 keys, got 65537$",
    ),
    "number_of_tensors_2_64": (file(n_tensors=2**64 - 1), "18446744073709551615 tensors and 0 keys at byte 24: .*" + CUT),
    "number_of_tensors_2_31": (file(n_tensors=2**31), "2147483648 tensors and 0 keys at byte 24: .*" + CUT),
    "one_tensor_missing": (file(tensors=[tensor()], n_tensors=2, data=b""), CUT),
    "more_tensors_than_a_model_has": (file(n_tensors=2**18 + 1, data=bytes(24 * 2**18 + 256)), "expected at most 262144 tensors, got 262145$"),
    "tensor_name_length_2_63": (file(tensors=[u64(2**63) + bytes(64)]), "name of a tensor at byte 32: expected 9223372036854775808 bytes.*" + CUT),
    "tensor_name_of_70000_bytes": (of_tensor(name="a" * 70_000), "expected at most 65535 bytes in a name, name of a tensor at byte 32, got 70000$"),
    "tensor_name_not_utf8": (of_tensor(name=b"\xc3\x28"), "name of a tensor at byte 32: expected UTF-8, got .*can't decode byte 0xc3"),
    "tensor_name_twice": (file(tensors=[tensor("t"), tensor("t", offset=32)]), "expected each tensor once, got 't' again$"),
    "dimensions_2_32": (file(tensors=[text("t") + u32(2**32 - 1) + bytes(64)]), "expected at most 4 dimensions of tensor 't', got 4294967295$"),
    "5_dimensions": (of_tensor(dims=(1, 1, 1, 1, 1)), "expected at most 4 dimensions of tensor 't', got 5$"),
    "no_dimension_of_blocks": (of_tensor(dims=(), kind=TQ4_0), r"tensor 't': .* a multiple of 32, got dimensions \[\]$"),
    "no_dimension_of_bf16": (of_tensor(dims=(), kind=TBF16), r"tensor 't': .* got dimensions \[\]$"),
    "dimension_0": (of_tensor(dims=(8, 0)), r"tensor 't': expected dimensions of 1 or more .*, got \[8, 0\]$"),
    "dimension_0_of_blocks": (of_tensor(dims=(0, 4), kind=TQ4_0), r"tensor 't': expected dimensions of 1 or more .*, got \[0, 4\]$"),
    "dimension_minus_1": (of_tensor(dims=(2**64 - 1,)), "less than 2.63, got .18446744073709551615.$"),
    "dimensions_minus_1_twice": (of_tensor(dims=(2**64 - 1, 2**64 - 1)), "product is less than 2.63, got "),  # 1 modulo 2^64
    "product_overflows_to_0": (of_tensor(dims=(2**32, 2**32)), "product is less than 2.63, got .4294967296, 4294967296.$"),
    "product_overflows_to_8": (of_tensor(dims=(2**61 + 1, 8)), "product is less than 2.63, got .2305843009213693953, 8.$"),
    "bytes_overflow_to_32": (
        of_tensor(dims=(2**62 + 8,)),
        "data up to tensor 't' at byte 64: expected 18446744073709551648 bytes, got 256 up to the end" + CUT,
    ),
    "unknown_tensor_type": (of_tensor(kind=4), "tensor 't': expected a tensor type that the package gguf knows, got 4$"),
    "tensor_type_2_32": (of_tensor(kind=2**32 - 1), "tensor 't': expected a tensor type that the package gguf knows, got 4294967295$"),
    "k_of_half_a_block": (of_tensor(dims=(48, 2), kind=TQ4_0), r"tensor 't': .*, K, to be a multiple of 32, got dimensions \[48, 2\]$"),
    "k_below_a_block": (of_tensor(dims=(1, 32), kind=TQ4_0), r"tensor 't': .*, K, to be a multiple of 32, got dimensions \[1, 32\]$"),
    "offset_unaligned": (of_tensor(offset=8), "tensor 't': expected an offset that is a multiple of 32, got 8$"),
    "offset_past_the_end": (of_tensor(offset=256), "data up to tensor 't' at byte 64: expected 288 bytes, got 256 up to the end" + CUT),
    "offset_2_64": (of_tensor(offset=2**64 - 32), "data up to tensor 't' at byte 64: expected 18446744073709551616 bytes, .*" + CUT),
    "offset_back_into_the_header": (of_tensor(offset=2**64 - 64), "data up to tensor 't' at byte 64: expected 18446744073709551584 bytes, .*" + CUT),
    "data_one_byte_short": (file(tensors=[tensor()], data=bytes(31)), "expected 32 bytes, got 31 up to the end" + CUT),
    "data_missing": (file(tensors=[tensor()])[:60], "expected 32 bytes, got 0 up to the end" + CUT),
    "tensors_at_one_offset": (file(tensors=[tensor("a"), tensor("b")]), "expected tensors that do not overlap, got 'a' and 'b'$"),
    "tensors_that_overlap": (file(tensors=[tensor("a", offset=32), tensor("b", (16,))]), "do not overlap, got 'b' and 'a'$"),
    "alignment_0": (of_key("general.alignment", U32, u32(0)), "'general.alignment': expected a power of two of .*, got 0$"),
    "alignment_48": (of_key("general.alignment", U32, u32(48)), "'general.alignment': expected a power of two of .*, got 48$"),
    "alignment_uint64": (of_key("general.alignment", U64, u64(32)), "'general.alignment': .* of value type 4, uint32, got value type 10$"),
    "alignment_int32": (of_key("general.alignment", I32, u32(32)), "'general.alignment': .* of value type 4, uint32, got value type 5$"),
    "alignment_string": (of_key("general.alignment", STRING, text("32")), "'general.alignment': .* uint32, got value type 8$"),
    "alignment_array": (of_key("general.alignment", ARRAY, array(U32, 1, u32(32))), "'general.alignment': .* uint32, got value type 9$"),
    "alignment_2_31": (
        file([key("general.alignment", U32, u32(2**31))], [tensor()]),
        "data up to tensor 't' at byte 2147483648: expected 32 bytes, got 0 up to the end" + CUT,
    ),
    "alignment_1_cut": (
        file([key("general.alignment", U32, u32(1))], [tensor(dims=(9,), offset=3)], bytes(38), alignment=1),
        "expected 39 bytes, got 38 up to the end" + CUT,
    ),
    "version_0": (file(version=0), "expected version 2 or 3, got 0$"),
    "version_1": (file(version=1), "expected version 2 or 3, got 1$"),
    "version_77": (file(version=77), "expected version 2 or 3, got 77$"),
    "magic_only": (b"GGUF", "version at byte 0: expected 8 bytes, got 4 up to the end" + CUT),
    "counts_cut": (VALID[:23], "numbers of tensors and keys at byte 8: expected 16 bytes, got 15 up to the end" + CUT),
    "other_magic": (b"FUGG" + VALID[4:], "expected it to begin with b'GGUF', got b'FUGG'$"),
    "three_bytes": (b"GGU", "expected it to begin with b'GGUF', got b'GGU'$"),
    "empty": (b"", "the file is empty$"),
}
