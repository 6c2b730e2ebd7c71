"""LevelDB as the world leaves it: one test for each thing that has gone wrong for somebody, on an input built for it.

What other files cover: a prototxt without a backend, or with the wrong one, in ``tests/pipeline/test_backend_named``;
what the folder holds in ``test_source``; views, cut and missing tables, stale locks and folders that may only be read
in ``test_leveldb_source``; one owner a node and the readers that ask it in ``tests/pipeline/test_feed_ray``.
"""

import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import tempfile
import warnings

import numpy as np
import plyvel
import pytest

from datasets import datum, leveldb_block, leveldb_library, leveldb_source, open_source, verify
from datasets.crc32c import crc32c, masked
from datasets.errors import (
    CodecMissing,
    CurrentMissing,
    DatasetCorrupt,
    DatasetTruncated,
    DatasetWarning,
    ManifestMismatch,
    SourceClosed,
)
from datasets.leveldb_raw import LevelDbReader
from datasets.manifest import Tally, write_manifest
from tests.datasets import golden

PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
HOLDER = "import sys, plyvel; db = plyvel.DB(sys.argv[1]); print('open', flush=True); sys.stdin.readline(); db.close()"


@pytest.fixture(autouse=True)
def views(tmp_path_factory, monkeypatch):
    """A temporary folder of our own, on which every test must leave nothing."""
    folder = tmp_path_factory.mktemp("views")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def make(folder, items, **options):
    db = plyvel.DB(str(folder), create_if_missing=True, **options)
    for key, value in items:
        db.put(key, value)
    db.close()
    return folder


def four_thousand(folder, **options):
    draw = random.Random(7)
    items = [
        (b"%08d" % i, datum.serialize(channels=1, height=20, width=100, data=draw.randbytes(2000), label=0))
        for i in range(4000)
    ]
    return make(folder, items, write_buffer_size=1 << 20, **options), items


# locks ----------------------------------------------------------------------------------------------------------------


def test_a_database_open_in_another_process_and_twice_in_this_one(tmp_path):
    folder, items = four_thousand(tmp_path / "db")
    with subprocess.Popen([sys.executable, "-c", HOLDER, folder], **PIPES) as holder:
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(plyvel.IOError, match="lock"):  # what everybody else meets
            plyvel.DB(str(folder))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with open_source(folder) as first, open_source(folder) as second:
                assert first.read(3).value == second.read(3).value == items[3][1]
                assert len(first) == 4000
        told = [str(one.message) for one in told]
        assert len(told) == 2
        assert all(f"held open by process {holder.pid}:" in text for text in told)
        holder.communicate("\n")
        assert holder.returncode == 0, "reading took nothing away from whoever has it"


def test_a_database_open_in_this_very_process_is_told_apart(tmp_path):
    folder = make(tmp_path / "db", [(b"a", b"1")])
    db = plyvel.DB(str(folder))
    with pytest.warns(DatasetWarning, match=rf"held open by this process \({os.getpid()}\)"), open_source(folder) as it:
        assert it.read(0).value == b"1"
    db.put(b"b", b"2")
    db.close()


def test_two_processes_read_at_once(tmp_path):
    folder, items = four_thousand(tmp_path / "db")
    before = golden.snapshot(folder)
    reader = (
        "import sys; from datasets import open_source\n"
        "with open_source(sys.argv[1]) as s:\n"
        "    print(len(s), flush=True); sys.stdin.readline(); print(s.read(3999).key.decode(), flush=True)"
    )
    environment = os.environ | {"PYTHONPATH": str(golden.DB.parents[2]), "TMPDIR": tempfile.gettempdir()}
    command = [sys.executable, "-c", reader, folder]
    with (
        subprocess.Popen(command, env=environment, **PIPES) as a,
        subprocess.Popen(command, env=environment, **PIPES) as b,
    ):
        assert (a.stdout.readline(), b.stdout.readline()) == ("4000\n", "4000\n")
        with open_source(folder) as source:
            assert source.read(10).value == items[10][1]
        assert (a.communicate("\n")[0], b.communicate("\n")[0]) == ("00003999\n", "00003999\n")
    assert {name: seen[:3] for name, seen in golden.snapshot(folder).items()} == {
        name: seen[:3] for name, seen in before.items()
    }


