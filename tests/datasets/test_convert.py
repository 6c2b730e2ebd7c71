"""The converter: the bytes Caffe's tools write, order, backends, arrays, command line."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import lmdb
import numpy as np
import pytest

from datasets import convert_arrays, convert_inputs, datum, decode, writer
from datasets.manifest import read_manifest
from datasets.order import Order
from datasets.source import open_source
from profiler.errors import UsageError
from tests.datasets import golden
from tests.datasets.converting import DATA, IDX, ROOT, damaged, pairs, picture, records, run


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    images = np.random.default_rng(0).integers(0, 256, (30, 1, 5, 7), np.uint8)
    np.savez(tmp_path / "in.npz", images=images, labels=np.arange(30, dtype=np.int64) - 3)
    return tmp_path / "in.npz"


# ------------------------------------------------------------------------------------------------ the same as Caffe's


@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
def test_mnist_is_byte_for_byte_what_caffe_wrote(tmp_path: Path, backend: str) -> None:
    assert run("idx", IDX, tmp_path / "out", "--backend", backend, "--shuffle", "off") == 0
    made, golden = pairs(tmp_path / "out"), pairs(DATA / "db" / "mnist_test_lmdb")
    assert len(made) == 1000
    assert made == golden


@pytest.fixture(scope="module")
def crops(tmp_path_factory) -> Path:
    """The image files that Caffe stored unchanged, as files again, with their list."""
    folder = tmp_path_factory.mktemp("crops")
    lines = []
    for record in records(DATA / "db" / "crops24_encoded_native_lmdb"):
        parsed = datum.parse(record.value)
        name = record.key.decode()[9:]
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(parsed.data)
        lines.append(f"{name} {parsed.label}\n")
    (folder / "list.txt").write_text("".join(lines))
    return folder


def caffes(name: str) -> list[tuple[str, str, str]]:
    """Key, MD5 of the record and MD5 of its pixels, as Caffe's convert_imageset made them from the same 24 files."""
    return [tuple(entry) for entry in json.loads((DATA / "convert_imageset.json").read_text())[name]]


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("crops96_raw_40x48_lmdb", ["--resize", "40,48"]),
        ("crops24_raw_native_lmdb", []),
        ("crops24_gray_40x48_lmdb", ["--gray", "--resize", "40,48"]),
        ("crops24_encoded_native_lmdb", ["--encoded"]),
    ],
)
def test_images_are_byte_for_byte_what_caffe_wrote(crops: Path, tmp_path: Path, name: str, flags: list[str]) -> None:
    assert run("list", crops / "list.txt", tmp_path / "out", *flags, "--shuffle", "off") == 0
    expected = [(key, md5) for key, md5, _ in caffes(name)]
    assert [(key.decode(), golden.md5(value)) for key, value in pairs(tmp_path / "out")] == expected


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("crops24_encguess_72_lmdb", ["--encoded"]),
        ("crops24_png_72_lmdb", ["--encode-type", "png"]),
        ("crops24_gray_jpg_72_leveldb", ["--gray", "--encode-type", "jpg"]),
    ],
)
def test_compressed_images_are_those_of_caffe(crops: Path, tmp_path: Path, name: str, flags: list[str]) -> None:
    """JPEG files byte for byte. Two libraries compress a PNG differently, so there it is the kind and the pixels."""
    run("list", crops / "list.txt", tmp_path / "out", *flags, "--resize", "72", "--shuffle", "off")
    kinds = set()
    for record, (key, md5, pixels) in zip(records(tmp_path / "out"), caffes(name), strict=True):
        assert record.key.decode() == key
        parsed = datum.parse(record.value)
        kinds.add(bytes(parsed.data[:2]))
        if bytes(parsed.data[:2]) == b"\xff\xd8":
            assert golden.md5(record.value) == md5, key
        else:
            assert golden.md5(decode.to_image(parsed)) == pixels, key
    jpeg, png = b"\xff\xd8", b"\x89P"
    assert kinds == {"--encoded": {jpeg, png}, "png": {png}, "jpg": {jpeg}}[flags[-1]]


# ----------------------------------------------------------------------------------------------------- order, backends


def test_both_backends_hold_identical_records(npz: Path, tmp_path: Path) -> None:
    for backend in ("lmdb", "leveldb"):
        assert run("npz", npz, tmp_path / backend, "--backend", backend) == 0
    assert pairs(tmp_path / "lmdb") == pairs(tmp_path / "leveldb")
    manifests = [read_manifest(tmp_path / backend) for backend in ("lmdb", "leveldb")]
    assert manifests[0] is not None
    assert manifests[1] is not None
    assert manifests[0].content_sha256 == manifests[1].content_sha256
    with open_source(tmp_path / "leveldb") as source:
        assert source.backend == "leveldb"
        assert damaged(source) == []


