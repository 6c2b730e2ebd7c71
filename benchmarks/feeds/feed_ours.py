"""This project's feed: through Ray with two workers, or inline, from LMDB or LevelDB; strict order."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.feeds.cases import MEAN, Case
from pipeline import Feed, load
from pipeline.config import keys

PACKAGES = ()
VARIANTS = ("ray, lmdb", "ray, leveldb", "inline, lmdb", "inline, leveldb")
WORKERS = 2
RESIZED_PART = "data.transform.random_resized_crop"
UINT8 = ("feed.pixels", "uint8")
"""Keys that a version may not have: without the second its uint8 cases end with an error that names it."""
_workers_up: list[float] = []


def ready_s() -> float | None:
    """When the first worker had entered the ring."""
    return _workers_up[-1] if _workers_up else None


def flags(case: Case, place: Path, engine: str, backend: str, fingerprints: bool) -> dict[str, Any]:
    """The configuration. A key that this version does not know ends the measurement with its name."""
    chosen: dict[str, Any] = {
        "data.train.source": str(place / backend),
        "data.train.batch": case.batch,
        "data.order.seed": 1,
        "data.transform.crop": case.crop,
        "data.transform.mirror": True,
        "device.backend": "emulated",
        "run.iterations": 2**31 - 1,
        "feed.engine": engine,
        "feed.workers": WORKERS,
        "profile.detail": "off",
        "profile.fingerprints": "step" if fingerprints else "off",
    }
    if case.dtype == "float32":
        chosen["data.transform.mean_value"] = list(MEAN)
    else:
        chosen[UINT8[0]] = UINT8[1]
    if case.data.encoded:
        if RESIZED_PART in dict(keys()):
            chosen[RESIZED_PART] = True
        else:  # the whole picture to 256 x 256, then the crop: no less decoding, and 1.3 times the pixels to make
            chosen["data.transform.resize"] = [256, 256]
        chosen["data.transform.decode"] = case.decode
    return chosen


@contextlib.contextmanager
def open_feed(
    case: Case, folder: Path, variant: str, fingerprints: bool = False
) -> Iterator[Iterator[tuple[Any, Any]]]:
    engine, _, backend = variant.partition(", ")
    config = load(None, flags(case, folder, engine, backend, fingerprints))
    with Feed(config) as feed:
        while engine == "ray" and not feed.stats()["workers"]:
            time.sleep(0.002)
        if engine == "ray":
            _workers_up.append(time.monotonic())
        yield ((batch.data, batch.labels) for batch in feed)
