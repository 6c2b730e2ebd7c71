"""What a data set of ten million tiny records costs: opening it, finding record i, and the order of a shuffled batch.

    python benchmarks/scale_datasets.py                        10,000,000 records, about 1 GB of disk, a few minutes
    python benchmarks/scale_datasets.py --records 20000        a quick look

Databases are built in a temporary folder (``--folder`` says where), measured by processes of their own, and removed.
Everything is in the page cache while it is measured: the figures are what the product adds to the disk's time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import machine

BATCH = 256
BATCHES = 200
_CHUNK = 100_000


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=10_000_000, help="records of each LMDB; a LevelDB has a tenth")
    parser.add_argument("--folder", help="where to build the databases; left out: the system's temporary folder")
    parser.add_argument("--out", default=str(Path(__file__).with_suffix(".json")), help="file for the results")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--load-first", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.measure:
        sys.stdout.write(json.dumps(measure(given.measure, given.load_first)))
        return 0
    results: dict[str, Any] = {"machine": machine("lmdb", "plyvel", "numpy"), "batch": BATCH, "batches": BATCHES}
    results["databases"] = {}
    for name, backend, padded, records in (
        ("LMDB, keys that are padded numbers", "lmdb", True, given.records),
        ("LMDB, keys that are file names", "lmdb", False, given.records),
        ("LevelDB, keys that are file names", "leveldb", False, max(1, given.records // 10)),
    ):
        with tempfile.TemporaryDirectory(prefix="stallscope-scale-", dir=given.folder) as folder:
            results["databases"][name] = _one(Path(folder), backend, padded, records)
    results["order"] = order(given.records)
    Path(given.out).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(results, indent=1) + "\n")
    return 0


def _one(folder: Path, backend: str, padded: bool, records: int) -> dict[str, Any]:
    place, cache = folder / "db", folder / "cache"
    started = time.perf_counter()
    (build_lmdb if backend == "lmdb" else build_leveldb)(place, records, padded)
    result: dict[str, Any] = {
        "records": records,
        "bytes": sum(file.stat().st_size for file in place.iterdir()),
        "build_s": round(time.perf_counter() - started, 2),
    }
    # Each opening in a process of its own. The second finds what the first has kept. So does the third, in which
    # nothing is loaded beforehand: what it says of time and memory holds the compiled code as well.
    for opening in ("first", "second", "whole"):
        command = [sys.executable, str(Path(__file__).resolve()), "--measure", str(place)]
        command += ["--load-first"] if opening != "whole" else []
        environment = os.environ | {"STALLSCOPE_CACHE": str(cache), "TMPDIR": str(folder)}
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        result[opening] = json.loads(done.stdout)
    kept = sum(file.stat().st_size for file in cache.rglob("*.keys"))
    result["kept_index_bytes_per_record"] = round(kept / records, 2)
    shutil.rmtree(place)
    return result


def records_of(count: int, padded: bool) -> Iterator[tuple[bytes, bytes]]:
    """Records in key order: gray pictures of 4 x 8 pixels under 8-digit numbers or names as convert_imageset gives."""
    from datasets import datum

    width = max(8, len(str(count)))
    picture = datum.serialize(channels=1, height=4, width=8, data=bytes(range(32)), label=7)
    for number in range(count):
        key = b"%0*d" % (width, number)
        yield (key if padded else b"%b_class%03d/img_%d.png" % (key, number * 7919 % 1000, number)), picture


def build_lmdb(place: Path, count: int, padded: bool) -> None:
    import lmdb

    map_size = 64 << 20 | count * 256
    with lmdb.open(str(place), map_size=map_size, lock=False, sync=False) as env:
        items = records_of(count, padded)
        while chunk := list(itertools.islice(items, _CHUNK)):
            with env.begin(write=True) as txn, txn.cursor() as cursor:
                cursor.putmulti(chunk, append=True)
        env.sync(True)


def build_leveldb(place: Path, count: int, padded: bool) -> None:
    import plyvel

    db = plyvel.DB(str(place), create_if_missing=True, write_buffer_size=64 << 20)
    items = records_of(count, padded)
    while chunk := list(itertools.islice(items, _CHUNK)):
        with db.write_batch() as batch:
            for key, value in chunk:
                batch.put(key, value)
    db.compact_range()
    db.close()


def measure(place: str, load_first: bool) -> dict[str, Any]:
    """Open a database as a worker does, and read shuffled batches.

    With ``load_first`` the compiled code is loaded before, and its time and memory are told apart, as a process pays
    them once whatever it opens; otherwise they are in the figures of whatever loads it.
    """
    import datasets.leveldb_source
    import datasets.lmdb_source  # noqa: F401  # their import is no part of the opening
    from datasets import Order, Stream, open_source

    bare = _resident()
    load_code_s = _load_code() if load_first else 0.0
    before = _resident()
    started = time.perf_counter()
    source = open_source(place, readahead=False)
    records = len(source)
    source.read(records // 2)
    opened_s = time.perf_counter() - started
    opened = _resident()
    compiled = "numba" in sys.modules
    stream = Stream(Order(records, seed=1, shuffle="full"), BATCH)
    wanted = [stream.at(step).records for step in range(BATCHES)]
    read_ms = []
    for indices in wanted:
        started = time.perf_counter()
        found = source.read_many(indices)
        read_ms.append((time.perf_counter() - started) * 1e3)
        assert [record.index for record in found] == indices.tolist()
    in_order = []
    for start in range(0, min(records - BATCH, BATCHES * BATCH), BATCH):
        indices = np.arange(start, start + BATCH)
        started = time.perf_counter()
        source.read_many(indices)
        in_order.append((time.perf_counter() - started) * 1e3)
    after = _resident()
    source.close()
    result = {
        "open_and_first_record_s": round(opened_s, 4),
        "compiled_code_loaded_by_then": compiled,
        "open_anonymous_mib": _mib(opened["RssAnon"] - before["RssAnon"]),
        "open_file_backed_mib": _mib(opened["RssFile"] - before["RssFile"]),
        "first_batch_ms": round(read_ms[0], 3),
        "shuffled_batch_ms": _spread(read_ms),
        "batch_in_order_ms": _spread(in_order or read_ms),
        "all_anonymous_mib": _mib(after["RssAnon"] - before["RssAnon"]),
        "all_file_backed_mib": _mib(after["RssFile"] - before["RssFile"]),
    }
    if load_first:
        result |= {
            "load_code_s": round(load_code_s, 4),
            "code_anonymous_mib": _mib(before["RssAnon"] - bare["RssAnon"]),
            "code_file_backed_mib": _mib(before["RssFile"] - bare["RssFile"]),
        }
    return result


def order(records: int) -> dict[str, Any]:
    """The shuffled order of single batches at far apart places, and the memory that it takes."""
    from datasets import Order, Stream

    stream = Stream(Order(records, seed=1, shuffle="full"), BATCH)
    stream.at(0)
    took = []
    for step in range(0, BATCHES * 1000, 1000):
        started = time.perf_counter()
        stream.at(step)
        took.append((time.perf_counter() - started) * 1e3)
    tracemalloc.start()
    stream.at(12_345)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "records": records,
        "batch_ms": _spread(took),
        "peak_kib": round(peak / 1024, 1),
        "permutation_kib": round(records * 8 / 1024, 1),
    }


def _load_code() -> float:
    """Seconds to load the compiled look-up, by a small database: each process pays it once, whatever it opens."""
    from datasets.lmdb_source import LmdbSource

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        build_lmdb(Path(folder) / "db", 100, padded=True)
        with LmdbSource(str(Path(folder) / "db")) as source:
            source.locate(np.arange(100))
    return time.perf_counter() - started


def _resident() -> dict[str, int]:
    """Resident bytes of this process: its own (RssAnon) and pages of files that it maps (RssFile)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss")}


def _mib(count: int) -> float:
    return round(count / 2**20, 1)


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"median": round(statistics.median(ordered), 3), "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 3)}


if __name__ == "__main__":
    sys.exit(main())
