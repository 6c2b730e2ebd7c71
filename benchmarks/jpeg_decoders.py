"""JPEG decoders beside one another: time for a picture as a ratio to simplejpeg's in the same round, and their bits.

    python benchmarks/jpeg_decoders.py        40 pictures of 500 x 375, quality 90, 4:2:0; 15 rounds, about a minute

Decoders that are not installed are left out by name (pip install opencv-python-headless imagecodecs PyTurboJPEG
nvidia-nvimgcodec-cu12). ``part`` is a random resized crop, here 8 to 100 % of the area; the last rows make
whole samples of 224 x 224, which is what a feed does for a record.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.feeds import cases, pictures
from benchmarks.machine import machine

Decode = Callable[[int], Any]
SIZE = 224


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", default=str(Path(__file__).with_suffix(".json")), help="file for the results")
    given = parser.parse_args(arguments)
    import simplejpeg

    data = replace(cases.JPEG, records=given.images)
    files = [
        simplejpeg.encode_jpeg(pictures.photograph(data, number), 90, "BGR", "420") for number in range(given.images)
    ]
    ways, missing = decoders(files)
    results: dict[str, Any] = {
        "machine": machine("numpy", "numba", "simplejpeg", "pillow"),
        "images": given.images,
        "bytes": round(statistics.mean(map(len, files))),
        "rounds": given.rounds,
        "not installed": missing,
        "decoders": measure(files, ways, given.rounds),
    }
    Path(given.out).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(results, indent=1) + "\n")
    return 0


def decoders(files: list[bytes]) -> tuple[dict[str, tuple[Decode, str]], list[str]]:
    """By name: what decodes file i, and what it gives: ``BGR``, ``RGB``, ``part`` (BGR), or nothing to compare."""
    import simplejpeg

    ways: dict[str, tuple[Decode, str]] = {}
    missing: list[str] = []
    picture = np.zeros(simplejpeg.decode_jpeg(files[0]).shape, np.uint8)
    ways["simplejpeg"] = (lambda i: simplejpeg.decode_jpeg(files[i], "BGR"), "BGR")
    ways["simplejpeg, buffer="] = (lambda i: simplejpeg.decode_jpeg(files[i], "BGR", buffer=picture), "BGR")
    ways["simplejpeg, fast DCT"] = (lambda i: simplejpeg.decode_jpeg(files[i], "BGR", fastdct=True), "BGR")
    height, width = (-(-side // 2) for side in picture.shape[:2])
    ways["simplejpeg, half size"] = (
        lambda i: simplejpeg.decode_jpeg(files[i], "BGR", min_height=height, min_width=width, min_factor=2), "",
    )  # fmt: skip
    for name, add in (("Pillow", _pillow), ("OpenCV", _opencv), ("imagecodecs", _imagecodecs),
                      ("PyTurboJPEG", _turbojpeg), ("nvImageCodec", _nvimgcodec)):  # fmt: skip
        try:
            ways |= add(files)
        except (ImportError, OSError, RuntimeError) as error:
            missing.append(f"{name}: {str(error).splitlines()[0][:100]}")
    return ways | _ours(files), missing


def parts(files: list[bytes]) -> list[tuple[int, int, int, int]]:
    return [_crop("full").box(0, number, cases.JPEG.height, cases.JPEG.width) for number in range(len(files))]


def _crop(decode: Any) -> Any:
    from pipeline.resized_crop import ResizedCrop
    from pipeline.spec import FeedSpec, ResizedCropSpec, TransformSpec
    from pipeline.transforms import Transform

    transform = TransformSpec(mirror=True, resized_crop=ResizedCropSpec(SIZE), decode=decode)
    made = Transform(transform, 1, 0)
    made.fit((3, cases.JPEG.height, cases.JPEG.width), "a picture")
    return ResizedCrop.of(FeedSpec("x", 1, seed=1, transform=transform), made)


def _ours(files: list[bytes]) -> dict[str, tuple[Decode, str]]:
    import simplejpeg

    from benchmarks.feeds.kernels import resize_part
    from datasets import datum, jpeg
    from datasets.source import Record

    boxes = parts(files)
    records = [Record(i, b"%d" % i, datum.serialize(data=file, label=1, encoded=True)) for i, file in enumerate(files)]
    own = threading.local()  # memory to work in

    def some(i: int, box: Any, whole: bool) -> Any:
        head = jpeg.header(files[i])
        assert head is not None
        pixels = jpeg.decode(files[i], head, 3, box, whole=whole)
        assert pixels is not None
        return pixels[..., :3]

    def alone(i: int) -> None:
        if not hasattr(own, "picture"):
            own.picture = np.zeros((cases.JPEG.height, cases.JPEG.width, 3), np.uint8)
            own.sample = np.zeros((3, SIZE, SIZE), np.uint8)
        top, left, height, width = boxes[i]
        simplejpeg.decode_jpeg(files[i], "BGR", buffer=own.picture)
        resize_part(own.picture, top, left, height, width, i & 1, own.sample)

    def sampled(i: int, how: str) -> None:
        if not hasattr(own, how):
            crop = _crop(how)
            crop.warm_up("uint8")
            setattr(own, how, (crop, np.zeros((3, SIZE, SIZE), np.uint8)))
        crop, sample = getattr(own, how)
        crop.sample(records[i], 0, sample)

    ways: dict[str, tuple[Decode, str]] = {
        "datasets.jpeg": (lambda i: some(i, None, True), "BGR"),
        "datasets.jpeg, part, all data": (lambda i: some(i, boxes[i], True), "part"),
        "datasets.jpeg, part": (lambda i: some(i, boxes[i], False), "part"),
        "sample: simplejpeg and a compiled resize": (alone, ""),
    }
    jpeg.prepare()
    ways["sample: the feed's, decode: full"] = (lambda i: sampled(i, "full"), "")
    ways["sample: the feed's, decode: region"] = (lambda i: sampled(i, "region"), "")
    return ways


def _pillow(files: list[bytes]) -> dict[str, tuple[Decode, str]]:
    from PIL import Image

    return {"Pillow": (lambda i: np.asarray(Image.open(io.BytesIO(files[i]))), "RGB")}


def _opencv(files: list[bytes]) -> dict[str, tuple[Decode, str]]:
    import cv2

    cv2.setNumThreads(1)
    return {"OpenCV": (lambda i: cv2.imdecode(np.frombuffer(files[i], np.uint8), cv2.IMREAD_COLOR), "BGR")}


def _imagecodecs(files: list[bytes]) -> dict[str, tuple[Decode, str]]:
    import imagecodecs

    return {"imagecodecs": (lambda i: imagecodecs.jpeg8_decode(files[i]), "RGB")}


def _turbojpeg(files: list[bytes]) -> dict[str, tuple[Decode, str]]:
    import turbojpeg

    library = turbojpeg.TurboJPEG()  # of the system
    return {"PyTurboJPEG": (lambda i: library.decode(files[i]), "BGR")}


def _nvimgcodec(files: list[bytes]) -> dict[str, tuple[Decode, str]]:
    with _quiet():  # without CUDA's libraries it logs that its decoders for GPUs are not there
        from nvidia import nvimgcodec as nv

        own = threading.local()  # one for two threads ends the process

        def decode(stream: Any, image: Any = None) -> Any:
            if not hasattr(own, "decoder"):
                own.decoder = nv.Decoder(
                    device_id=nv.NVIMGCODEC_DEVICE_CPU_ONLY, max_num_cpu_threads=1,
                    backends=[nv.Backend(nv.BackendKind.CPU_ONLY)], options=":fancy_upsampling=1 :fast_idct=0",
                )  # fmt: skip
            return own.decoder.decode(stream, params=how, image=image)

        def again(i: int) -> Any:
            own.image = decode(nv.CodeStream(files[i]), getattr(own, "image", None))
            return np.asarray(own.image)

        how = nv.DecodeParams(
            apply_exif_orientation=False, color_spec=nv.ColorSpec.SRGB, sample_format=nv.SampleFormat.I_BGR
        )
        decode(nv.CodeStream(files[0]))
    boxes = parts(files)

    def some(i: int) -> Any:
        top, left, height, width = boxes[i]
        region = nv.Region(top, left, top + height, left + width)
        return np.asarray(decode(nv.CodeStream(files[i]).get_sub_code_stream(region=region)))

    return {
        "nvImageCodec, CPU": (lambda i: np.asarray(decode(nv.CodeStream(files[i]))), "BGR"),
        "nvImageCodec, CPU, memory reused": (again, "BGR"),
        "nvImageCodec, CPU, part": (some, "part"),
    }  # fmt: skip


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nothing from C on the standard outputs."""
    kept = [os.dup(1), os.dup(2)]
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(null, number)
        yield
    finally:
        for number, old in zip((1, 2), kept, strict=True):
            os.dup2(old, number)
            os.close(old)
        os.close(null)


