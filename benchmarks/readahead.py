"""Reading random records of an LMDB that is not in memory: what the system should be told about it.

    python benchmarks/readahead.py        records of 16 KB and 192 KB; 12 rounds, some minutes; 2 GB in --folder

Before each try the file is put out of the page cache (mincore says whether it is out); the ways take turns in rounds,
and ratios are those of one round. ``reads``: plain reads with no read-ahead (``random``), with the kernel's
(``normal``), with none but the records of a batch announced (POSIX_FADV_WILLNEED) before the first of them is read
(``announced``), and those of the next batch as well (``next``). ``feed``: an inline feed without (``off``), with the
kernel's (``on``) and as it is by itself (``auto``). The same with the file in memory says what it costs there.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import machine
from datasets import datum
from datasets.lmdb_source import LmdbSource
from datasets.writer import LmdbWriter
from pipeline.feed import Feed
from pipeline.spec import FeedSpec, TransformSpec
from profiler import osread

WAYS = ("random", "normal", "announced", "next")
SETTINGS = {"off": False, "on": True, "auto": None}
BATCHES, BATCH = 8, 64
COLD = 0.02  # share of the file that may be left in memory


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--mib", type=int, default=1024, help="size of each database")
    parser.add_argument("--folder", help="where databases are made; left out: the folder for temporary files")
    parser.add_argument("--out", default=str(Path(__file__).with_suffix(".json")), help="file for the results")
    given = parser.parse_args(arguments)
    results: dict[str, Any] = {
        "machine": machine("numpy"), "rounds": given.rounds, "batch": BATCH, "batches": BATCHES, "mib": given.mib,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for side in (72, 256):
            place = Path(folder) / str(side)
            write(place, side, (given.mib << 20) // (3 * side * side))
            results[f"{3 * side * side >> 10} KB"] = {
                "reads": measure(str(place), given.rounds), "feed": feeds(str(place), side, given.rounds),
            }  # fmt: skip
    text = json.dumps(results, indent=1) + "\n"
    Path(given.out).write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 0


def write(folder: Path, side: int, records: int) -> None:
    """An LMDB of so many images of noise, which no disk can make smaller."""
    folder.mkdir()
    writer, rng = LmdbWriter(folder), np.random.default_rng(1)
    for number in range(records):
        pixels = rng.bytes(3 * side * side)
        writer.put(b"%08d" % number, datum.serialize(channels=3, height=side, width=side, data=pixels, label=number))
    writer.close()


def measure(path: str, rounds: int) -> dict[str, Any]:
    """Milliseconds a batch of each way, cold and warm, and medians of ratios to ``random`` in the same round."""
    with LmdbSource(path, readahead=False) as source:
        file, records = source.file, len(source)
        os.fsync(file.fd)
        rng = np.random.default_rng(2)
        took: dict[str, dict[str, list[float]]] = {"cold": {way: [] for way in WAYS}, "warm": {way: [] for way in WAYS}}
        for number in range(rounds):
            chosen = rng.permutation(records)[: BATCHES * BATCH].reshape(BATCHES, BATCH)
            places = [source.locate(one) for one in chosen]  # leaf pages are read now, for all ways alike
            offsets = [one.offsets.tolist() for one in places]
            size = int(places[0].lengths[0])
            for way in [*WAYS][number % 4 :] + [*WAYS][: number % 4]:
                for state in ("cold", "warm"):
                    if state == "cold":
                        evict(file.fd, file.path)
                    took[state][way].append(run(file.fd, way, offsets, size))
    return summary(took, "random")


def feeds(path: str, side: int, rounds: int) -> dict[str, Any]:
    """The same of an inline feed of uint8 crops, whose consumer takes no time."""
    took: dict[str, dict[str, list[float]]] = {state: {way: [] for way in SETTINGS} for state in ("cold", "warm")}
    transform = TransformSpec(crop=side - side // 9, mirror=True)
    with LmdbSource(path) as source:
        fd, place = source.file.fd, source.file.path
        for number in range(rounds):
            for way in [*SETTINGS][number % 3 :] + [*SETTINGS][: number % 3]:
                for state in took:
                    spec = FeedSpec(
                        path, BATCH, seed=number, shuffle="full", stop_step=BATCHES, transform=transform,
                        readahead=SETTINGS[way], pixels="uint8",
                    )  # fmt: skip
                    with Feed(spec) as feed:
                        if state == "cold":
                            evict(fd, place)
                        began = time.perf_counter()
                        for batch in feed:
                            batch.data[0, 0, 0, 0]
                        took[state][way].append((time.perf_counter() - began) / BATCHES)
    return summary(took, "off")


def summary(took: dict[str, dict[str, list[float]]], base: str) -> dict[str, Any]:
    return {
        state: {
            way: {
                "ms_per_batch": round(statistics.median(times) * 1e3, 3),
                "median_ratio": round(statistics.median(map(operator.truediv, times, ways[base])), 3),
                "quartiles": [round(q, 3) for q in _quartiles(list(map(operator.truediv, times, ways[base])))],
            }
            for way, times in ways.items()
        }
        for state, ways in took.items()
    }


def evict(fd: int, path: str) -> None:
    """Put a file out of the page cache; raises where it stays."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    left = osread.resident_bytes(path)
    if isinstance(left, osread.Missing) or left > COLD * os.path.getsize(path):
        raise SystemExit(f"{path} does not leave the page cache: {left}; choose another --folder")


def run(fd: int, way: str, offsets: list[list[int]], size: int) -> float:
    """Seconds a batch."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_NORMAL if way == "normal" else os.POSIX_FADV_RANDOM)
    room = [bytearray(size)]
    began = time.perf_counter()
    for number, batch in enumerate(offsets):
        if way == "announced" or (way == "next" and not number):
            announce(fd, batch, size)
        if way == "next" and number + 1 < len(offsets):
            announce(fd, offsets[number + 1], size)
        for offset in batch:
            if os.preadv(fd, room, offset) != size:
                raise SystemExit("the file was cut")
    return (time.perf_counter() - began) / len(offsets)


def announce(fd: int, offsets: list[int], size: int) -> None:
    for offset in offsets:
        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_WILLNEED)


def _quartiles(values: list[float]) -> list[float]:
    return [min(values), max(values)] if len(values) < 4 else statistics.quantiles(values, n=4)[::2]


if __name__ == "__main__":
    raise SystemExit(main())
