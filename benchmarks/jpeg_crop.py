"""What a crop of an encoded record costs: whole pictures that are copied and cropped, or crops from the decoder itself.

    python benchmarks/jpeg_crop.py        pictures of 256 x 256 and of 500 x 375, crop 227, mirror; half a minute

CPU time of the thread that makes the batches, a sample; ratios to the general way in the same round. The batches of all
ways are compared bit for bit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.feeds import cases, pictures
from benchmarks.machine import machine
from datasets import datum
from datasets.source import open_source
from datasets.writer import LmdbWriter
from pipeline.maker import BatchMaker, LocalReader, Slot, probe
from pipeline.spec import FeedSpec, TransformSpec

BATCH, RECORDS = 16, 64


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", default=str(Path(__file__).with_suffix(".json")), help="file for the results")
    given = parser.parse_args(arguments)
    results: dict[str, Any] = {
        "machine": machine("numpy", "numba", "simplejpeg"), "rounds": given.rounds, "crop": 227,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for height, width in ((256, 256), (375, 500)):
            path = write(Path(folder) / f"{width}x{height}", height, width)
            for pixels in ("float32", "uint8"):
                results[f"{width} x {height}, {pixels}"] = measure(path, pixels, given.rounds)
    Path(given.out).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(results, indent=1) + "\n")
    return 0


def write(folder: Path, height: int, width: int) -> str:
    """An LMDB of photographs of one size, quality 90, 4:2:0."""
    import simplejpeg

    data = replace(cases.JPEG, records=RECORDS)
    folder.mkdir()
    writer = LmdbWriter(folder)
    for number in range(RECORDS):
        image = np.ascontiguousarray(pictures.photograph(data, number)[:height, :width])
        stored = simplejpeg.encode_jpeg(image, 90, "BGR", "420")
        writer.put(b"%08d" % number, datum.serialize(data=stored, label=number, encoded=True))
    writer.close()
    return str(folder)


def measure(path: str, pixels: Any, rounds: int) -> dict[str, Any]:
    """Microseconds of CPU a sample, and the medians and least of the ratios to the general way."""
    spec = FeedSpec(
        path, BATCH, seed=1, shuffle="full", pixels=pixels,
        transform=TransformSpec(crop=227, mirror=True, mean_value=(104.0, 117.0, 123.0)),
    )  # fmt: skip
    region = replace(spec, transform=replace(spec.transform, decode="region"))
    ways: dict[str, Callable[[int, Slot], Any]] = {}
    with open_source(path) as source:
        probed = probe(spec, source)
        for name, asked in (("general", spec), ("full", spec), ("region", region)):
            made = BatchMaker(asked, replace(probed, jpeg=name != "general"), LocalReader(source))
            made.warm_up()
            ways[name] = made.make
        slots = {name: probed.layout.views(np.zeros(probed.layout.nbytes, np.uint8)) for name in ways}
        took: dict[str, list[int]] = {name: [] for name in ways}
        for step in range(rounds + 4):
            for name in [*ways][step % 3 :] + [*ways][: step % 3]:
                began = time.thread_time_ns()
                ways[name](step, slots[name])
                took[name].append(time.thread_time_ns() - began)
            for name in ways:
                assert slots[name].data.tobytes() == slots["general"].data.tobytes()
    took = {name: times[4:] for name, times in took.items()}
    return {
        name: {
            "us_per_sample": round(min(times) / BATCH / 1e3, 1),
            "ratio_of_the_least": round(min(times) / min(took["general"]), 3),
            "median_ratio": round(statistics.median(a / b for a, b in zip(times, took["general"], strict=True)), 3),
        }
        for name, times in took.items()
    }


if __name__ == "__main__":
    raise SystemExit(main())
