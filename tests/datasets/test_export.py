"""Exports, and that what is read back from them is what was exported."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import lmdb
import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from datasets import convert, datum, decode, export, manifest
from datasets.datum import DatumError, DatumSizeMismatch
from datasets.source import open_source
from profiler.errors import StallscopeError, UsageError
from tests.datasets import golden

RAW, ENCODED, GRAY = "crops96_raw_40x48_lmdb", "crops24_encoded_native_lmdb", "mnist_test_lmdb"


def write(folder: Path, records: dict[bytes, bytes]) -> Path:
    with lmdb.open(str(folder), map_size=64 << 20, lock=False) as env, env.begin(write=True) as txn:
        for key, value in records.items():
            txn.put(key, value)
    return folder


def raw(shape: tuple[int, int, int], label: int | None = 0, seed: int = 0) -> bytes:
    channels, height, width = shape
    data = np.random.default_rng(seed).bytes(channels * height * width)
    return datum.serialize(channels=channels, height=height, width=width, data=data, label=label, encoded=False)


def content(folder: Path) -> list[tuple[bytes, int | None, bool]]:
    """Pixels or file, label and kind of each record, in order: what a record is, whatever its key."""
    with open_source(folder) as source:
        parsed = [datum.parse(record.value) for record in source.read_many(range(len(source)))]
    return [(bytes(one.data), one.label, one.encoded) for one in parsed]


def export_and_back(database: Path, out: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> Path:
    """Follow the command that the export prints."""
    assert export.main([str(database), str(out), "--to", kind]) == 0
    printed = capsys.readouterr().out
    command = printed.split("python -m datasets.convert ")[1].splitlines()[0]
    back = out.parent / f"{kind}_back"
    assert convert.main([str(back) if word == "DB" else word for word in command.split()]) == 0
    return back


@pytest.mark.parametrize("kind", ["npz", "images", "parquet"])
@pytest.mark.parametrize("name", [RAW, GRAY])
def test_raw_records_come_back(tmp_path: Path, name: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    back = export_and_back(golden.DB / name, tmp_path / "out", kind, capsys)
    assert content(back) == content(golden.DB / name)
    with open_source(golden.DB / name) as before, open_source(back) as after:
        first, second = datum.parse(before.read(7).value), datum.parse(after.read(7).value)
    assert (first.channels, first.height, first.width) == (second.channels, second.height, second.width)


@pytest.mark.parametrize("kind", ["images", "parquet"])
def test_image_files_come_back_byte_for_byte(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    back = export_and_back(golden.DB / ENCODED, tmp_path / "out", kind, capsys)
    assert content(back) == content(golden.DB / ENCODED)
    with open_source(golden.DB / ENCODED) as before, open_source(back) as after:
        assert [record.value for record in before.read_many(range(24))] == [
            record.value for record in after.read_many(range(24))
        ]


def test_arrays_are_bgr_and_need_no_pickle(tmp_path: Path) -> None:
    out = tmp_path / "a.npz"
    assert export.main([str(golden.DB / "crops24_png_72_lmdb"), str(out), "--to", "npz"]) == 0
    with np.load(out, allow_pickle=False) as archive:
        images, labels = archive["images"], archive["labels"]
    assert (images.dtype, images.shape, labels.dtype) == (np.uint8, (24, 3, 72, 72), np.int32)
    with open_source(golden.DB / "crops24_png_72_lmdb") as source:
        for index, record in enumerate(source.read_many(range(24))):
            parsed = datum.parse(record.value)
            np.testing.assert_array_equal(images[index], decode.to_image(parsed))
            assert labels[index] == parsed.label


def test_folders_and_list_say_the_same(tmp_path: Path) -> None:
    made = write(tmp_path / "db", {
        b"00000000_cat/a b.png": raw((3, 4, 5), 0), b"00000001_dog/b.png": raw((3, 4, 5), 1),
        b"zz": raw((1, 4, 5), 300), b"zzz": datum.serialize(data=jpeg(), label=-1),
    })  # fmt: skip
    tally = manifest.Tally()
    with open_source(made) as source:
        for record in source.read_many(range(4)):
            tally.add(record.key, record.value, (3, 4, 5), 0, False)
    manifest.write_manifest(made, tally.manifest(backend="lmdb", classes=["cat", "dog"]), tally.crcs)
    assert export.main([str(made), str(tmp_path / "out"), "--to", "images"]) == 0
    lines = (tmp_path / "out" / "list.txt").read_text().splitlines()
    assert lines == [
        "cat/00000000_cat_a_b.png 0", "dog/00000001_dog_b.png 1", "300/00000002_zz.png 300", "-01/00000003_zzz.jpg -1",
    ]  # fmt: skip
    listed = sorted(line.rsplit(" ", 1)[0] for line in lines)
    assert listed == sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.*g"))
    assert (tmp_path / "out" / "-01" / "00000003_zzz.jpg").read_bytes() == jpeg()
    with Image.open(tmp_path / "out" / "dog" / "00000001_dog_b.png") as picture:
        stored = datum.parse(raw((3, 4, 5)))
        np.testing.assert_array_equal(np.asarray(picture)[..., ::-1].transpose(2, 0, 1), decode.to_image(stored))


def jpeg() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (5, 4), (200, 10, 10)).save(buffer, "JPEG")
    return buffer.getvalue()


def test_parquet_has_keys_files_labels_and_class_names(tmp_path: Path) -> None:
    made = write(tmp_path / "db", {b"%08d" % place: raw((1, 3, 3), place % 2, place) for place in range(600)})
    tally = manifest.Tally()
    with open_source(made) as source:
        for record in source.read_many(range(600)):
            tally.add(record.key, record.value, (1, 3, 3), 0, False)
    manifest.write_manifest(made, tally.manifest(backend="lmdb", classes=["cat", "dog"]), tally.crcs)
    assert export.main([str(made), str(tmp_path / "a.parquet"), "--to", "parquet"]) == 0
    with pq.ParquetFile(tmp_path / "a.parquet") as file:
        assert file.num_row_groups == 3
        assert [(field.name, str(field.type)) for field in file.schema_arrow] == [
            ("key", "string"), ("image", "binary"), ("label", "int32"),
        ]  # fmt: skip
        about = json.loads(file.schema_arrow.metadata[b"huggingface"])
        table = file.read()
    assert about["info"]["features"]["label"]["names"] == ["cat", "dog"]
    assert table["key"].to_pylist() == [f"{place:08d}" for place in range(600)]
    assert table["label"].to_pylist() == [place % 2 for place in range(600)]
    assert table["image"][5].as_py().startswith(b"\x89PNG")


SHORT = datum.serialize(channels=3, height=4, width=5, data=b"0123456789", label=1)
FLOATS = datum.serialize(channels=1, height=1, width=1, float_data=[1.0], label=1)
TEXT = datum.serialize(data=b"404 not found", label=1, encoded=True)
ALL = "npz images parquet"


@pytest.mark.parametrize(
    ("value", "kinds", "error", "text"),
    [
        (raw((1, 2, 2), None), ALL, DatumError, "record 1 .*: has no label"),
        (SHORT, ALL, DatumSizeMismatch, "'odd'"),
        (FLOATS, ALL, DatumError, "float_data"),
        (TEXT, ALL, DatumError, "bytes are not one"),
        (raw((2, 2, 2)), "images parquet", DatumError, r"1 or 3 channels(.|\n)*--to npz"),
        (raw((1, 2, 3)), "npz", DatumError, r"1x2x2, as record 0 \(key 'a'\)(.|\n)*1x2x3 in record 1 \(key 'odd'\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_named_and_leaves_nothing(
    tmp_path: Path, value: bytes, kinds: str, error: type[Exception], text: str
) -> None:
    made = write(tmp_path / "db", {b"a": raw((1, 2, 2)), b"odd": value})
    for kind in kinds.split():
        with pytest.raises(error, match=text):
            export.main([str(made), str(tmp_path / "out"), "--to", kind])
    assert [path.name for path in tmp_path.iterdir()] == ["db"]


def test_records_of_several_kinds_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = write(tmp_path / "db", {b"a": raw((1, 2, 2)), b"b": datum.serialize(data=jpeg(), label=1, encoded=True)})
    assert export.main([str(made), str(tmp_path / "out"), "--to", "images"]) == 0
    assert (
        "note: the records are of several kinds (1 with raw gray pixels, 1 with image files)" in capsys.readouterr().out
    )


@pytest.mark.parametrize("kind", ["npz", "parquet", "images"])
def test_nothing_is_replaced_unasked(tmp_path: Path, kind: str) -> None:
    database, out = str(golden.DB / "crops24_png_72_lmdb"), tmp_path / "out"
    assert export.main([database, str(out), "--to", kind]) == 0
    before = golden.snapshot(tmp_path)
    with pytest.raises(UsageError, match="exists already"):
        export.main([database, str(out), "--to", kind])
    assert golden.snapshot(tmp_path) == before
    assert export.main([database, str(out), "--to", kind, "--force"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_force_replaces_no_folder_of_another_kind(tmp_path: Path) -> None:
    database, out = str(golden.DB / "crops24_png_72_lmdb"), tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").touch()
    with pytest.raises(UsageError, match="no folder of exported images"):
        export.main([database, str(out), "--to", "images", "--force"])
    (out / "list.txt").touch()
    (out / "class").mkdir()
    with pytest.raises(UsageError, match=r"stays as it is(.|\n)*thesis.tex"):
        export.main([database, str(out), "--to", "images", "--force"])
    (out / "thesis.tex").rename(out / "class" / "thesis.tex")
    with pytest.raises(UsageError, match="stays as it is"):
        export.main([database, str(out), "--to", "images", "--force"])
    with pytest.raises(UsageError, match="is a folder"):
        export.main([database, str(out), "--to", "npz", "--force"])
    assert (out / "class" / "thesis.tex").exists()


def test_names_of_classes_that_are_no_names_of_folders_are_not_used(tmp_path: Path) -> None:
    made = write(tmp_path / "db", {b"a": raw((1, 2, 2), 1)})
    for names in (["ok", "../../escape"], ["ok", ".hidden"], ["same", "same"], ["a\nb", "c"], ["ok", ""]):
        tally = manifest.Tally()
        tally.add(b"a", raw((1, 2, 2), 1), (1, 2, 2), 1, False)
        manifest.write_manifest(made, tally.manifest(backend="lmdb", classes=names), tally.crcs)
        assert export.main([str(made), str(tmp_path / "out"), "--to", "images", "--force"]) == 0
        assert (tmp_path / "out" / "list.txt").read_text() == "001/00000000_a.png 1\n"


def test_hostile_keys_stay_inside(tmp_path: Path) -> None:
    keys = [b"../../../etc/x", b"/abs", b"\xff\xfe", b"a" * 500, b"two  words\n", b"..", b"b.png", b"c.tar.gz"]
    made = write(tmp_path / "db", {key: raw((1, 2, 2)) for key in keys})
    assert export.main([str(made), str(tmp_path / "out"), "--to", "images"]) == 0
    names = sorted(path.name for path in (tmp_path / "out" / "000").iterdir())
    assert len(names) == len(keys)
    assert all(name.endswith(".png") and len(name) < 140 for name in names)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["db", "out"]
    assert any(name.endswith("_b.png") for name in names)


def test_a_full_disk_ends_with_a_message_and_leaves_nothing(tmp_path: Path) -> None:
    for kind in ("npz", "images", "parquet"):
        # A limit on the size of files stands in for a full disk.
        limit = 2 if kind == "images" else 8
        script = f"ulimit -f {limit}; exec {sys.executable} -m datasets.export {golden.DB / RAW} out --to {kind}"
        done = subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path,
            env={"PYTHONPATH": str(golden.DB.parents[2]), "PYTHONDONTWRITEBYTECODE": "1"}, check=False,
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        assert "cannot be written" in done.stderr
        assert "Traceback" not in done.stderr
        assert list(tmp_path.iterdir()) == []


def test_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    database = str(golden.DB / RAW)
    for arguments, text in (
        ([database, str(tmp_path / "no" / "x"), "--to", "npz"], "does not exist"),
        ([database, str(tmp_path / "no" / "x"), "--to", "images"], "does not exist"),
        ([str(write(tmp_path / "empty", {})), str(tmp_path / "x"), "--to", "npz"], "holds no records"),
    ):
        with pytest.raises(StallscopeError, match=text):
            export.main(arguments)
    for arguments in (
        [database, "x"],
        [database, "x", "--to", "hdf5"],
        [database, "x", "--to", "images", "--color", "gray"],
    ):
        with pytest.raises(SystemExit):
            export.main(arguments)
    assert "--color is of use with --to npz only" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["npz", "images", "parquet"])
def test_what_a_killed_export_left_is_gone_after_the_next_one(tmp_path: Path, kind: str) -> None:
    """Twice: the part of a large set may fill a disk, and no later run would have known it for its own."""
    database = write(tmp_path / "db", {b"%04d" % index: raw((3, 20, 20), index, index) for index in range(100)})

    def die() -> None:
        os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
        export.main(command)

    (tmp_path / "target").mkdir()
    out = tmp_path / "target" / "out"
    command = [str(database), str(out), "--to", kind]
    for _ in range(2):
        assert golden.in_child(die) == -signal.SIGKILL
        assert [path.name[:10] for path in out.parent.iterdir()] == [".out.part-"]
    assert export.main(command) == 0
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", ["npz", "images", "parquet"])
@pytest.mark.parametrize("name", ["my set", "-set", "a'b$c"])
def test_the_command_that_is_printed_can_be_pasted_whatever_the_path(
    tmp_path: Path, kind: str, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert export.main([str(golden.DB / RAW), "--to", kind, "--", name]) == 0
    command = capsys.readouterr().out.split("python -m datasets.convert ")[1].splitlines()[0]
    assert convert.main(shlex.split(command)) == 0
    assert content(tmp_path / "DB") == content(golden.DB / RAW)