def test_records_are_shuffled_by_a_seed_that_is_told(npz: Path, tmp_path: Path, capsys) -> None:
    run("npz", npz, tmp_path / "a")
    assert "30 records, 1x5x7, shuffled with seed 1" in capsys.readouterr().out
    labels = [datum.parse(record.value).label for record in records(tmp_path / "a")]
    assert labels == (Order(30, 1).records(0, np.arange(30)) - 3).tolist()
    assert [record.key for record in records(tmp_path / "a")] == [b"%08d" % index for index in range(30)]
    run("npz", npz, tmp_path / "b", "--shuffle", "9")
    other = [datum.parse(record.value).label for record in records(tmp_path / "b")]
    assert other != labels
    assert sorted(other) == list(range(-3, 27))
    told = read_manifest(tmp_path / "b")
    assert told is not None
    assert told.shuffle_seed == 9
    run("npz", npz, tmp_path / "c", "--shuffle", "off")
    assert [datum.parse(record.value).label for record in records(tmp_path / "c")] == list(range(-3, 27))


def test_the_map_doubles_and_nothing_is_lost(tmp_path: Path, monkeypatch) -> None:
    made: list[writer.LmdbWriter] = []

    def small(folder: Path) -> writer.LmdbWriter:
        made.append(writer.LmdbWriter(folder, map_size=64 << 10))
        return made[0]

    monkeypatch.setitem(writer.WRITERS, "lmdb", small)
    assert run("idx", IDX, tmp_path / "out", "--shuffle", "off") == 0
    assert made[0].doublings >= 3
    assert pairs(tmp_path / "out") == pairs(DATA / "db" / "mnist_test_lmdb")


def test_it_commits_by_records_and_by_bytes(tmp_path: Path, monkeypatch) -> None:
    sizes: list[int] = []

    class Counting(writer.LmdbWriter):
        def _write(self, pending: list[tuple[bytes, bytes]]) -> None:
            sizes.append(len(pending))
            super()._write(pending)

    monkeypatch.setitem(writer.WRITERS, "lmdb", Counting)
    images = np.zeros((2500, 1, 1), np.uint8)
    np.savez(tmp_path / "in.npz", images=images, labels=np.zeros(2500, np.int32))
    run("npz", tmp_path / "in.npz", tmp_path / "out")
    assert sizes == [1000, 1000, 500]
    sizes.clear()
    monkeypatch.setattr(writer, "COMMIT_BYTES", 1000)
    run("npz", tmp_path / "in.npz", tmp_path / "out", "--force")
    assert max(sizes) <= 1000 // 16
    assert sum(sizes) == 2500


def test_a_leveldb_is_in_tables_and_not_in_its_log(npz: Path, tmp_path: Path) -> None:
    run("npz", npz, tmp_path / "out", "--backend", "leveldb")
    assert sum(path.stat().st_size for path in (tmp_path / "out").glob("*.ldb")) > 1000
    assert sum(path.stat().st_size for path in (tmp_path / "out").glob("*.log")) == 0


# ------------------------------------------------------------------------------------------------------------- arrays


def test_layouts_and_channel_orders(tmp_path: Path) -> None:
    rgb = np.random.default_rng(1).integers(0, 256, (4, 5, 6, 3), np.uint8)
    labels = np.arange(4)
    np.savez(tmp_path / "nhwc.npz", images=rgb, labels=labels)
    np.savez(tmp_path / "nchw.npz", images=rgb.transpose(0, 3, 1, 2)[:, ::-1], labels=labels)
    run("npz", tmp_path / "nhwc.npz", tmp_path / "a", "--channel-order", "rgb")
    run("npz", tmp_path / "nchw.npz", tmp_path / "b")
    assert pairs(tmp_path / "a") == pairs(tmp_path / "b")
    np.savez(tmp_path / "open.npz", images=np.zeros((2, 3, 5, 3), np.uint8), labels=np.arange(2))
    with pytest.raises(UsageError, match="--layout"):
        run("npz", tmp_path / "open.npz", tmp_path / "c")
    run("npz", tmp_path / "open.npz", tmp_path / "c", "--layout", "nhwc")
    assert datum.parse(records(tmp_path / "c")[0].value).height == 3


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": np.zeros((2, 3, 3), np.uint8)}, "no array 'labels'"),
        ({"images": np.zeros((2, 3, 3)), "labels": np.zeros(2, int)}, "not a stack of images"),
        ({"images": np.zeros((2, 3, 3), np.uint8), "labels": np.zeros(2)}, "whole numbers"),
        ({"images": np.zeros((2, 3, 3), np.uint8), "labels": np.zeros(3, int)}, "not one label for each"),
        ({"images": np.zeros((2, 3, 3), np.uint8), "labels": np.full(2, 2**31)}, "32 bits"),
        ({"images": np.zeros((0, 3, 3), np.uint8), "labels": np.zeros(0, int)}, "no images"),
    ],
)
def test_archives_that_do_not_fit(tmp_path: Path, arrays, message: str) -> None:
    np.savez(tmp_path / "in.npz", **arrays)
    with pytest.raises(convert_inputs.InputError, match=message):
        run("npz", tmp_path / "in.npz", tmp_path / "out")


