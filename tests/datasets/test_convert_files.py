"""Image folders and list files: what is stored, and what is told of files and lines that cannot be."""

from __future__ import annotations

import io
import itertools
import os
import re
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datasets import convert_inputs, convert_jobs, datum, decode
from datasets.manifest import read_manifest
from datasets.source import open_source
from profiler.errors import StallscopeError, UsageError
from tests.datasets.converting import ROOT, damaged, pairs, picture, records, run


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
    ("line", "told"),
    [
        ("a.png 2.7272", "the label 2.7272 is not a whole number; Caffe would cut it off .*--label-db OUT2"),
        ("a.png 1e3", "the label 1e3 is not a whole number"),
        ("a.png", "no label after the path: 'a.png'"),
        ("a b.png", "no label after the path: 'a b.png'"),
        ("7", "no label after the path: '7'"),
        ("a.png cat", "the label 'cat' is not a whole number"),
        ("a.png 2147483648", "the label 2147483648 does not fit into 32 bits"),
        ("a.png -2147483649", "does not fit"),
        ("a.png \u0663", "is not a whole number"),
        ("b.png 1", "b.png: No such file or directory$"),
        ("a.png 1 2", "a.png 1: No such file or directory; if the line ends with several labels: --label-db OUT2"),
        (". 1", "is a folder"),
        ("pipe 1", "is no plain file"),
        ("empty.png 1", "empty.png is empty"),
        ("d" * 300 + ".png 1", "File name too long"),
    ],
)
def test_lines_that_cannot_be_used_are_told_by_number(tmp_path: Path, line: str, told: str) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "empty.png").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "list.txt").write_text(f"a.png 1\n\n{line}\na.png 2\n")
    with pytest.raises(convert_inputs.InputError, match=f"(?m)1 problem; nothing was written\n  line 3: .*{told}"):
        run("list", tmp_path / "list.txt", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "empty.png", "pipe", "list.txt"}
    assert run("list", tmp_path / "list.txt", tmp_path / "out", "--on-error", "skip", "--shuffle", "off") == 1
    assert [record.key[:8] for record in records(tmp_path / "out")] == [b"00000000", b"00000002"]
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest.skipped_count == 1
    assert "list.txt, line 3: " in manifest.skipped[0]


