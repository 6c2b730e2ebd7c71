"""Our own reading of LevelDB's files against LevelDB itself."""

import hashlib
import os
import random
import shutil

import numpy as np
import plyvel
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from datasets import crc32c, leveldb_block, leveldb_log, open_source
from datasets.errors import DatasetChanged, DatasetTruncated, DatasetWarning, SourceError
from datasets.leveldb_reader import Snapshot

KEYS = st.binary(min_size=1, max_size=3) | st.sampled_from([b"%08d" % i for i in range(20)])
STEP = st.one_of(
    st.tuples(st.just("put"), st.lists(st.tuples(KEYS, st.integers(0, 40_000)), min_size=1, max_size=8)),
    st.tuples(st.just("delete"), st.lists(KEYS, min_size=1, max_size=8)),
    st.tuples(st.just("compact"), st.none()),
    st.tuples(st.just("reopen"), st.none()),
)


def value_of(size, seed):
    draw = random.Random(size * 1009 + seed)
    return draw.randbytes(size // 2) + b"the same again " * (size // 30)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    steps=st.lists(STEP, min_size=1, max_size=12),
    compression=st.sampled_from(["snappy", None]),
    block=st.sampled_from([200, 4096, 65536]),
)
def test_whatever_was_written_reads_as_leveldb_reads_it(tmp_path, steps, compression, block):
    folder = tmp_path / "db"
    shutil.rmtree(folder, ignore_errors=True)
    options = {"write_buffer_size": 1 << 16, "compression": compression, "block_size": block, "max_file_size": 1 << 20}
    db = plyvel.DB(str(folder), create_if_missing=True, **options)
    for number, (what, about) in enumerate(steps):
        if what == "put":
            with db.write_batch() as batch:
                for key, size in about:
                    batch.put(key, value_of(size, number))
        elif what == "delete":
            for key in about:
                db.delete(key)
        elif what == "compact":
            db.compact_range()
        else:
            db.close()
            db = plyvel.DB(str(folder), **options)
    expected = list(db)
    db.close()
    snapshot = Snapshot(str(folder), "x")
    assert list(snapshot.keys()) == [key for key, _ in expected]
    for key, value in expected:
        assert snapshot.get(key) == value
        place = snapshot.place(key)
        if place is not None and place.block is None:
            assert b"".join(os.pread(place.fd, size, start) for start, size in place.extents) == value
    stored = dict(expected)
    for key in {key for what, about in steps if what == "delete" for key in about} | {b"\0", b"\xff" * 4}:
        assert snapshot.get(key) == stored.get(key)
        assert list(snapshot.keys(key)) == [other for other, _ in expected if other >= key]
    ends = snapshot.ends()
    assert ends is None or ends == (expected[0][0], expected[-1][0])
    snapshot.close()
    with open_source(folder) as source:
        order = random.Random(1).sample(range(len(expected)), len(expected))
        assert [(record.key, record.value) for record in source.read_many(order)] == [expected[i] for i in order]


def test_many_levels_overlap_and_the_newest_wins(tmp_path):
    draw = random.Random(3)
    folder = tmp_path / "db"
    db = plyvel.DB(str(folder), create_if_missing=True, write_buffer_size=1 << 16, max_file_size=1 << 20)
    for turn in range(6):
        for i in draw.sample(range(3000), 1500):
            db.put(b"%05d" % i, b"%d/%d " % (turn, i) * 30)
        for i in draw.sample(range(3000), 200):
            db.delete(b"%05d" % i)
    expected = list(db)
    db.close()
    snapshot = Snapshot(str(folder), "x")
    assert len({table.level for table in snapshot.listing.tables.values()}) >= 2
    assert [(key, snapshot.get(key)) for key in snapshot.keys()] == expected  # noqa: SIM118
    snapshot.close()


def test_a_block_of_zstandard_is_read(tmp_path):
    """Newer LevelDBs write such; plyvel's cannot. A table of Snappy's is written anew, block by block."""
    folder = tmp_path / "db"
    with plyvel.DB(str(folder), create_if_missing=True) as db:
        for i in range(500):
            db.put(b"%04d" % i, b"abcd" * 500 + b"%d" % i)
    plyvel.DB(str(folder)).close()
    (table,) = folder.glob("*.ldb")
    whole = table.read_bytes()
    index = leveldb_block.footer(whole[-48:])
    block = leveldb_block.content(whole[index.start : index.start + index.size + 5])
    first = next(leveldb_block.entries(block))
    place, _ = leveldb_block.handle(block[first.start : first.end])
    inside = leveldb_block.content(whole[place.start : place.start + place.size + 5])
    for level in range(1, 20):  # one that takes exactly the room that Snappy took, with a skippable frame behind it
        packed = pa.Codec("zstd", compression_level=level).compress(inside, asbytes=True)
        room = place.size - len(packed) - 8
        if room >= 0:
            break
    packed += (0x184D2A50).to_bytes(4, "little") + room.to_bytes(4, "little") + bytes(room) + b"\x02"
    crc = crc32c.masked(crc32c.crc32c(np.frombuffer(packed, np.uint8)))
    changed = whole[: place.start] + packed + crc.to_bytes(4, "little") + whole[place.start + place.size + 5 :]
    assert len(changed) == len(whole)
    table.write_bytes(changed)
    with open_source(folder) as source:
        assert source.read(0).value == b"abcd" * 500 + b"0"
        assert source.read(499).value == b"abcd" * 500 + b"499"


