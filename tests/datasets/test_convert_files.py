"""Image files: what is stored of each kind and mode, what is told of broken ones, and that workers change nothing."""

from __future__ import annotations

import io
import os
import re
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
from profiler.errors import StallscopeError
from tests.datasets.converting import pairs, picture, records, run


def test_red_is_stored_as_blue_green_red(tmp_path: Path) -> None:
    for suffix in ("png", "jpg"):
        picture(tmp_path / "in" / "c" / f"red.{suffix}")
    run("images", tmp_path / "in", tmp_path / "out")
    for record in records(tmp_path / "out"):
        pixels = np.frombuffer(datum.parse(record.value).data, np.uint8).reshape(3, 4, 6)
        assert np.allclose(pixels.mean((1, 2)), (0, 0, 255), atol=2)


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


def test_a_pipe_among_the_images_is_no_image_and_nobody_waits_for_it(tmp_path: Path, capsys) -> None:
    picture(tmp_path / "in" / "c" / "a.png")
    os.mkfifo(tmp_path / "in" / "c" / "b.png")
    (tmp_path / "list.txt").write_text("in/c/a.png 0\nin/c/b.png 1\n")
    for kind, source in (("images", tmp_path / "in"), ("list", tmp_path / "list.txt")):
        with pytest.raises(StallscopeError, match=r"b\.png is no plain file(.|\n)*--on-error skip"):
            run(kind, source, tmp_path / kind)
        assert run(kind, source, tmp_path / kind, "--on-error", "skip") == 1
        assert len(records(tmp_path / kind)) == 1


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
