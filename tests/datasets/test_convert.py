"""The converter: the bytes Caffe's tools write, whole databases only, and errors that name file and line."""

from __future__ import annotations

import gzip
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import lmdb
import numpy as np
import pytest
from PIL import Image

from datasets import convert, convert_inputs, datum, decode, writer
from datasets.manifest import damaged, read_manifest
from datasets.order import Order
from datasets.source import Record, open_source
from profiler.errors import StallscopeError, UsageError

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
IDX = DATA / "mnist" / "t10k-images-idx3-ubyte.gz"


def run(*arguments: object) -> int:
    return convert.main([str(argument) for argument in arguments])


def records(path: Path) -> list[Record]:
    with open_source(path) as source:
        return source.read_many(range(len(source)))


def pairs(path: Path) -> list[tuple[bytes, bytes]]:
    return [(record.key, record.value) for record in records(path)]


def picture(path: Path, colour: tuple[int, ...] | int = (255, 0, 0), mode: str = "RGB", size=(6, 4)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)
    return path


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


def test_encoded_images_are_stored_unchanged_as_caffe_does(crops: Path, tmp_path: Path) -> None:
    assert run("list", crops / "list.txt", tmp_path / "out", "--encoded", "--shuffle", "off") == 0
    assert pairs(tmp_path / "out") == pairs(DATA / "db" / "crops24_encoded_native_lmdb")


def test_resized_images_have_the_pixels_of_caffe(crops: Path, tmp_path: Path) -> None:
    assert run("list", crops / "list.txt", tmp_path / "out", "--resize", "40,48", "--shuffle", "off") == 0
    made, golden = pairs(tmp_path / "out"), pairs(DATA / "db" / "crops96_raw_40x48_lmdb")[:24]
    assert [key for key, _ in made] == [key for key, _ in golden]
    for (key, mine), (_, theirs) in zip(made, golden, strict=True):
        ours, caffes = (np.frombuffer(datum.parse(value).data, np.uint8).astype(int) for value in (mine, theirs))
        if key.endswith(b".png"):
            assert mine == theirs, key
        else:  # two JPEG libraries may round differently
            assert np.abs(ours - caffes).max() <= 2, key


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
        assert list(damaged(source)) == []


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


# ------------------------------------------------------------------------------------------------ whole or not at all


def test_a_killed_conversion_leaves_no_database_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    folder.mkdir()
    np.savez(tmp_path / "in.npz", images=np.zeros((60_000, 8, 8), np.uint8), labels=np.zeros(60_000, np.int32))
    command = [sys.executable, "-m", "datasets.convert", "npz", str(tmp_path / "in.npz"), str(folder / "out")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not list(folder.glob(".out.part-*/data.mdb")):
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.002)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert [path.name for path in folder.iterdir()] == [f".out.part-{os.uname().nodename}-{process.pid}"]
    with pytest.raises(StallscopeError, match="no data set"):
        open_source(folder / "out")
    run("npz", tmp_path / "in.npz", folder / "out")
    assert sorted(path.name for path in folder.iterdir()) == ["out", "out.crc32", "out.manifest.json"]
    assert len(records(folder / "out")) == 60_000