# damage ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small") / "db"
    draw = random.Random(4)
    with plyvel.DB(str(folder), create_if_missing=True, write_buffer_size=1 << 16, block_size=512) as db:
        for i in range(120):
            db.put(b"%04d" % i, draw.randbytes(200) + b"x" * 300)
    with open_source(folder) as source:
        return folder, hashlib.sha256(b"".join(record.value for record in source.read_many(range(120)))).digest()


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    which=st.integers(0, 1 << 20), where=st.floats(0, 0.999), flips=st.binary(min_size=1, max_size=8), cut=st.booleans()
)
def test_a_damaged_byte_anywhere_is_told_or_harmless(small, tmp_path, which, where, flips, cut):
    folder, digest = small
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    files = sorted(path for path in copy.iterdir() if path.suffix in (".ldb", ".log") and path.stat().st_size)
    file = files[which % len(files)]
    content = bytearray(file.read_bytes())
    start = int(where * len(content))
    for place, flip in enumerate(flips, start):
        content[place % len(content)] ^= flip
    if cut:
        del content[start:]
        # A log that ends with a whole record looks as if it had always ended there; a manifest beside it would tell.
        assume(file.suffix == ".ldb" or leveldb_log.cut_end(bytes(content)) is not None)
    file.write_bytes(content)
    told = ""
    try:
        with open_source(copy) as source:
            records = source.read_many(range(len(source)))
    except SourceError as error:
        told = str(error)
    if told:
        assert str(copy) in told
    else:
        assert (
            hashlib.sha256(b"".join(record.value for record in records)).digest() == digest
        )  # the padding of a footer has no checksum


def test_a_table_cut_at_any_moment_is_a_short_read(tmp_path):
    folder = tmp_path / "db"
    with plyvel.DB(str(folder), create_if_missing=True, compression=None, write_buffer_size=1 << 16) as db:
        for i in range(200):
            db.put(b"%04d" % i, bytes([i]) * 3000)
    with open_source(folder) as source:
        source.read(0)
        for table in folder.glob("*.ldb"):
            os.truncate(table, 4096)
        with pytest.raises(DatasetTruncated, match=r"record \d+ .*\.ldb became shorter") as caught:
            source.read_many(range(199, -1, -1))
    assert "4096 bytes" in str(caught.value)


def test_a_log_cut_after_opening_is_a_short_read(tmp_path):
    folder = tmp_path / "db"
    with plyvel.DB(str(folder), create_if_missing=True) as db:
        for i in range(20):
            db.put(b"%04d" % i, bytes([i]) * 50_000)
    with open_source(folder) as source:
        assert source.read(19).value == bytes([19]) * 50_000
        (log,) = (p for p in folder.glob("*.log") if p.stat().st_size)
        os.truncate(log, 100_000)
        with (
            pytest.warns(DatasetWarning, match="written by another process"),
            pytest.raises(DatasetTruncated, match=rf"record 19 .*{log.name} became shorter"),
        ):
            source.read(19)


def test_a_table_compacted_away_before_it_was_opened_is_named(tmp_path, monkeypatch):
    folder = tmp_path / "db"
    with plyvel.DB(str(folder), create_if_missing=True, compression=None, write_buffer_size=1 << 16) as db:
        for i in range(200):
            db.put(b"%04d" % i, bytes([i]) * 3000)
    monkeypatch.setattr("datasets.leveldb_reader.open_files_limit", lambda: 2)
    with open_source(folder) as source:
        assert source.read(0).value == bytes(3000)
        for table in folder.glob("*.ldb"):
            table.unlink()
        with pytest.raises(DatasetChanged, match=r"a writer has removed the table \d+\.ldb"):
            source.read_many(range(200))


def test_too_many_open_files_are_made_room_for(tmp_path, monkeypatch):
    folder = tmp_path / "db"
    with plyvel.DB(str(folder), create_if_missing=True, compression=None, write_buffer_size=1 << 16) as db:
        for i in range(400):
            db.put(b"%04d" % i, bytes([i % 256]) * 3000)
    opened, real = set(), os.open

    def scarce(path, flags, *rest):
        if str(path).endswith(".ldb") and sum(os.path.exists(f"/proc/self/fd/{fd}") for fd in opened) >= 5:
            raise OSError(24, "Too many open files")
        fd = real(path, flags, *rest)
        if str(path).endswith(".ldb"):
            opened.add(fd)
        return fd

    monkeypatch.setattr("datasets.leveldb_table.os.open", scarce)
    with open_source(folder) as source:
        order = random.Random(2).sample(range(400), 400)
        assert [record.value[0] for record in source.read_many(order)] == [i % 256 for i in order]


# the parts ------------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=200))
def test_both_checksums_agree(data):
    array = np.frombuffer(data, np.uint8)
    assert int(crc32c.by_table(array)) == int(crc32c.crc32c(array))


def test_the_checksum_is_that_of_the_standard():
    """RFC 3720, appendix B.4."""
    for data, crc in [(bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (bytes(range(32)), 0x46DD794E)]:
        assert int(crc32c.crc32c(np.frombuffer(data, np.uint8))) == crc


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 60)), max_size=5), st.integers(0, 300), st.integers(0, 300))
def test_extents_are_the_bytes_of_a_payload(parts, start, end):
    places, at = [], 7
    for gap, size in parts:
        places.append((at, size))
        at += size + gap
    file = np.random.default_rng(1).bytes(at + 1)
    payload = b"".join(file[begin : begin + size] for begin, size in places)
    found = leveldb_log.LogRecord(payload, places).extents(start, end)
    assert b"".join(file[begin : begin + size] for begin, size in found) == payload[start:end]