def test_a_writer_during_the_run_is_told_once_and_changes_nothing_that_is_read(tmp_path):
    folder, items = four_thousand(tmp_path / "db")
    with open_source(folder) as source:
        source.read_many(range(10))
        make(folder, [(b"%08d" % i, b"new") for i in range(4000)])
        with pytest.warns(DatasetWarning, match="opened or written by another process"):
            source.read_many(range(10))
        assert [record.value for record in source.read_many(range(4000))] == [value for _, value in items]


def test_a_table_cut_in_place_while_it_is_read_is_an_error(tmp_path):
    folder, _ = four_thousand(tmp_path / "db", compression=None)

    def child():
        with open_source(folder) as source:
            source.read(0)
            for table in folder.glob("*.ldb"):
                os.truncate(table, 4096)
            with pytest.raises(DatasetTruncated, match=r"\.ldb became shorter while it was being read"):
                source.read_many(range(100))

    assert golden.in_child(child) == 0


# what must not be destroyed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["missing", "renamed"])
def test_without_current_nothing_is_opened_and_no_table_is_lost(tmp_path, how):
    folder, _ = four_thousand(tmp_path / "a db")
    if how == "missing":
        (folder / "CURRENT").unlink()
    else:
        (folder / "CURRENT").rename(folder / "CURRENT.bak")
    before = golden.snapshot(folder)
    for backend in (None, "leveldb"):
        with pytest.raises(CurrentMissing) as caught:
            open_source(folder, backend=backend)
        for part in ("do not open it with create_if_missing", "repair a copy", str(folder)):
            assert part in str(caught.value)
    # What it says to do can be done as it stands, spaces in the path included.
    assert caught.value.hint is not None
    command = caught.value.hint.split("repair a copy: ")[1].split(", then ")[0]
    subprocess.run(command.replace("python ", f"{sys.executable} ", 1), shell=True, check=True)
    with open_source(f"{folder}.copy") as source:
        assert len(source) == 4000
    assert golden.snapshot(folder) == before


# checksums ------------------------------------------------------------------------------------------------------------