def measure(files: list[bytes], ways: dict[str, tuple[Decode, str]], rounds: int) -> dict[str, Any]:
    """Microseconds a file (the least of the rounds), its ratio to simplejpeg, two threads to one, and the bits."""
    least = {name: np.full(len(files), np.inf) for name in ways}
    ratios: dict[str, list[float]] = {name: [] for name in ways}
    together: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        taken: dict[str, float] = {}
        for name, (decode, _gives) in ways.items():
            each = np.empty(len(files))
            for i in range(len(files)):
                began = time.perf_counter()
                decode(i)
                each[i] = time.perf_counter() - began
            least[name] = np.minimum(least[name], each)
            taken[name] = each.sum()
            together[name].append(2 * taken[name] / _two_threads(decode, len(files)))
        for name, seconds in taken.items():
            ratios[name].append(seconds / taken["simplejpeg"])
    reference = least["simplejpeg"].mean()
    return {
        name: {
            "us": round(float(least[name].mean()) * 1e6, 1),
            "to_simplejpeg": round(float(least[name].mean() / reference), 3),
            "to_simplejpeg_median": round(statistics.median(ratios[name]), 3),
            "two_threads_to_one": round(statistics.median(together[name]), 2),
            "bits": _bits(files, *ways[name]),
        }
        for name in ways
    }


def _two_threads(decode: Decode, count: int) -> float:
    """Seconds for two threads that decode all files each."""
    start = threading.Barrier(3)

    def work() -> None:
        start.wait()
        for i in range(count):
            decode(i)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    start.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def _bits(files: list[bytes], decode: Decode, gives: str) -> str:
    """How the result compares with libjpeg-turbo's accurate decoding."""
    import simplejpeg

    if not gives:
        return "not compared"
    most = 0
    for i, (file, (top, left, height, width)) in enumerate(zip(files, parts(files), strict=True)):
        want = simplejpeg.decode_jpeg(file, "RGB" if gives == "RGB" else "BGR", fastdct=False, fastupsample=False)
        if gives == "part":
            want = want[top : top + height, left : left + width]
        most = max(most, int(np.abs(np.asarray(decode(i)).astype(int) - want).max()))
    return f"off by up to {most}" if most else "equal"


if __name__ == "__main__":
    raise SystemExit(main())
