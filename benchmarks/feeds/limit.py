"""The limit of the machine for the work of a case: compiled loops over the mapped LMDB, and nothing round them.

    python -m benchmarks.feeds.limit CASE --folder F [--seconds S]

Each thread makes batch after batch in memory of its own. One line of JSON: samples/s for each way.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.feeds import reading
from benchmarks.feeds.cases import MEAN, Case, case_named
from benchmarks.feeds.checking import Check

Step = Callable[[], None]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("case")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args(arguments)
    case = case_named(given.case, given.quick)
    sys.stdout.write(json.dumps(limits(case, given.folder / case.data.folder, given.seconds)) + "\n")
    return 0


def limits(case: Case, folder: Path, seconds: float) -> dict[str, Any]:
    """Samples/s of each way of going about it; ``limit`` is the one that a feed is compared with."""
    records = reading.Records(case, folder)
    found: dict[str, Any] = {}
    for name, make in (ways_encoded if case.data.encoded else ways_raw)(case, records).items():
        for threads in (1, 2):
            found[f"{name}, {threads} threads"] = round(_rate(case.batch, make, threads, seconds), 1)
    found["leveldb get alone, 1 threads"] = round(_leveldb(case, folder, seconds), 1)
    wanted = "decode and resize" if case.data.encoded else "random order"
    records.close()
    return {"limit": max(found[f"{wanted}, {threads} threads"] for threads in (1, 2)), "ways": found}


def ways_raw(case: Case, records: reading.Records) -> dict[str, Callable[[int], Step]]:
    from benchmarks.feeds import kernels

    pixels, labels_at = addresses(records)
    mean = np.array(MEAN, np.float32) if case.dtype == "float32" else None
    size, count = (case.data.height, case.data.width), len(records)
    nbytes = 3 * case.crop * case.crop

    def crops(shuffle: bool, shared: int = 0) -> Callable[[int], Step]:
        def make(seed: int) -> Step:
            samples, labels = reading.empty(case)
            slots = _slots(samples, shared) if shared else [samples]
            turn = itertools.count()
            for slot in slots:
                slot.fill(0)
            next_numbers = _numbers(count, case.batch, seed, shuffle)
            state = np.array([seed + 88172645463325252], np.uint64)

            def step() -> None:
                into = slots[next(turn) % len(slots)]
                kernels.crop_batch(pixels, labels_at, next_numbers(), *size, state, mean, into, labels)

            step()
            checked = Check(case)
            checked.batch(slots[0], labels)
            return step

        return make

    def copies(seed: int) -> Step:
        out, next_numbers = np.zeros((case.batch, nbytes), np.uint8), _numbers(count, case.batch, seed, True)
        kernels.copy_batch(pixels, next_numbers(), nbytes, out)
        return lambda: kernels.copy_batch(pixels, next_numbers(), nbytes, out)

    return {
        "random order": crops(True), "sequential order": crops(False), "memcpy of as many bytes": copies,
        "random order, into shared memory": crops(True, 1), "random order, into a ring of 6": crops(True, 6),
    }  # fmt: skip


def _slots(like: Any, count: int) -> list[Any]:
    """Arrays in a memfd, as a feed's slots are: the system has small pages there, where NumPy's own memory has large
    ones."""
    memory = os.memfd_create("limit")
    os.ftruncate(memory, count * like.nbytes)
    whole = np.frombuffer(mmap.mmap(memory, count * like.nbytes), like.dtype)
    os.close(memory)
    return list(whole.reshape(count, *like.shape))


def ways_encoded(case: Case, records: reading.Records) -> dict[str, Callable[[int], Step]]:
    import simplejpeg

    from benchmarks.feeds import kernels

    stored = [records.sample(number) for number in range(len(records))]
    decoded = (case.data.height, case.data.width, 3)

    def whole(resize: bool) -> Callable[[int], Step]:
        def make(seed: int) -> Step:
            samples, labels = reading.empty(case)
            next_numbers, rng = _numbers(len(records), case.batch, seed, True), np.random.default_rng(seed)
            picture = np.zeros(decoded, np.uint8)

            def step() -> None:
                chance = reading.draw(case, rng, case.batch)
                for place, number in enumerate(next_numbers()):
                    file, labels[place] = stored[number]
                    simplejpeg.decode_jpeg(file, "BGR", buffer=picture)
                    if resize:
                        mirror, row, column, height, width = (values[place] for values in chance)
                        kernels.resize_part(picture, row, column, height, width, mirror, samples[place])

            step()
            if resize:
                checked = Check(case)
                checked.batch(samples, labels)
            return step

        return make

    return {"decoder alone": whole(False), "decode and resize": whole(True)}


def addresses(records: reading.Records) -> tuple[Any, Any]:
    """Where pixels and label of each record lie in the map; valid as long as ``records`` is."""
    pixels, labels = (np.empty(len(records), np.uint64) for _ in range(2))
    for number in range(len(records)):
        data, _ = records.sample(number)
        pixels[number] = np.frombuffer(data, np.uint8).ctypes.data
        labels[number] = int(pixels[number]) + len(data) + 1  # behind the tag of field 5, which follows
    return pixels, labels


def _numbers(count: int, batch: int, seed: int, shuffle: bool) -> Callable[[], Any]:
    """Numbers of the next batch, from an order made before."""
    order = np.random.default_rng(seed).permutation(count) if shuffle else np.arange(count)
    order = np.resize(order, -(-max(count, batch) // batch) * batch).reshape(-1, batch)
    turn = iter(range(1 << 62))
    return lambda: order[next(turn) % len(order)]


def _rate(batch: int, make: Callable[[int], Step], threads: int, seconds: float) -> float:
    steps, counts = [make(seed) for seed in range(threads)], [0] * threads
    together, end = threading.Barrier(threads), [0.0]

    def work(index: int) -> None:
        together.wait()
        began = time.perf_counter()
        while time.perf_counter() - began < seconds or counts[index] < 2:
            steps[index]()
            counts[index] += 1
        end[0] = max(end[0], time.perf_counter() - began)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(counts) * batch / end[0]


def _leveldb(case: Case, folder: Path, seconds: float) -> float:
    """What the library itself takes for values in random order, in one thread."""
    import plyvel

    from benchmarks.feeds.data import key

    order = np.random.default_rng(1).permutation(case.data.records).tolist()
    with plyvel.DB(str(folder / "leveldb"), create_if_missing=False) as database:
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < seconds / 2 or count < case.batch:
            for number in order[count % len(order) :][: case.batch]:
                database.get(key(number))
                count += 1
        return count / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
