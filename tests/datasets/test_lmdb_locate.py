"""Where records lie: found by one read each, the same in every way of looking, and never by a page of another time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import lmdb
import numpy as np
import pytest

from datasets import key_cache, lmdb_locate, lmdb_source, lmdb_walk
from datasets.errors import DatasetChanged, DatasetCorrupt, DatasetTruncated
from datasets.key_index import DenseKeys, KeyList
from datasets.lmdb_file import LmdbFile, Meta, Tree
from datasets.lmdb_source import LmdbSource
from tests.datasets.damage import PAGE, change, pages

COUNT = 12_000
READS = Path("/proc/self/io")


def value(number: int) -> bytes:
    return b"%d;" % number * (number % 9)


def make(folder: Path, keys: list[bytes], value: Callable[[int], bytes] = value) -> Path:
    with lmdb.open(str(folder), map_size=256 << 20, lock=False) as env, env.begin(write=True) as txn:
        for number, key in enumerate(keys):
            txn.put(key, value(number))
    return folder


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("numbers") / "db", [b"%08d" % number for number in range(COUNT)])


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("names") / "db", [b"%08d/x.jpg" % number for number in range(COUNT)])


@pytest.fixture(autouse=True)
def looked_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No places are taken over from a scan, and all that can be is compiled."""
    monkeypatch.setattr(key_cache, "cache_root", lambda: tmp_path / "cache")  # of keys: compiled code may stay
    monkeypatch.setattr(lmdb_source, "_SCAN_LIMIT", 0)
    monkeypatch.setattr(lmdb_locate, "PLAIN", 0)


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = make(tmp_path_factory.mktemp("first") / "db", [b"0", b"1"])
    with LmdbSource(str(folder)) as source:
        source.locate(np.arange(2))


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a database of too many records for their places to be remembered."""
    monkeypatch.setattr(lmdb_locate, "MOST_CELLS", 100)


def reads(call: Callable[[], object]) -> int:
    """Read calls that the system counted meanwhile, less those for the counting."""

    def now() -> int:
        return int(READS.read_text().split("syscr: ")[1].split()[0])

    own = -now() + now()
    before = now()
    call()
    return now() - before - own


def located(source: LmdbSource, indices: np.ndarray) -> list[tuple[bytes, bytes]]:
    """Keys and values, by plain reads of the places that are told."""
    return [
        (source.file.read(key_start, key_size), source.file.read(start, size))
        for start, size, key_start, key_size in np.transpose(source.locate(indices)).tolist()
    ]


@pytest.mark.parametrize("keys", ["numbers", "names"])
@pytest.mark.parametrize("most", [100, 1 << 20], ids=["forgotten", "remembered"])
def test_places_are_those_of_the_records(
    keys: str, most: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmdb_locate, "MOST_CELLS", most)
    ending = b"" if keys == "numbers" else b"/x.jpg"
    with LmdbSource(str(request.getfixturevalue(keys))) as source:
        assert isinstance(source.file, LmdbFile)
        assert isinstance(source._index, DenseKeys if keys == "numbers" else KeyList)
        draw = np.random.default_rng(1)
        for indices in (draw.integers(0, COUNT, 500), np.arange(700, 1300), np.array([COUNT - 1] * 9 + [0] * 9)):
            expected = [(b"%08d%s" % (index, ending), value(index)) for index in indices.tolist()]
            for _ in range(2):
                assert located(source, indices) == expected
                assert [(record.key, record.value) for record in source.read_many(indices)] == expected


@pytest.mark.skipif(not READS.exists(), reason="needs /proc/self/io")
@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize(("keys", "more"), [("numbers", 0), ("names", 0.35)])
def test_a_look_up_is_one_read(keys: str, more: float, request: pytest.FixtureRequest) -> None:
    """Of the leaf: the branches are held. A named record may lie on the leaf behind that of the key before it."""
    with LmdbSource(str(request.getfixturevalue(keys))) as source:
        source.read_many(range(COUNT))
        draw = np.random.default_rng(2)
        for _ in range(5):
            indices = draw.integers(0, COUNT, 256)
            assert reads(partial(source.locate, indices)) <= 256 * (1 + more)
            assert reads(partial(source.read_many, indices)) <= 256 * (1 + more) + 4  # and the checks
        assert reads(partial(source.read_many, range(5000, 5256))) <= 256 / 8


@pytest.mark.skipif(not READS.exists(), reason="needs /proc/self/io")
@pytest.mark.parametrize("keys", ["numbers", "names"])
def test_another_epoch_reads_no_page_to_find_a_record(keys: str, request: pytest.FixtureRequest) -> None:
    with LmdbSource(str(request.getfixturevalue(keys))) as source:
        source.read_many(range(COUNT))
        indices = np.random.default_rng(3).integers(0, COUNT, 256)
        assert reads(lambda: source.locate(indices)) == 0
        assert reads(lambda: source.read_many(indices)) <= 256 + 4
        assert reads(lambda: source.read_many(range(5000, 5256))) <= 256 / 8


@pytest.mark.usefixtures("forgetful")
def test_more_branches_than_there_is_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_walk, "BRANCH_BYTES", 4 * PAGE)
    keys = [b"%05d" % number * 60 for number in range(3000)]  # 13 to a page, on branches too
    folder = make(tmp_path / "db", keys)
    assert len(pages(folder, 1)) > 20
    with LmdbSource(str(folder)) as source:
        draw = np.random.default_rng(4)
        for _ in range(4):
            indices = draw.integers(0, 3000, 400)
            expected = [(keys[index], value(index)) for index in indices.tolist()]
            assert located(source, indices) == expected


@pytest.mark.parametrize("start", [10**25, 10**18, 9 * 10**18], ids=["26 digits", "19 digits", "beyond int64"])
def test_numbers_that_no_integer_holds(tmp_path: Path, start: int) -> None:
    folder = make(tmp_path / "db", [b"%d" % (start + number) for number in range(500)])
    with LmdbSource(str(folder)) as source:
        assert len(source) == 500
        assert isinstance(source._index, DenseKeys)
        indices = np.random.default_rng(5).permutation(500)
        for _ in range(2):
            assert [key for key, _ in located(source, indices)] == [b"%d" % (start + at) for at in indices.tolist()]


@pytest.mark.usefixtures("forgetful")
class TestPagesOfAnotherTime:
    """The branches are held while the file changes under the reader."""

    @pytest.fixture
    def opened(self, tmp_path: Path) -> Iterator[tuple[LmdbSource, Path]]:
        folder = make(tmp_path / "db", [b"%08d" % number for number in range(COUNT)])
        with LmdbSource(str(folder)) as source:
            source.read_many(range(COUNT))
            yield source, folder

    def test_a_leaf_of_other_keys_gives_no_record(self, opened: tuple[LmdbSource, Path]) -> None:
        """It carries the right number: only its keys tell."""
        source, folder = opened
        first, second = pages(folder, 2)[3:5]
        content = (folder / "data.mdb").read_bytes()[second * PAGE : (second + 1) * PAGE]
        change(folder, first * PAGE, first.to_bytes(8, "little") + content[8:])
        wrong = []
        for start in range(0, COUNT, 50):
            try:
                for record in source.read_many(range(start, start + 50)):
                    assert (record.key, record.value) == (b"%08d" % record.index, value(record.index))
            except DatasetCorrupt as error:
                wrong.append(str(error))
        assert wrong
        assert all("is missing" in text for text in wrong)

    @pytest.mark.parametrize("header", [bytes(16), (5).to_bytes(8, "little")], ids=["zeros", "another's number"])
    def test_a_leaf_that_became_another_page(self, opened: tuple[LmdbSource, Path], header: bytes) -> None:
        source, folder = opened
        for leaf in pages(folder, 2):
            change(folder, leaf * PAGE, header)
        with pytest.raises(DatasetCorrupt, match=r"page \d+ is damaged"):
            source.locate(np.arange(5000, 5100))

    def test_a_cut_is_told_with_the_record(self, opened: tuple[LmdbSource, Path]) -> None:
        source, folder = opened
        os.truncate(folder / "data.mdb", min(pages(folder, 2)[5:]) * PAGE)
        with pytest.raises(DatasetTruncated, match=r"record \d+ \(key '000"):
            source.locate(np.arange(5000, 5100))

    def test_a_commit_is_noticed_and_the_next_reader_sees_it(self, opened: tuple[LmdbSource, Path]) -> None:
        source, folder = opened
        with lmdb.open(str(folder), map_size=256 << 20, lock=False) as env:
            for turn in range(3):  # pages of the first reader's time are written over
                with env.begin(write=True) as txn:
                    for number in range(0, COUNT, 2):
                        txn.put(b"%08d" % number, b"turn %d" % turn)
        with pytest.raises(DatasetChanged):
            source.read_many(range(100))
        with LmdbSource(str(folder)) as other:
            assert other.read_many([4000, 4001])[0].value == b"turn 2"


def test_memory_is_bounded_by_16_bytes_a_record_and_40_mib() -> None:
    for records in (0, 1, 1000, 10**6, 2_621_440, 2_621_441, 10**7, 10**9):
        with LmdbFile(__file__, "it") as file:
            meta = Meta(PAGE, 10**9, 1, Tree(0, records, 2, 10**9))
            locator = lmdb_locate.Locator(file, meta, meta.main, DenseKeys(10, 0, records))
            assert locator.nbytes <= min(16 * records, 40 << 20)


def test_a_few_records_are_read_without_the_compiled_code(numbers: Path, names: Path) -> None:
    """Loading it takes a second: tools that look at a few records of a large database do without."""
    script = (
        "import sys; from datasets import lmdb_source; lmdb_source._SCAN_LIMIT = 0\n"
        "for path in sys.argv[1:]:\n"
        "    source = lmdb_source.LmdbSource(path)\n"
        "    for index in (0, 8, 4000, 11992, *range(0, 12000, 400)):\n"
        "        print(index, source.read(index).value.decode())\n"
        "assert 'numba' not in sys.modules\n"
    )
    command = [sys.executable, "-c", script, str(numbers), str(names)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    wanted = [0, 8, 4000, 11992, *range(0, 12000, 400)]
    assert done.stdout == "".join(f"{index} {value(index).decode()}\n" for index in wanted) * 2


def test_plain_and_compiled_look_ups_tell_the_same(numbers: Path, names: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_locate, "PLAIN", 1000)
    for folder in (numbers, names):
        with LmdbSource(str(folder)) as source:
            expected = np.transpose(source.locate(np.arange(0, COUNT, 97))).tolist()
        with LmdbSource(str(folder)) as source, monkeypatch.context() as patched:
            patched.setattr(lmdb_walk.find, "_dispatcher", None)
            patched.setattr(lmdb_walk.find, "_natives", [])
            assert len(source) == COUNT
            assert source._locator is not None
            told = [source._locator.plain([index]) for index in range(0, COUNT, 97)]
        found = [(list(chain(*place)), wanted) for place, wanted in zip(told, expected, strict=True) if place]
        assert len(found) == len(told) if folder == numbers else len(found) > len(told) / 2
        assert all(place == wanted for place, wanted in found)
