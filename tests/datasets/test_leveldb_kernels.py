"""The compiled reading of LevelDB's blocks against libraries that we did not write."""

import numpy as np
import plyvel
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from datasets import leveldb_block, leveldb_kernels
from datasets.leveldb_block import TRAILER
from datasets.leveldb_reader import Snapshot

SNAPPY = pa.Codec("snappy")
REPEATS = st.lists(st.tuples(st.binary(min_size=1, max_size=40), st.integers(1, 400)), max_size=12).map(
    lambda parts: b"".join(part * times for part, times in parts)
)


def bytes_of(data):
    return np.frombuffer(data, np.uint8).copy()


def unsnapped(packed, room):
    out = np.full(room + 8, 0xAA, np.uint8)
    size = leveldb_kernels.unsnap(bytes_of(packed), 0, len(packed), out[:room])
    assert (out[room:] == 0xAA).all(), "wrote beyond its room"
    return None if size < 0 else out[:size].tobytes()


@settings(deadline=None)
@given(st.binary(max_size=300) | REPEATS)
@example(np.random.default_rng(1).bytes(70_000) + bytes(70_000))
def test_what_snappy_packed_is_unpacked(data):
    packed = SNAPPY.compress(data, asbytes=True)
    assert leveldb_kernels.size_of(bytes_of(packed), 0, len(packed)) == len(data)
    assert unsnapped(packed, len(data)) == data
    assert unsnapped(packed, len(data) + 5) == data
    if data:
        assert unsnapped(packed, len(data) - 1) is None


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=300) | REPEATS, st.data())
def test_damaged_input_is_refused_or_read_as_snappy_reads_it(data, draw):
    packed = bytearray(SNAPPY.compress(data, asbytes=True))
    for _ in range(draw.draw(st.integers(1, 4))):
        packed[draw.draw(st.integers(0, len(packed) - 1))] = draw.draw(st.integers(0, 255))
    packed = bytes(packed[: draw.draw(st.integers(0, len(packed)))])
    size = int(leveldb_kernels.size_of(bytes_of(packed), 0, len(packed)))
    if not 0 <= size <= 1 << 20:
        return
    found = unsnapped(packed, size)
    try:
        expected = SNAPPY.decompress(packed, size, asbytes=True)
    except (OSError, pa.ArrowException):
        expected = None
    assert found == expected


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_anything_at_all_may_be_given(data):
    unsnapped(data, 100)
    leveldb_kernels.seek(bytes_of(data), bytes_of(b"key"), np.empty(leveldb_kernels.LONGEST_KEY, np.uint8))


@pytest.mark.parametrize("compression", ["snappy", None])
def test_each_record_is_found_in_its_block(tmp_path, compression):
    draw = np.random.default_rng(5)
    stored = {b"%05d" % (7 * i): draw.bytes(int(draw.integers(0, 900))) + b"z" * 300 for i in range(400)}
    options = {"compression": compression, "block_size": 4096}
    with plyvel.DB(str(tmp_path / "db"), create_if_missing=True, **options) as db:
        for key, value in stored.items():
            db.put(key, value)
        db.delete(b"00007")
    with plyvel.DB(str(tmp_path / "db"), **options) as db:
        db.compact_range()
    snapshot = Snapshot(str(tmp_path / "db"), "x")
    room = np.empty(leveldb_kernels.LONGEST_KEY, np.uint8)
    for key, value in stored.items():
        place = snapshot.place(key)
        assert place is not None
        assert place.block is not None
        size = place.block.size
        buffer = np.empty(2 * leveldb_kernels.PAGE + size + TRAILER, np.uint8)
        at = leveldb_kernels.congruent(place.block.start)
        assert leveldb_kernels.read(place.fd, place.block.start, size + TRAILER, buffer, at)
        block = buffer[at : at + size + TRAILER]
        assert leveldb_kernels.sound(block, size)
        inside = bytes_of(leveldb_block.content(block.tobytes()))
        start, end = leveldb_kernels.seek(inside, bytes_of(key), room)
        if key == b"00007":
            assert (start, end) == (-1, -1)
        else:
            assert inside[start:end].tobytes() == value
        assert leveldb_kernels.seek(inside, bytes_of(key + b"x"), room) == (-1, -1)
        block[size // 2] ^= 1
        assert not leveldb_kernels.sound(block, size)
    assert not leveldb_kernels.read(place.fd, 1 << 30, 10, buffer, 0)
    snapshot.close()