def test_a_failed_conversion_leaves_what_was_there(npz: Path, tmp_path: Path, monkeypatch) -> None:
    run("npz", npz, tmp_path / "out")
    before = pairs(tmp_path / "out")

    def interrupted(self: convert_inputs.Arrays, index: int) -> convert_inputs.Converted:
        raise KeyboardInterrupt

    def broken(self: convert_inputs.Arrays, index: int) -> convert_inputs.Converted:
        raise convert_inputs.InputError(f"item {index} is broken")

    monkeypatch.setattr(convert_inputs.Arrays, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("npz", npz, tmp_path / "out", "--force")
    monkeypatch.setattr(convert_inputs.Arrays, "convert", broken)
    with pytest.raises(StallscopeError, match="is broken"):
        run("npz", npz, tmp_path / "out", "--force")
    with pytest.raises(StallscopeError, match="not one item"):
        run("npz", npz, tmp_path / "out", "--force", "--on-error", "skip")
    assert pairs(tmp_path / "out") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.npz", "out", "out.crc32", "out.manifest.json"]


def test_an_existing_database_is_replaced_only_with_force(npz: Path, tmp_path: Path) -> None:
    run("idx", IDX, tmp_path / "out")
    with pytest.raises(UsageError, match="exists already"):
        run("npz", npz, tmp_path / "out")
    assert len(records(tmp_path / "out")) == 1000
    assert run("npz", npz, tmp_path / "out", "--force", "--backend", "leveldb") == 0
    with open_source(tmp_path / "out") as source:
        assert (source.backend, len(source)) == ("leveldb", 30)


def test_force_never_replaces_a_folder_of_other_files(npz: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match=r"other files(.|\n)*thesis.tex"):
        run("npz", npz, tmp_path / "home", "--force")
    with pytest.raises(UsageError, match="not the folder of a database"):
        run("npz", npz, npz, "--force")
    with pytest.raises(UsageError, match="does not exist"):
        run("npz", npz, tmp_path / "no" / "such" / "place")
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"


def test_an_empty_folder_may_be_filled(npz: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert run("npz", npz, tmp_path / "out") == 0
    assert len(records(tmp_path / "out")) == 30


# -------------------------------------------------------------------------------------------------------------- images


def test_an_image_folder_numbers_its_classes(tmp_path: Path, capsys) -> None:
    for name in ("dog/b.png", "cat/a.PNG", "cat/more/c d.jpg", "cat/.hidden.png"):
        picture(tmp_path / "in" / name)
    (tmp_path / "in" / "dog" / "notes.txt").write_text("no image")
    assert run("images", tmp_path / "in", tmp_path / "out", "--shuffle", "off") == 0
    assert "labels 0 to 1: cat, dog" in capsys.readouterr().out
    made = records(tmp_path / "out")
    assert [record.key for record in made] == [
        b"00000000_cat/a.PNG",
        b"00000001_cat/more/c d.jpg",
        b"00000002_dog/b.png",
    ]
    assert [datum.parse(record.value).label for record in made] == [0, 0, 1]
    told = read_manifest(tmp_path / "out")
    assert told is not None
    assert (told.classes, told.shapes) == (["cat", "dog"], {"3x4x6": 3})


def test_red_is_stored_as_blue_green_red(tmp_path: Path) -> None:
    for suffix in ("png", "jpg"):
        picture(tmp_path / "in" / "c" / f"red.{suffix}")
    run("images", tmp_path / "in", tmp_path / "out")
    for record in records(tmp_path / "out"):
        pixels = np.frombuffer(datum.parse(record.value).data, np.uint8).reshape(3, 4, 6)
        assert np.allclose(pixels.mean((1, 2)), (0, 0, 255), atol=2)


def test_links_are_followed_once_and_palettes_need_conversion(tmp_path: Path) -> None:
    picture(tmp_path / "elsewhere" / "a.png")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "c").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "round").symlink_to(tmp_path / "in")
    run("images", tmp_path / "in", tmp_path / "out")
    assert [record.key for record in records(tmp_path / "out")] == [b"00000000_c/a.png"]
    picture(tmp_path / "elsewhere" / "p.png", 1, "P")
    with pytest.raises(convert_inputs.InputError, match=r"p\.png(.|\n)*without --encoded"):
        run("images", tmp_path / "in", tmp_path / "out", "--encoded", "--force")
    assert run("images", tmp_path / "in", tmp_path / "out", "--force") == 0
    assert len(records(tmp_path / "out")) == 2