def idx(shape: tuple[int, ...], content: bytes, kind: int = 8) -> bytes:
    return bytes([0, 0, kind, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape) + content


def test_idx_types_and_plain_files(tmp_path: Path) -> None:
    (tmp_path / "x-images-idx3").write_bytes(idx((2, 1, 2), b"\x01\x02\x03\x04"))
    (tmp_path / "x-labels-idx1").write_bytes(idx((2,), b"\x00\x00\x01\x2c\xff\xff\xff\xff", 0x0C))
    run("idx", tmp_path / "x-images-idx3", tmp_path / "out", "--shuffle", "off")
    parsed = [datum.parse(record.value) for record in records(tmp_path / "out")]
    assert [(item.label, bytes(item.data)) for item in parsed] == [(300, b"\x01\x02"), (-1, b"\x03\x04")]


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (b"hello world", idx((2,), b"ab"), "not an IDX file"),
        (idx((2, 1, 2), b"abc"), idx((2,), b"ab"), "cut or damaged"),
        (idx((2, 1, 2), b"abcde"), idx((2,), b"ab"), "cut or damaged"),
        (idx((2,), b"ab"), idx((2,), b"ab"), "does not hold images"),
        (idx((2, 1, 2), b"abcd"), idx((3,), b"abc"), "not one label for each"),
        (gzip.compress(bytes(range(256)), mtime=0)[:99], idx((2,), b"ab"), "cannot be read"),
        (idx((2, 1, 2), b"abcd"), idx((2,), bytes(8), 0x0D), "whole numbers"),
        (idx((2, 1, 2), b"abcd"), None, "no file of labels"),
    ],
    ids=["text", "short", "long", "rank", "labels", "gzip", "float", "alone"],
)
def test_idx_files_that_do_not_fit(tmp_path: Path, images: bytes, labels: bytes | None, message: str) -> None:
    (tmp_path / "images").write_bytes(images)
    if labels is not None:
        (tmp_path / "labels").write_bytes(labels)
    with pytest.raises(convert_inputs.InputError, match=message):
        run("idx", tmp_path / "images", tmp_path / "out")


# ------------------------------------------------------------------------------------------------------- command line


