"""Malformed GGUF files: refused by BadParamError in bounded time and memory; no tensor lies outside its file."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import random
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from gguf_malformed import (
    ARRAY,
    CUT,
    ENDLESS,
    F32,
    MALFORMED,
    STRING,
    TF16,
    TI8,
    U8,
    U32,
    U64,
    VALID,
    VALID_KEYS,
    array,
    file,
    key,
    of_key,
    tensor,
    text,
    u32,
    u64,
)

import scaled_mm as sm
from scaled_mm.errors import BadParamError, ScaledMMError

pytest.importorskip("gguf")
VALID_KEYS += [key("scores", ARRAY, array(F32, 2, bytes(8))), key("nested", ARRAY, array(ARRAY, 2, array(U8, 1, b"x") + array(U64, 0)))]


class _TooSlowError(BaseException):
    pass


@contextlib.contextmanager
def limits(seconds: float = 3, mebibytes: int = 512):
    """At most so much time, and so much more address space: a loader that does not stop fails its test by _TooSlowError or MemoryError."""

    def stop(*_):
        raise _TooSlowError(f"more than {seconds} s")

    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    handler = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + mebibytes * 2**20, before[1]))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)  # first: the rest needs memory
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def in_file(path: Path, loaded: dict[str, sm.QuantizedTensor | torch.Tensor]) -> bool:
    """Whether each tensor is a part of the mapping of `path`, no byte of it behind the end of the file."""
    spans = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            low, high = (int(bound, 16) for bound in line.split()[0].split("-"))
            spans.append((low, min(high, low + path.stat().st_size)))
    tensors = [value.q if isinstance(value, sm.QuantizedTensor) else value for value in loaded.values()]
    return all(any(low <= t.data_ptr() and t.data_ptr() + t.nbytes <= high for low, high in spans) for t in tensors)


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_is_refused_within_a_second(name, tmp_path):
    content, message = MALFORMED[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with limits():
        start = time.process_time()
        with pytest.raises(BadParamError, match=f"(?s)^path: expected a GGUF file, got .*m.gguf: .*{message}") as caught:
            sm.load_gguf(path)
        assert time.process_time() - start < 1
    assert len(str(caught.value)) < 1000
    assert caught.value.__cause__ is None or isinstance(caught.value.__cause__, UnicodeDecodeError)  # the reader never saw it


@pytest.mark.parametrize("version", (b"\0\0\0\x03", b"\0\0\0\x02"))
def test_a_header_of_the_other_byte_order_is_refused(version, tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + version + struct.pack(">QQ", 2**61, 2**61))
    with limits(), pytest.raises(BadParamError, match=r"^path: expected a little-endian GGUF file, got .*m.gguf, which is of the other byte order$"):
        sm.load_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize("version", (2, 3))
def test_a_well_formed_file_is_loaded(version, tmp_path):
    path = tmp_path / "v.gguf"
    path.write_bytes(VALID[:4] + u32(version) + VALID[8:])
    loaded = sm.load_gguf(path)
    assert list(loaded) == ["q", "f32", "bf16", "i64"] and in_file(path, loaded)
    assert loaded["q"].shape == (2, 64) and loaded["q"].q.flatten().tolist() == list(range(72))
    assert loaded["f32"].shape == (2, 4) and loaded["f32"].view(torch.uint8).flatten().tolist() == list(range(96, 128))
    assert loaded["bf16"].shape == (3,) and loaded["bf16"].view(torch.uint8).tolist() == list(range(128, 134))
    assert loaded["i64"].shape == () and loaded["i64"].item() == int.from_bytes(range(160, 168), "little", signed=True)


def test_what_is_well_formed_though_rare_is_loaded(tmp_path):
    def load(*arguments, **options):
        (tmp_path / "v.gguf").write_bytes(file(*arguments, **options))
        return sm.load_gguf(tmp_path / "v.gguf")

    assert load() == {}  # neither keys nor tensors
    assert load([key("general.alignment", U32, u32(2**31))], data=b"") == {}  # no padding where no tensor follows
    aligned = load([key("general.alignment", U32, u32(1))], [tensor("a", (3,), TI8), tensor("b", (2,), TI8, 3)], bytes(range(5)), alignment=1)
    assert {name: t.tolist() for name, t in aligned.items()} == {"a": [0, 1, 2], "b": [3, 4]}
    (name, loaded), *_ = load(tensors=[tensor("\n" + "ü" * 1000, (2, 2, 2, 1), TF16, 64)]).items()  # a gap before it, bytes behind it
    assert name == "\n" + "ü" * 1000 and loaded.shape == (1, 2, 2, 2)
    assert load([key("", STRING, text(b"\xff")), key("b", 7, b"\x02")]) == {}  # values are never decoded
    assert list(load([key("a", ARRAY, array(ARRAY, 1) * 7 + array(U8, 2, b"xy"))], [tensor()])) == ["t"]
    assert list(load(tensors=[tensor("b", offset=32), tensor("a")])) == ["b", "a"]  # not in the order of their offsets


def test_the_check_of_a_vocabulary_takes_a_fifth_of_the_load_at_most(tmp_path):
    """150 000 strings: the check takes a part of a second, and less than a fifth of the reader's time."""
    count, path = 150_000, tmp_path / "vocabulary.gguf"
    path.write_bytes(of_key("tokens", ARRAY, array(STRING, count, b"".join(text(b"token%d" % i) for i in range(count)))))
    start = time.process_time()
    assert sm.load_gguf(path) == {}
    whole = time.process_time() - start
    path.write_bytes(path.read_bytes()[:-1])
    start = time.process_time()
    with pytest.raises(BadParamError, match=CUT):  # after it walked over all of them
        sm.load_gguf(path)
    assert time.process_time() - start < min(0.5, whole / 5)


