"""A list of image files as a source: the same records as a conversion of it, and its traps by line."""

import json
import os
import pickle
from pathlib import Path

import pytest

from datasets import datum
from datasets.concat import ConcatSource
from datasets.errors import DatasetChanged, DatasetCorrupt, NotADataset, SourceClosed, SourceError
from datasets.image_list_source import ImageListSource
from datasets.inspect import main as inspect
from datasets.source import open_source
from datasets.verify import main as verify
from tests.datasets import golden
from tests.pipeline import build


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return build.photos(tmp_path)


def test_records_are_those_of_an_encoded_conversion(photos: Path) -> None:
    with (
        open_source(photos, root=str(photos.parent / "crops")) as files,
        open_source(golden.DB / "crops24_encoded_native_lmdb") as database,
    ):
        assert (files.backend, len(files)) == ("list", 24)
        for index in range(24):
            mine, stored = files.read(index), database.read(index)
            assert mine.key == stored.key == files.key(index)
            assert datum.parse(mine.value).label == datum.parse(stored.value).label
            assert datum.parse(mine.value).data == datum.parse(stored.value).data
        assert str(files.read(3)) == (
            f"record 3 (key '00000003_flower/img_0003.png') of list of images {photos}, line 4"
        )
        with pytest.raises(IndexError):
            files.read(24)


def test_paths_begin_at_the_list_unless_root_says_where(photos: Path) -> None:
    beside = photos.parent / "crops" / "list.txt"
    beside.write_bytes(photos.read_bytes())
    with open_source(beside) as source:
        assert len(source) == 24
    with pytest.raises(SourceError, match="24 problems; a job cannot begin") as caught:
        open_source(photos)
    assert "line 1: " in str(caught.value)
    assert "No such file" in str(caught.value)


def test_every_trap_is_told_by_line(photos: Path) -> None:
    lines = photos.read_text().splitlines()
    lines[2:5] = ["flower/gone.jpg 1", "flower/img_0003.png 2.5", "china/img_0004.jpg"]
    photos.write_text("\n".join([*lines[:2], "", *lines[2:]]))
    with pytest.raises(SourceError) as caught:
        ImageListSource(str(photos), str(photos.parent / "crops"))
    text = str(caught.value)
    for line, what in ((4, "No such file"), (5, "not a whole number"), (6, "no label")):
        assert any(f"line {line}: " in told and what in told for told in text.splitlines()), text
    assert "data.on_bad_record: skip" in text
    with open_source(photos, backend="list", root=str(photos.parent / "crops"), tolerant=True) as source:
        assert len(source) == 24
        with pytest.raises(DatasetCorrupt, match=r"record 2 .*line 4: .*No such file"):
            source.read(2)
        assert datum.parse(source.read(5).value).label == 3
        assert source.read(5).source.endswith("line 7")


def test_files_that_change_or_go_while_they_are_in_use_are_noticed(photos: Path) -> None:
    root = photos.parent / "crops"
    with open_source(photos, root=str(root)) as source:
        before = source.identity()
        (root / "flower" / "img_0000.jpg").unlink()
        with pytest.raises(DatasetCorrupt, match=r"line 1: .*img_0000\.jpg cannot be read"):
            source.read(0)
        (root / "china" / "img_0001.png").write_bytes(b"shorter")
        with pytest.raises(DatasetChanged, match=r"line 2: .*img_0001\.png was written to"):
            source.read(1)
    with open_source(photos, root=str(root), tolerant=True) as later:
        assert later.identity() != before
        assert {**later.identity(), "files": 0} == {**before, "files": 0}


def test_a_copy_in_another_process_reads_the_list_anew(photos: Path) -> None:
    source = open_source(photos, root=str(photos.parent / "crops"))
    copy = pickle.loads(pickle.dumps(source))
    source.close()
    with pytest.raises(SourceClosed):
        source.read(0)
    with copy:
        assert copy.read(7) == open_source(photos, root=str(photos.parent / "crops")).read(7)
        assert len(pickle.dumps(copy)) < 1000


def test_nothing_is_written_beside_list_or_files(photos: Path) -> None:
    before = golden.snapshot(photos.parent)
    with open_source(photos, root=str(photos.parent / "crops")) as source:
        source.read_many(range(24))
    assert golden.snapshot(photos.parent) == before


@pytest.mark.parametrize("content", [b"hello world\n", b"a.jpg\n", b"\xff\xfea\x00 \x001\x00\n", b"x 1\0\n"])
def test_other_text_is_no_data_set(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.txt").write_bytes(content)
    with pytest.raises(NotADataset, match="is not a data set"):
        open_source(tmp_path / "x.txt")


def test_verify_looks_at_every_file(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beside = photos.parent / "crops" / "list.txt"
    beside.write_bytes(photos.read_bytes())
    assert verify([str(beside)]) == 0
    capsys.readouterr()
    victim = photos.parent / "crops" / "china" / "img_0004.jpg"
    victim.write_bytes(victim.read_bytes()[:700])
    os.remove(photos.parent / "crops" / "flower" / "img_0000.jpg")
    assert verify([str(beside)]) == 1
    told = capsys.readouterr().out
    assert "img_0004.jpg" in told
    assert "img_0000.jpg" in told


def test_what_a_list_hides_is_told_by_every_command(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beside = photos.parent / "crops" / "list.txt"
    lines = photos.read_text().splitlines()
    first, label = lines[0].rsplit(" ", 1)
    beside.write_text("\n".join([*lines, f"{first} {int(label) + 1}", "nowhere.png 1"]) + "\n")
    note = f"paths that were there before with another label, at line: {len(lines) + 1} (as 1)"
    with open_source(beside, tolerant=True) as source, open_source(golden.DB / "mnist_test_lmdb") as other:
        assert source.notes == [note]
        assert ConcatSource([other, source]).notes == [f"{source.name}: {note}"]
    assert verify([str(beside), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["warnings"][0] == note
    where = f"{beside}, line {len(lines) + 2}: {beside.parent / 'nowhere.png'}: No such file or directory"
    assert document["bad"] == [{"key": f"{len(lines) + 1:08d}_nowhere.png", "index": len(lines) + 1, "reason": where}]
    beside.write_text("\n".join(beside.read_text().splitlines()[:-1]) + "\n")
    assert inspect([str(beside), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"][0] == note
