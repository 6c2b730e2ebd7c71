"""Folders of images: which classes and files are taken, in what order, and what is told of the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from datasets import convert_inputs, datum
from datasets.manifest import read_manifest
from profiler.errors import UsageError
from tests.datasets.converting import ROOT, picture, records, run


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


@pytest.mark.long
def test_a_folder_of_thousands_of_files_takes_little_memory(tmp_path: Path) -> None:
    """Hard links to a few files: 3,000 names cost what names cost."""
    picture(tmp_path / "one.png")
    for folder, count in (("few", 20), ("in", 3000)):
        for index in range(count):
            place = tmp_path / folder / f"class{index % 3}" / f"{index:05d}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            os.link(tmp_path / "one.png", place)
    script = (
        "import resource; from datasets import convert\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "flags = ['--resize', '3', '--workers', '2']\n"
        "convert.main(['images', 'few', 'out1', *flags]); first = peak()\n"
        "convert.main(['images', 'in', 'out2', *flags]); print(peak() - first, 'KiB')\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1].split()[0]) < 30 << 10


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


@pytest.mark.parametrize("name", ["out", "c/out", "c", "."])
def test_nothing_is_written_into_the_folder_of_the_images(tmp_path: Path, name: str) -> None:
    picture(tmp_path / "in" / "c" / "a.png")
    with pytest.raises(UsageError, match="not apart"):
        run("images", tmp_path / "in", tmp_path / "in" / name, "--force")
    assert sorted(path.name for path in (tmp_path / "in").rglob("*")) == ["a.png", "c"]