def test_the_file_of_49_bytes_takes_neither_memory_nor_time(tmp_path):
    assert len(ENDLESS) == 49
    (tmp_path / "endless.gguf").write_bytes(ENDLESS)
    code = """
import pickle, resource, sys, time
import gguf, scaled_mm
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 64 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
start = time.monotonic()
try:
    scaled_mm.load_gguf(sys.argv[1])
except scaled_mm.errors.BadParamError as error:
    sys.stdout.buffer.write(pickle.dumps((str(error), time.monotonic() - start)))
"""
    process = subprocess.run([sys.executable, "-c", code, tmp_path / "endless.gguf"], capture_output=True, timeout=120)
    assert process.returncode == 0, process.stderr.decode()
    message, seconds = pickle.loads(process.stdout)
    assert message.startswith("path: expected a GGUF file, got ") and seconds < 1


def mutated(rng: random.Random) -> bytes:
    """VALID with a few changes, most of them in its header."""
    content = bytearray(VALID)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(max(len(content) - rng.choice((0, 168, 168, 168)), 1))
        match rng.choice(("bit", "bit", "bit", "byte", "number", "number", "truncate", "delete", "splice")):
            case "bit" if at < len(content):
                content[at] ^= 1 << rng.randrange(8)
            case "byte":
                content[at : at + 1] = bytes([rng.randrange(256)])
            case "number":
                edge = 2 ** rng.choice((0, 5, 8, 16, 31, 32, 53, 61, 62, 63, 64)) + rng.choice((-2, -1, 0, 1))
                content[at : at + 8] = u64(edge % 2**64)
            case "truncate":
                del content[at:]
            case "delete":
                del content[at : at + rng.choice((1, 4, 8, 32))]
            case "splice":
                piece = rng.randrange(len(VALID))
                content[at : at + rng.choice((0, 1, 8))] = VALID[piece : piece + rng.choice((1, 4, 8, 24, 64))]
    return bytes(content)


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_file_is_refused_or_its_tensors_lie_in_it(seed, tmp_path):
    rng, refused, loaded, start = random.Random(seed), 0, 0, time.process_time()
    for i in range(1500):
        path = tmp_path / f"{i}.gguf"
        path.write_bytes(mutated(rng))
        try:
            with limits():
                tensors = sm.load_gguf(path)
        except ScaledMMError as error:
            refused += 1
            assert error.__cause__ is None or isinstance(error.__cause__, UnicodeDecodeError), (i, error)  # the reader never saw it
        else:
            loaded += 1
            assert in_file(path, tensors), i
            for value in tensors.values():
                kept = value.q if isinstance(value, sm.QuantizedTensor) else value
                assert kept.clone().numel() == math.prod(kept.shape)  # reads all of it
            del tensors
        path.unlink()
    assert refused > 500 and loaded > 100, (refused, loaded)
    assert time.process_time() - start < 5


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(tmp_path)  # the path of a socket is at most 107 bytes
        server.bind("socket")
        for path, kind in ((tmp_path / "fifo", "FIFO"), (tmp_path, "directory"), ("/dev/zero", "device"), (tmp_path / "socket", "socket")):
            with (
                limits(seconds=2),
                pytest.raises(BadParamError, match=f"^path: expected a regular file, got {re.escape(str(path))}, which is a {kind}$"),
            ):
                sm.load_gguf(path)


def test_errors_of_the_system_stay_what_they_are(tmp_path):
    (tmp_path / "v.gguf").write_bytes(VALID)
    (tmp_path / "loop").symlink_to("loop")
    for path, error in (("missing", FileNotFoundError), ("v.gguf/x", NotADirectoryError), ("loop", OSError), ("x" * 300, OSError)):
        with pytest.raises(error) as caught:
            sm.load_gguf(tmp_path / path)
        assert not isinstance(caught.value, ScaledMMError)
    if os.geteuid():  # root may read all
        (tmp_path / "v.gguf").chmod(0)
        with pytest.raises(PermissionError):
            sm.load_gguf(tmp_path / "v.gguf")


def test_a_path_that_no_file_can_have_is_refused():
    for path in ("a\0b", b"a\0b", "\ud800"):
        with pytest.raises(BadParamError, match="^path: expected a path, got '"):
            sm.load_gguf(path)


class _Path:
    def __init__(self, path: str | bytes):
        self.path = path

    def __fspath__(self) -> str | bytes:
        return self.path


@pytest.mark.parametrize("name", ("with space", "quote ' \" `", "line\nbreak", "ünïcode", "percent %s {x}", os.fsdecode(b"byte \xff")))
def test_a_path_may_have_any_characters(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(VALID)
    for spelled in (path, str(path), os.fsencode(path), _Path(str(path)), _Path(os.fsencode(path))):
        loaded = sm.load_gguf(spelled)
        assert loaded["bf16"].view(torch.uint8).tolist() == list(range(128, 134))
    path.write_bytes(VALID[:40])
    with pytest.raises(BadParamError) as caught:
        sm.load_gguf(path)
    assert str(caught.value).isprintable() and str(caught.value).encode()
    with pytest.raises(BadParamError, match="^names: expected names of tensors in ") as caught:
        path.write_bytes(VALID)
        sm.load_gguf(path, ["none"])
    assert str(caught.value).isprintable()


def test_tensors_outlive_a_file_that_is_deleted(tmp_path):
    path = tmp_path / "v.gguf"
    path.write_bytes(VALID)
    loaded = sm.load_gguf(path)
    path.unlink()
    assert loaded["q"].q.flatten().tolist() == list(range(72))