def test_gray_and_resized_encoded_images(tmp_path: Path) -> None:
    picture(tmp_path / "in" / "c" / "a.png", (10, 200, 30))
    picture(tmp_path / "in" / "c" / "b.jpg", (10, 200, 30))
    run("images", tmp_path / "in", tmp_path / "raw", "--gray", "--resize", "8")
    for record in records(tmp_path / "raw"):
        parsed = datum.parse(record.value)
        assert (parsed.channels, parsed.height, parsed.width, len(parsed.data)) == (1, 8, 8, 64)
    run("images", tmp_path / "in", tmp_path / "files", "--encoded", "--resize", "3x5", "--shuffle", "off")
    png, jpeg = (datum.parse(record.value) for record in records(tmp_path / "files"))
    assert bytes(png.data[:4]) == b"\x89PNG"
    assert bytes(jpeg.data[:2]) == b"\xff\xd8"
    for parsed in (png, jpeg):
        assert parsed.encoded
        image = decode.to_image(parsed)
        assert image.shape == (3, 3, 5)
        assert np.allclose(image.mean((1, 2)), (30, 200, 10), atol=3)


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("a.png 2.7272", "list.txt:3"),
        ("a.png", "list.txt:3"),
        ("a.png cat", "list.txt:3"),
        ("7", "list.txt:3"),
        ("a.png 2147483648", "list.txt:3"),
    ],
)
def test_labels_must_be_whole_numbers(tmp_path: Path, line: str, where: str) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "list.txt").write_text(f"a.png 1\n\n{line}\n")
    with pytest.raises(convert_inputs.InputError, match=where):
        run("list", tmp_path / "list.txt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_lists_may_have_spaces_tabs_signs_and_a_root(tmp_path: Path) -> None:
    picture(tmp_path / "root" / "a b.png")
    (tmp_path / "list.txt").write_bytes(b"a b.png -1\r\na b.png\t300\n")
    assert run("list", tmp_path / "list.txt", tmp_path / "out", "--root", tmp_path / "root", "--shuffle", "off") == 0
    made = records(tmp_path / "out")
    assert [record.key for record in made] == [b"00000000_a b.png", b"00000001_a b.png"]
    assert [datum.parse(record.value).label for record in made] == [-1, 300]


def test_broken_images_stop_or_are_skipped_and_told(tmp_path: Path, capsys) -> None:
    for index in range(3):
        picture(tmp_path / "in" / "c" / f"{index}.png")
    whole = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(whole, "JPEG")
    (tmp_path / "in" / "c" / "cut.jpg").write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
    for flags in ([], ["--encoded"]):
        with pytest.raises(StallscopeError, match=r"cut\.jpg"):
            run("images", tmp_path / "in", tmp_path / "out", *flags)
        assert not (tmp_path / "out").exists()
        capsys.readouterr()
        code = run(
            "images", tmp_path / "in", tmp_path / "out", *flags, "--on-error", "skip", "--shuffle", "off", "--force"
        )
        assert code == 1
        out = capsys.readouterr().out
        assert re.search(r"SKIPPED 1:\n.*cut\.jpg", out)
        assert "3 records" in out
        assert len(records(tmp_path / "out")) == 3
        told = read_manifest(tmp_path / "out")
        assert told is not None
        assert told.skipped_count == 1
        assert "cut.jpg" in told.skipped[0]
        run_again = tmp_path / "out"
        for path in run_again.iterdir():
            path.unlink()
        run_again.rmdir()


@pytest.mark.parametrize(
    ("files", "message"),
    [([], "no images"), (["a.png"], "no class folder"), (["c/a.png", "b.png"], "no class folder")],
)
def test_folders_that_are_no_image_sets(tmp_path: Path, files: list[str], message: str) -> None:
    (tmp_path / "in").mkdir()
    for name in files:
        picture(tmp_path / "in" / name)
    with pytest.raises(convert_inputs.InputError, match=message):
        run("images", tmp_path / "in", tmp_path / "out")


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


@pytest.mark.parametrize(
    "flags",
    [["--shuffle", "yes"], ["--shuffle", str(2**64)], ["--backend", "sqlite"], ["--resize", "4"], ["--on-error", "x"]],
)
def test_wrong_flags(npz: Path, tmp_path: Path, flags: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run("npz", npz, tmp_path / "out", *flags)
    assert caught.value.code == 2


@pytest.mark.parametrize("size", ["0", "4,", "1,2,3", "-4", "4.5", "a"])
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