def test_the_command_line_ends_with_a_message_and_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "datasets.convert"]
    done = subprocess.run(
        [*command, "npz", "nothing.npz", str(tmp_path / "o")], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 2
    assert "nothing.npz" in done.stderr
    assert "Traceback" not in done.stderr


def test_progress_is_shown_up_to_the_last_record(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (250, 1, 5, 7), np.uint8)
    np.savez(tmp_path / "in.npz", images=images, labels=np.arange(250))
    terminal, end = os.openpty()
    command = [sys.executable, "-m", "datasets.convert", "npz", str(tmp_path / "in.npz"), str(tmp_path / "out")]
    try:
        done = subprocess.run(command, stderr=end, stdout=subprocess.PIPE, cwd=ROOT, env=os.environ | {"TERM": "xterm"})
    finally:
        os.close(end)
    assert done.returncode == 0
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal that nobody has open
        while part := os.read(terminal, 1 << 16):
            shown += part
    os.close(terminal)
    assert b"writing out" in shown
    assert b"250/250" in shown


@pytest.mark.parametrize(
    "flags",
    [["--shuffle", "yes"], ["--shuffle", str(2**64)], ["--backend", "sqlite"], ["--resize", "4"], ["--on-error", "x"]],
)
def test_wrong_flags(npz: Path, tmp_path: Path, flags: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run("npz", npz, tmp_path / "out", *flags)
    assert caught.value.code == 2


@pytest.mark.parametrize("size", ["0", "4,", "1,2,3", "-4", "4.5", "a", "99999", "1x89478486"])
def test_wrong_sizes(tmp_path: Path, size: str) -> None:
    with pytest.raises(SystemExit) as caught:
        run("images", tmp_path, tmp_path / "out", f"--resize={size}")
    assert caught.value.code == 2


def test_a_key_too_long_for_lmdb_is_named(tmp_path: Path) -> None:
    name = "/".join(["d" * 200] * 3) + "/a.png"
    picture(tmp_path / "in" / name)
    with pytest.raises(UsageError, match="too long for a key"):
        run("images", tmp_path / "in", tmp_path / "out")


def test_reading_needs_no_lock_and_the_file_is_as_small_as_its_records(npz: Path, tmp_path: Path) -> None:
    run("npz", npz, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["data.mdb"]
    assert (tmp_path / "out" / "data.mdb").stat().st_size < 64 << 10
    with lmdb.open(str(tmp_path / "out"), readonly=True, lock=False) as env:
        assert env.stat()["entries"] == 30


@pytest.mark.parametrize("out", ["", ".", "/", "a/.."])
def test_targets_that_are_no_name(npz: Path, out: str) -> None:
    with pytest.raises(UsageError, match="is no name for a new database"):
        run("npz", npz, out)


@pytest.mark.parametrize("compressed", [False, True])
def test_archives_that_are_cut_or_damaged(tmp_path: Path, compressed: bool) -> None:
    images = np.random.default_rng(0).integers(0, 256, (30, 20, 20), np.uint8)
    file = tmp_path / "in.npz"
    (np.savez_compressed if compressed else np.savez)(file, images=images, labels=np.arange(30))
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[5000] ^= 1
    for content, told in (
        (bytes(flipped), "damaged|not a readable"),
        (whole[:-30], "cut"),
        (b"text", "not a .npz file"),
    ):
        file.write_bytes(content)
        with pytest.raises(convert_inputs.InputError, match=told):
            run("npz", file, tmp_path / "out")
    file.write_bytes(whole)
    run("npz", file, tmp_path / "out", "--shuffle", "off")
    assert [bytes(datum.parse(record.value).data) for record in records(tmp_path / "out")] == [
        image.tobytes() for image in images
    ]


def test_objects_in_an_archive_are_never_loaded(tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", images=np.array([{"a": 1}], object), labels=np.zeros(1, int))
    with pytest.raises(convert_inputs.InputError, match="not a readable"):
        run("npz", tmp_path / "in.npz", tmp_path / "out")


@pytest.mark.parametrize("kind", ["images", "list", "idx", "npz", "parquet", "tar"])
def test_help_tells_the_keys_and_the_options(kind: str, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        run(kind, "--help")
    assert caught.value.code == 0
    told = capsys.readouterr().out
    assert "Keys: %08d" in " ".join(told.split())
    assert "--shuffle SEED|off" in told
    assert ("--resize" in told) == (kind not in ("idx", "npz"))


def test_a_gzip_file_that_never_ends_is_unpacked_no_further_than_its_header_tells(tmp_path: Path) -> None:
    (tmp_path / "images").write_bytes(gzip.compress(idx((2, 1, 2), b"abcd") + bytes(1 << 28), 1, mtime=0))
    (tmp_path / "labels").write_bytes(idx((2,), b"ab"))
    with pytest.raises(
        convert_inputs.InputError, match=r"cut or damaged(.|\n)*expected: 20 bytes(.|\n)*found:    more"
    ):
        run("idx", tmp_path / "images", tmp_path / "out")


@pytest.mark.parametrize("compressed", [False, True])
def test_large_arrays_are_mapped_and_not_held_in_memory(tmp_path: Path, compressed: bool) -> None:
    images = np.arange(60 * 20 * 20, dtype=np.uint32).astype(np.uint8).reshape(60, 20, 20)
    (np.savez_compressed if compressed else np.savez)(tmp_path / "in.npz", images=images, labels=np.arange(60))
    opened = convert_arrays.open_npz(tmp_path / "in.npz", None, "bgr")
    base: object = opened.images
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)
    assert np.array_equal(opened.images[:, 0], images)
    assert isinstance(convert_arrays.read_idx(IDX), np.memmap)


@pytest.mark.parametrize("kind", ["npz", "idx", "list", "images", "parquet", "tar"])
def test_a_source_that_is_not_there_is_said_to_be_missing(kind: str, tmp_path: Path) -> None:
    from datasets.convert import main

    with pytest.raises(convert_inputs.InputError) as caught:
        main([kind, str(tmp_path / "nowhere"), str(tmp_path / "out")])
    text = str(caught.value)
    assert "nowhere" in text
    assert "Errno" not in text
    assert not (tmp_path / "out").exists()