def test_flipped_bytes_are_told_with_file_place_and_key(tmp_path):
    folder, items = four_thousand(tmp_path / "db", compression=None)
    with open_source(folder):
        pass
    table = sorted(folder.glob("*.ldb"))[2]
    content = bytearray(table.read_bytes())
    for place in range(len(content) // 3, len(content) // 3 + 8):
        content[place] ^= 0xFF
    table.write_bytes(content)
    db = plyvel.DB(str(folder))
    assert sum(db.get(key) != value for key, value in items) >= 1, "unverified reads give wrong bytes without an error"
    db.close()
    with pytest.raises(DatasetCorrupt) as caught:
        open_source(folder)
    text = str(caught.value)
    for part in (str(folder), "beyond the key '0000", "checksum mismatch", ".ldb, byte "):
        assert part in text


def test_a_read_that_meets_damage_names_its_record_and_table_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(leveldb_source, "_SCAN_LIMIT", 10)  # as in a large database, whose keys are not scanned
    folder = make(tmp_path / "db", [(b"%04d" % i, bytes([i]) * 3000) for i in range(200)], compression=None)
    plyvel.DB(str(folder), compression=None).close()  # the log becomes a table
    (table,) = folder.glob("*.ldb")
    content = bytearray(table.read_bytes())
    place = content.index(bytes([77]) * 3000) + 100
    content[place] ^= 1
    table.write_bytes(content)
    with open_source(folder) as source:
        with pytest.raises(DatasetCorrupt) as caught:
            source.read(77)
        assert "record 77 (key '0077')" in str(caught.value)
        assert f"block checksum mismatch in {table.name}, byte " in str(caught.value)
        told = 0
        for index in range(200):
            try:
                assert source.read(index).value == bytes([index]) * 3000
            except DatasetCorrupt:
                told += 1
        assert 1 <= told <= 2, "one block of 4 kB"


# codecs ---------------------------------------------------------------------------------------------------------------


def undecodable(folder, kind=1):
    """A database with one block that has a right checksum and cannot be decompressed."""
    make(folder, [(b"%04d" % i, b"abcd" * 500) for i in range(100)], compression="snappy")
    plyvel.DB(str(folder)).close()
    (table,) = folder.glob("*.ldb")
    content = np.fromfile(table, np.uint8)
    footer = content[-48:].tobytes()
    index = leveldb_block.footer(footer)
    block = leveldb_block.content(content[index.start : index.start + index.size + 5].tobytes())
    first = next(leveldb_block.entries(block))
    (start, size), _ = leveldb_block.handle(block[first.start : first.end])
    assert content[start + size] == 1, "the block is compressed with Snappy"
    if kind == 1:
        content[start : start + size] = 0xFF
    content[start + size] = kind
    crc = masked(crc32c(content[start : start + size + 1]))
    content[start + size + 1 : start + size + 5] = np.frombuffer(crc.to_bytes(4, "little"), np.uint8)
    content.tofile(table)
    return folder


def test_the_probe_finds_snappy_in_this_build():
    leveldb_library.has_snappy.cache_clear()
    assert leveldb_library.has_snappy() is True


def test_a_build_without_snappy_is_told_from_corruption(tmp_path, monkeypatch):
    folder = undecodable(tmp_path / "db")
    with pytest.raises(DatasetCorrupt, match="corrupted compressed block"):
        open_source(folder)
    with monkeypatch.context() as patch:
        patch.setattr(leveldb_block, "has_codec", lambda name: False)
        with pytest.raises(CodecMissing) as caught:
            open_source(folder)
    for part in ("Snappy, which this build of pyarrow lacks", "the checksum is right", str(folder), ".ldb, byte "):
        assert part in str(caught.value)
    monkeypatch.setattr(leveldb_library, "has_snappy", lambda: False)
    with pytest.raises(CodecMissing, match="lacks Snappy"):  # nor is it a list of lost records
        list(LevelDbReader(str(folder)).scan())


@pytest.mark.parametrize("compression", ["snappy", None])
def test_a_missing_codec_is_told_at_the_start(tmp_path, monkeypatch, compression):
    """Case B6 with a stub for a build without Snappy: before any record is read, and only where blocks are compressed.

    Random bytes are stored as they are with either setting, so that no first data block is compressed: the index is.
    """
    folder = tmp_path / "db"
    rows = [(b"%08d" % i, np.random.default_rng(i).bytes(5000)) for i in range(200)]
    make(folder, rows, write_buffer_size=1 << 18, compression=compression)
    monkeypatch.setattr(leveldb_library, "has_snappy", lambda: False)
    opened = []
    monkeypatch.setattr(plyvel, "DB", lambda *args, real=plyvel.DB, **more: opened.append(args) or real(*args, **more))
    with open_source(folder) as source:  # which needs no plyvel
        assert source.read(199).value == rows[199][1]
    if compression is None:
        return
    with pytest.raises(CodecMissing, match="lacks Snappy"):
        list(LevelDbReader(str(folder)).scan())
    assert not opened


def test_the_codec_is_tried_once_and_only_for_compressed_blocks(tmp_path, monkeypatch):
    tried = []
    monkeypatch.setattr(leveldb_library, "has_snappy", lambda: tried.append(1) or True)
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    for folder, compression in ((plain, None), (packed, "snappy")):
        make(
            folder, [(b"%08d" % i, bytes(5000)) for i in range(200)], write_buffer_size=1 << 18, compression=compression
        )
    list(LevelDbReader(str(plain)).scan())
    assert not tried
    list(LevelDbReader(str(packed)).scan())
    assert len(tried) == 1


def test_a_probe_that_cannot_be_made_blames_nothing(monkeypatch):
    """A full temporary folder, say: whoever reads the data finds out."""

    def fail(*_args, **_more):
        raise plyvel.IOError(b"IO error: No space left on device")

    leveldb_library.has_snappy.cache_clear()
    monkeypatch.setattr(plyvel, "DB", fail)
    assert leveldb_library.has_snappy() is True
    leveldb_library.has_snappy.cache_clear()


def test_a_block_of_a_newer_codec_is_named_so(tmp_path):
    with pytest.raises(CodecMissing, match="compression type 5"):
        open_source(undecodable(tmp_path / "db", kind=5))


def test_a_damaged_snappy_block_is_corruption_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(leveldb_library, "has_snappy", lambda: False)  # even then: the checksum comes first
    folder = undecodable(tmp_path / "db")
    (table,) = folder.glob("*.ldb")
    content = bytearray(table.read_bytes())
    content[30] ^= 1
    table.write_bytes(content)
    with pytest.raises(DatasetCorrupt, match="checksum mismatch"):
        open_source(folder)


# limits ---------------------------------------------------------------------------------------------------------------


def test_three_hundred_tables_are_read_under_a_limit_of_64_open_files(tmp_path):
    # A write buffer takes 64 kB at least, so each of these records ends a table.
    folder = tmp_path / "db"
    make(folder, [(b"%08d" % i, bytes([i % 251]) * 70_000) for i in range(300)], write_buffer_size=1, compression=None)
    names = [place.name for place in folder.glob("*.ldb")]
    assert len(names) >= 250

    def child():
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        assert leveldb_library.open_files_limit() == 16
        with open_source(folder) as source:
            order = list(range(300))
            random.Random(1).shuffle(order)
            for index in order:
                assert source.read(index).value[:2] == bytes([index % 251]) * 2
            assert len(os.listdir("/proc/self/fd")) < 48
            (tmp_path / "snapshot").write_text("there is room for other files")

    assert golden.in_child(child) == 0


# logs -----------------------------------------------------------------------------------------------------------------


def cut_log(folder):
    log = max(folder.glob("*.log"), key=lambda place: place.stat().st_size)
    size = log.stat().st_size
    assert size > 100_000
    os.truncate(log, size // 2)
    return log


def test_a_cut_log_is_refused_and_salvage_keeps_what_is_there(tmp_path):
    """LevelDB itself would go on with fewer records and say nothing."""
    folder, items = four_thousand(tmp_path / "db")
    log = cut_log(folder)
    before = golden.snapshot(folder)
    with pytest.raises(DatasetTruncated, match=log.name) as caught:
        open_source(folder)
    assert "--salvage" in str(caught.value)
    assert verify.main([str(folder), "--salvage", str(tmp_path / "sound")]) == 1
    with open_source(tmp_path / "sound") as source:
        assert 3000 < len(source) < 4000
        stored = dict(items)
        assert all(stored[record.key] == record.value for record in source.read_many(range(len(source))))
    assert golden.snapshot(folder) == before


def test_a_log_that_lost_whole_records_is_refused_where_there_is_a_manifest(tmp_path):
    folder, items = four_thousand(tmp_path / "db")
    tally = Tally()
    for key, value in [*items, (b"zzz", b"a record that a later copy of the log lacks")]:
        tally.add(key, value, (1, 1, 2000), 0, False)
    write_manifest(folder, tally.manifest(backend="leveldb"), tally.crcs)
    with pytest.raises(ManifestMismatch, match="does not hold what its manifest") as caught:
        open_source(folder)
    assert "4001 records" in str(caught.value)


# without plyvel -------------------------------------------------------------------------------------------------------

HIDDEN = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "plyvel":
            raise ModuleNotFoundError("No module named 'plyvel'", name=name)
sys.meta_path.insert(0, Hide())
import numpy as np
from datasets import convert, inspect, open_source, verify
from datasets.errors import SourceError
from profiler.errors import StallscopeError
from gpu import Net
from pipeline.config import Config
from pipeline.feed import Feed
from pipeline.settings import load
from profiler import report
np.savez("set.npz", images=np.arange(40 * 64, dtype=np.uint8).reshape(40, 1, 8, 8), labels=np.arange(40) % 4)
assert convert.main(["npz", "set.npz", "out", "--backend", "lmdb", "--shuffle", "off"]) == 0
assert inspect.main(["out", "--json"]) == 0
settings = {"data.train.source": "out", "data.train.batch": 8, "device.backend": "emulated", "run.iterations": 5}
with Feed(load(None, settings | {"feed.engine": "inline"})) as feed:
    batch = next(feed)
    assert sorted(batch.ids.tolist()) != batch.ids.tolist() and batch.data.shape == (8, 1, 8, 8)
    batch.release()
with open_source(sys.argv[1]) as source:
    print("READ", len(source.read_many(range(len(source)))))
try:
    verify.main([sys.argv[1]])
except SourceError as error:
    print("TOLD", str(error).replace("\\n", " "))
try:
    convert.main(["npz", "set.npz", "out2", "--backend", "leveldb"])
except StallscopeError as error:
    print("TOLD", str(error).replace("\\n", " "))
assert "plyvel" not in sys.modules
"""


def test_everything_but_writing_and_mending_leveldbs_works_without_plyvel(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(golden.DB.parents[2])}
    command = [sys.executable, "-c", HIDDEN, golden.DB / "mnist_test_leveldb"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told, written = (line for line in done.stdout.splitlines() if line.startswith("TOLD"))
    assert "READ 1000" in done.stdout
    assert "writing a LevelDB needs the package 'plyvel'" in written
    for part in ("needs the package 'plyvel'", "pip install", "Python 3.11 and 3.12", "convert the data to LMDB"):
        assert part in told
    assert not (tmp_path / "out2").exists()


# life cycle -----------------------------------------------------------------------------------------------------------


def test_closing_while_an_iterator_is_pending_is_an_error_of_ours_and_no_crash(tmp_path):
    folder = make(tmp_path / "db", [(b"%d/x" % i, b"v%d" % i) for i in range(100)])

    def child():
        source = open_source(folder)
        pending = (source.read(index) for index in range(100))
        assert next(pending).index == 0
        source.close()
        with pytest.raises(SourceClosed):
            next(pending)
        with open_source(folder) as again:
            assert len(again) == 100

    assert golden.in_child(child) == 0


def test_forked_children_read_on_and_their_end_harms_nobody(tmp_path):
    folder, items = four_thousand(tmp_path / "db")
    with open_source(folder) as source:
        source.read(0)

        def child():
            assert source.read(5).value == items[5][1]
            source.close()

        assert [golden.in_child(child) for _ in range(3)] == [0, 0, 0]
        assert golden.in_child(lambda: os.kill(os.getpid(), signal.SIGKILL)) == -signal.SIGKILL
        assert source.read(3999).value == items[3999][1]


def test_a_copy_of_a_database_with_other_keys_finds_its_place_again(tmp_path):
    keys = sorted(b"%d/x" % i for i in range(100))
    folder = make(tmp_path / "db", [(key, b"<" + key) for key in keys])
    with open_source(folder) as source:
        pickled = pickle.dumps(source)
    assert len(pickled) < 1000, "no list of keys travels"
    with pickle.loads(pickled) as copy:
        assert len(copy) == 100
        assert copy.key(42) == keys[42]
        assert copy.read(42).value == b"<" + keys[42]