def test_all_problems_of_a_list_are_told_at_once_up_to_a_limit(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    lines = [f"missing{index}.png 0" if index % 2 else "a.png 0.5" for index in range(50)]
    (tmp_path / "list.txt").write_text("\n".join(lines))
    with pytest.raises(convert_inputs.InputError) as caught:
        run("list", tmp_path / "list.txt", tmp_path / "out")
    told = str(caught.value).splitlines()
    assert told[0].endswith("50 problems; nothing was written")
    assert [line for line in told if line.startswith("  line")][18:] == [
        told[19],
        f"  line 20: {tmp_path}/missing19.png: No such file or directory",
    ]
    assert "  and 30 more" in told


def test_what_a_list_hides_is_noted(tmp_path: Path, capsys) -> None:
    for name in ("a.png", "b.png", "c.png"):
        picture(tmp_path / name)
    (tmp_path / "root").mkdir()
    lines = [f"{tmp_path}/a.png 1", f"{tmp_path}/b.png -1", f"{tmp_path}/a.png 1", f"{tmp_path}/a.png 2"]
    (tmp_path / "list.txt").write_text("\n".join(lines))
    assert run("list", tmp_path / "list.txt", tmp_path / "out", "--root", tmp_path / "root") == 0
    told = capsys.readouterr().err
    assert "note: negative labels (Caffe's losses take one only as ignore_label), at line: 2\n" in told
    assert "note: paths that begin with / and so not at --root, at line: 1, 2, 3, 4\n" in told
    assert "note: paths that were there before, at line: 3 (as 1)\n" in told
    assert "note: paths that were there before with another label, at line: 4 (as 3)\n" in told
    assert len(records(tmp_path / "out")) == 4


def test_marks_and_line_ends_of_windows_are_no_part_of_a_path(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "list.txt").write_bytes(b"\xef\xbb\xbfa.png 1\r\n\r\n  a.png 2  \r\n")
    run("list", tmp_path / "list.txt", tmp_path / "out", "--shuffle", "off")
    assert [record.key for record in records(tmp_path / "out")] == [b"00000000_a.png", b"00000001_a.png"]
    (tmp_path / "wide.txt").write_bytes("a.png 1\n".encode("utf-16"))
    with pytest.raises(convert_inputs.InputError, match=r"UTF-16(.|\n)*iconv"):
        run("list", tmp_path / "wide.txt", tmp_path / "other")
    (tmp_path / "binary.txt").write_bytes(b"a.png 1\nPK\0\0")
    with pytest.raises(convert_inputs.InputError, match="is no text: line 2 holds a zero byte"):
        run("list", tmp_path / "binary.txt", tmp_path / "other")
    (tmp_path / "none.txt").write_text("\n \n")
    with pytest.raises(convert_inputs.InputError, match="is empty"):
        run("list", tmp_path / "none.txt", tmp_path / "other")
    with pytest.raises(convert_inputs.InputError, match="cannot be read"):
        run("list", tmp_path / "nothing.txt", tmp_path / "other")


def test_names_are_bytes_and_may_hold_what_other_systems_end_lines_with(tmp_path: Path) -> None:
    names = [b"gr\xfcn.png", "a\u2028b.png".encode(), b"c\x0bd.png"]
    for name in names:
        with open(os.path.join(os.fsencode(tmp_path), name), "wb") as file:
            Image.new("RGB", (2, 2)).save(file, "PNG")
    (tmp_path / "list.txt").write_bytes(b"".join(name + b" 3\n" for name in names))
    run("list", tmp_path / "list.txt", tmp_path / "out", "--shuffle", "off")
    assert [record.key[9:] for record in records(tmp_path / "out")] == names


def test_classes_and_broken_files_may_have_names_that_are_no_text(tmp_path: Path, capsys) -> None:
    folder = os.path.join(os.fsencode(tmp_path), b"in", b"gr\xfcn")
    os.makedirs(folder)
    for name, content in ((b"a.png", None), (b"b\xfc.png", b"broken"), (b"c\xfc.txt", b"")):
        with open(os.path.join(folder, name), "wb") as file:
            if content is None:
                Image.new("RGB", (2, 2)).save(file, "PNG")
            else:
                file.write(content)
    assert run("images", tmp_path / "in", tmp_path / "out", "--on-error", "skip") == 1
    told = capsys.readouterr()
    assert "labels 0 to 0: gr\\udcfcn" in told.out
    assert "b\\udcfc.png" in told.out
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest.classes == ["gr\udcfcn"]


@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
def test_several_labels_go_into_a_database_of_their_own(tmp_path: Path, backend: str, capsys) -> None:
    for index in range(40):
        picture(tmp_path / f"im {index}.png", (index, 0, 0))
    lines = [f"im {index}.png {index} {index / 8} -1e-3\n" for index in range(40)]
    (tmp_path / "list.txt").write_text("".join(lines))
    arguments = ["list", tmp_path / "list.txt", tmp_path / "out", "--label-db", tmp_path / "two", "--backend", backend]
    assert run(*arguments) == 0
    assert f"labels, under the same keys: {tmp_path / 'two'}" in capsys.readouterr().out
    images, labels = records(tmp_path / "out"), records(tmp_path / "two")
    assert [record.key for record in images] == [record.key for record in labels]
    for image, record in zip(images, labels, strict=True):
        index = datum.parse(image.value).data[-1]  # a pixel of red
        parsed = datum.parse(record.value)
        assert parsed.float_data is not None
        assert parsed.float_data.tolist() == np.array([index, index / 8, -1e-3], np.float32).tolist()
        assert (parsed.channels, parsed.height, parsed.width, parsed.label) == (3, 1, 1, None)
        assert datum.parse(image.value).label is None
    for name in ("out", "two"):
        with open_source(tmp_path / name) as source:
            assert damaged(source) == []
    (tmp_path / "list.txt").write_text("".join(lines) + "im 0.png 1 2\nim 1.png 1 x 3\n")
    with pytest.raises(
        convert_inputs.InputError, match=r"2 problems(.|\n)*line 41 ends with 2 numbers, line 1 with 3(.|\n)*line 42"
    ):
        run(*arguments, "--force")
    assert len(records(tmp_path / "two")) == 40
    (tmp_path / "list.txt").write_text("\n" + "".join(lines) + "im 0.png 1 2 3 4\n")
    with pytest.raises(
        convert_inputs.InputError, match=r"line 42 ends with 4 numbers, line 2 with 3: 'im 0\.png 1 2 3 4'"
    ):
        run(*arguments, "--force")


def test_a_path_that_ends_with_a_number_is_not_taken_for_another_count_of_labels(tmp_path: Path) -> None:
    picture(tmp_path / "im.png").rename(tmp_path / "im 4")
    (tmp_path / "list.txt").write_text("im 4 1 2\nim 5 1 2\n")
    with pytest.raises(convert_inputs.InputError, match=r"line 2: .*im 5: No such file"):
        run("list", tmp_path / "list.txt", tmp_path / "out", "--label-db", tmp_path / "two")


def test_a_database_of_labels_needs_numbers_and_a_place_beside_the_images(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "list.txt").write_text("a.png\n")
    with pytest.raises(convert_inputs.InputError, match="ends with no number"):
        run("list", tmp_path / "list.txt", tmp_path / "out", "--label-db", tmp_path / "two")
    (tmp_path / "list.txt").write_text("a.png 0.5\n")
    (tmp_path / "sub").mkdir()
    with pytest.raises(UsageError, match="must lie beside"):
        run("list", tmp_path / "list.txt", tmp_path / "out", "--label-db", tmp_path / "sub" / "two")
    with pytest.raises(UsageError, match="cannot go into one"):
        run("list", tmp_path / "list.txt", tmp_path / "out", "--label-db", tmp_path / "out")
    run("list", tmp_path / "list.txt", tmp_path / "out", "--label-db", tmp_path / "two")
    with pytest.raises(UsageError, match="two exists already"):
        run("list", tmp_path / "list.txt", tmp_path / "new", "--label-db", tmp_path / "two")
    assert not (tmp_path / "new").exists()


def test_a_set_in_blocks_of_classes_is_mixed(tmp_path: Path, capsys) -> None:
    for name in ("a.png", "b.png"):
        picture(tmp_path / name)
    (tmp_path / "list.txt").write_text("a.png 0\n" * 500 + "b.png 1\n" * 500)
    assert run("list", tmp_path / "list.txt", tmp_path / "out") == 0
    assert "shuffled with seed 1" in capsys.readouterr().out
    labels = [datum.parse(record.value).label for record in records(tmp_path / "out")]
    assert labels.count(1) == 500
    longest = max(len(list(group)) for _, group in itertools.groupby(labels))
    assert longest < 25  # of 1000 fair coins, about 10
    halves = sum(label or 0 for label in labels[:500])
    assert 200 < halves < 300


@pytest.mark.parametrize("flags", [[], ["--gray"], ["--resize", "9", "--encoded"]])
def test_modes_are_converted_as_agreed_or_refused(tmp_path: Path, flags: list[str], capsys) -> None:
    modes = {"L": "png", "RGB": "png", "RGBA": "png", "LA": "png", "P": "png", "1": "png", "CMYK": "jpg", "I;16": "png"}
    for mode, suffix in modes.items():
        (tmp_path / "in" / "c").mkdir(parents=True, exist_ok=True)
        Image.new(mode, (6, 4)).save(tmp_path / "in" / "c" / f"{mode}.{suffix}")
    with pytest.raises(StallscopeError, match=r"I;16\.png(.|\n)*8 bits"):
        run("images", tmp_path / "in", tmp_path / "out", *flags)
    assert run("images", tmp_path / "in", tmp_path / "out", *flags, "--on-error", "skip") == 1
    assert re.search(r"SKIPPED 1:\n  .*I;16\.png", capsys.readouterr().out)
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest.shapes == {f"{1 if flags == ['--gray'] else 3}x{'9x9' if '--encoded' in flags else '4x6'}": 7}


def test_bytes_and_order_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for index in range(60):
        # Of very different sizes, so that later ones are done before earlier ones.
        pixels = generator.integers(0, 256, (400 if index % 7 == 0 else 20, 30, 3), np.uint8)
        (tmp_path / "in" / f"c{index % 3}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "in" / f"c{index % 3}" / f"{index}.{'jpg' if index % 2 else 'png'}")
    (tmp_path / "in" / "c0" / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    for workers in (1, 2, 7):
        out = tmp_path / f"out{workers}"
        flags = ["--resize", "16", "--workers", workers, "--on-error", "skip"]
        assert run("images", tmp_path / "in", out, *flags) == 1
    assert len(records(tmp_path / "out1")) == 60
    for workers in (2, 7):
        assert pairs(tmp_path / f"out{workers}") == pairs(tmp_path / "out1")
        assert (tmp_path / f"out{workers}" / "data.mdb").read_bytes() == (tmp_path / "out1" / "data.mdb").read_bytes()
        assert read_manifest(tmp_path / f"out{workers}") == read_manifest(tmp_path / "out1")


def test_jobs_come_in_order_from_threads_and_few_are_under_way() -> None:
    turn, open_jobs, most = threading.Event(), 0, 0
    threads = set()

    def make(place: int) -> convert_inputs.Converted:
        threads.add(threading.get_ident())
        if place == 0:
            assert turn.wait(30)
        else:
            turn.set()  # the first is done after the second
        return convert_inputs.Converted(b"%d" % place, (1, 1, 1), place, False)

    def jobs() -> Iterator[convert_inputs.Job]:
        nonlocal open_jobs, most
        for place in range(100):
            open_jobs += 1
            most = max(most, open_jobs)
            yield convert_inputs.Job(place, "", partial(make, place))

    places = []
    for job, made in convert_jobs.outcomes(jobs(), 2):
        open_jobs -= 1
        assert isinstance(made, convert_inputs.Converted)
        assert made.value == b"%d" % job.place
        places.append(job.place)
    assert places == list(range(100))
    assert most <= 8
    assert len(threads) == 2


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


def test_a_list_whose_paths_begin_in_the_working_folder_is_told_the_flag_for_it(tmp_path: Path, monkeypatch) -> None:
    picture(tmp_path / "pictures" / "a.png")
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "train.txt").write_text("pictures/a.png 1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(convert_inputs.InputError, match=r"No such file(.|\n)*try: .*--root \."):
        run("list", "lists/train.txt", "out")
    assert run("list", "lists/train.txt", "out", "--root", ".") == 0
    (tmp_path / "lists" / "train.txt").write_text("nowhere/a.png 1\n")
    with pytest.raises(convert_inputs.InputError, match="correct the list"):
        run("list", "lists/train.txt", "out2")


@pytest.mark.parametrize("flags", [[], ["--encoded"], ["--gray"]])
@pytest.mark.parametrize(
    ("content", "told"), [(b"", "the file is empty"), (b"some text", "no image file(.|\n)*73 6f 6d")]
)
def test_files_that_are_no_images_are_told_in_words_about_files(tmp_path: Path, content, told, flags) -> None:
    picture(tmp_path / "in" / "a" / "good.png")
    (tmp_path / "in" / "a" / "bad.jpg").write_bytes(content)
    with pytest.raises(convert_inputs.InputError, match=rf"bad\.jpg: {told}(.|\n)*--on-error skip"):
        run("images", tmp_path / "in", tmp_path / "out", *flags)
    assert run("images", tmp_path / "in", tmp_path / "out", "--on-error", "skip", *flags) == 1
    assert len(records(tmp_path / "out")) == 1


def test_what_decides_is_in_the_file_and_not_its_ending(tmp_path: Path) -> None:
    for name, kind in (("a.jpg", "PNG"), ("b.png", "JPEG"), ("c.gif", "BMP")):
        (tmp_path / "in" / "x").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (3, 2), (9, 9, 9)).save(tmp_path / "in" / "x" / name, kind)
    assert run("images", tmp_path / "in", tmp_path / "out", "--shuffle", "off") == 0
    images = [decode.to_image(datum.parse(record.value, record)) for record in records(tmp_path / "out")]
    assert {image.shape for image in images} == {(3, 2, 3)}
    assert all(abs(int(image.min()) - 9) <= 1 for image in images)


def test_class_folders_without_an_image_and_a_single_class_are_noted(tmp_path: Path, capsys) -> None:
    picture(tmp_path / "in" / "dog" / "a.png")
    (tmp_path / "in" / "cat" / "deeper").mkdir(parents=True)
    assert run("images", tmp_path / "in", tmp_path / "out") == 0
    told = capsys.readouterr().err
    assert "folders without an image, so no label stands for them: cat" in told
    assert "all images have the label 0" in told
    picture(tmp_path / "in" / "cat" / "deeper" / "b.png")
    assert run("images", tmp_path / "in", tmp_path / "out2") == 0
    assert "note" not in capsys.readouterr().err


def test_a_class_whose_name_moves_the_cursor_is_printed_as_an_escape(tmp_path: Path, capsys) -> None:
    picture(tmp_path / "in" / "\x1b[2Jx" / "a.png")
    picture(tmp_path / "in" / "y\u202e" / "\x1b[31m.txt" / "a.png")
    (tmp_path / "in" / "y\u202e" / "\x1b[31m").write_text("no image")
    assert run("images", tmp_path / "in", tmp_path / "out") == 0
    told = "".join(capsys.readouterr())
    assert r"\x1b[2Jx, y\u202e" in told
    assert all(one.isprintable() for one in told.split("labels 0", 1)[1].replace("\n", ""))


def test_a_folder_of_thousands_of_files_takes_little_memory(tmp_path: Path) -> None:
    """Hard links to a few files: 6,000 names cost what names cost."""
    picture(tmp_path / "one.png")
    for index in range(6000):
        place = tmp_path / "in" / f"class{index % 3}" / f"{index:05d}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        os.link(tmp_path / "one.png", place)
    script = (
        "import resource, sys; from datasets import convert\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"flags = ['--resize', '3', '--workers', '2']; few = {str(tmp_path / 'in' / 'class0')!r}\n"
        "import shutil, os; os.mkdir('few'); shutil.copytree(few, 'few/c', copy_function=os.link)\n"
        "convert.main(['images', 'few', 'out1', *flags]); first = peak()\n"
        f"convert.main(['images', {str(tmp_path / 'in')!r}, 'out2', *flags]); print(peak() - first, 'KiB')\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1].split()[0]) < 60 << 10


def test_a_folder_that_a_link_names_again_is_a_class_too_and_is_told(tmp_path: Path, capsys) -> None:
    for name in ("cat/a.png", "dog/b.png"):
        picture(tmp_path / "in" / name)
    (tmp_path / "in" / "tabby").symlink_to("cat")
    (tmp_path / "in" / "dog" / "up").symlink_to("..")
    picture(tmp_path / "shared" / "s.png")
    for name in ("cat", "dog"):
        (tmp_path / "in" / name / "shared").symlink_to(tmp_path / "shared")
    assert run("images", tmp_path / "in", tmp_path / "out", "--shuffle", "off") == 0
    made = [(record.key[9:].decode(), datum.parse(record.value).label) for record in records(tmp_path / "out")]
    assert made == [
        ("cat/a.png", 0), ("cat/shared/s.png", 0), ("dog/b.png", 1), ("dog/shared/s.png", 1), ("tabby/a.png", 2),
        ("tabby/shared/s.png", 2),
    ]  # fmt: skip
    told = capsys.readouterr().err
    assert "links that lead back to a folder above them, not followed: dog/up" in told
    assert "tabby (as cat)" in told
    assert "dog/shared (as cat/shared)" in told


def test_hidden_images_are_left_alone_and_told(tmp_path: Path, capsys) -> None:
    for name in ("cat/a.png", "cat/._a.png", ".thumbs/x/b.png", "cat/.notes"):
        picture(tmp_path / "in" / name) if name.endswith("png") else (tmp_path / "in" / name).touch()
    assert run("images", tmp_path / "in", tmp_path / "out") == 0
    assert [record.key for record in records(tmp_path / "out")] == [b"00000000_cat/a.png"]
    assert "hidden files and folders, left alone: .thumbs, cat/._a.png\n" in capsys.readouterr().err


def test_a_pipe_among_the_images_is_no_image_and_nobody_waits_for_it(tmp_path: Path, capsys) -> None:
    picture(tmp_path / "in" / "c" / "a.png")
    os.mkfifo(tmp_path / "in" / "c" / "b.png")
    (tmp_path / "list.txt").write_text("in/c/a.png 0\nin/c/b.png 1\n")
    for kind, source in (("images", tmp_path / "in"), ("list", tmp_path / "list.txt")):
        with pytest.raises(StallscopeError, match=r"b\.png is no plain file(.|\n)*--on-error skip"):
            run(kind, source, tmp_path / kind)
        assert run(kind, source, tmp_path / kind, "--on-error", "skip") == 1
        assert len(records(tmp_path / kind)) == 1


@pytest.mark.parametrize("name", ["out", "c/out", "c", "."])
def test_nothing_is_written_into_the_folder_of_the_images(tmp_path: Path, name: str) -> None:
    picture(tmp_path / "in" / "c" / "a.png")
    with pytest.raises(UsageError, match="not apart"):
        run("images", tmp_path / "in", tmp_path / "in" / name, "--force")
    assert sorted(path.name for path in (tmp_path / "in").rglob("*")) == ["a.png", "c"]


@pytest.mark.parametrize("content", ["cut", "mode", "large"])
def test_whatever_is_wrong_with_an_image_the_way_out_is_told(tmp_path: Path, content: str) -> None:
    path = picture(tmp_path / "in" / "c" / "a.png", 0, "I;16" if content == "mode" else "L", (64, 64))
    if content == "cut":
        path.write_bytes(path.read_bytes()[:60])
    elif content == "large":
        whole = bytearray(path.read_bytes())
        whole[16:24] = (30000).to_bytes(4, "big") * 2
        whole[29:33] = zlib.crc32(whole[12:29]).to_bytes(4, "big")
        path.write_bytes(whole)
    with pytest.raises(StallscopeError) as caught:
        run("images", tmp_path / "in", tmp_path / "out")
    assert (caught.value.hint or "").count("--on-error skip leaves it out (exit code 1)") == 1
    if content == "large":
        assert (caught.value.expected, caught.value.found) == ("at most 89,478,485 pixels", "900,000,000")
