"""The pinned hashes of batches, and the feeds they belong to. ``python -m tests.pipeline.golden`` writes them anew.

A change of these hashes is a change of the determinism contract (docs/design.md, section 2.1): every run trained before
it would come out differently. Never do it in passing.
"""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.feed import Feed
from pipeline.spec import FeedSpec, TransformSpec

FILE = Path("tests/data/golden_batches.json")
STEPS = 14
SETS = {"mnist": "tests/data/db/mnist_test", "crops": "tests/data/db/crops96_raw_40x48"}
_TRANSFORMS = {
    "mnist": TransformSpec(mirror=True, crop=27, mean_file="tests/data/proto/mean_mnist.binaryproto", scale=0.00390625),
    "crops": TransformSpec(mirror=True, crop=32, mean_value=(104.0, 117.0, 123.0), scale=0.017),
}


def spec(name: str, shuffle: str, backend: str = "lmdb") -> FeedSpec:
    """11 or 75 records a batch: neither divides the data set, so batches run on into the next epoch."""
    return FeedSpec(
        f"{SETS[name]}_{backend}", 75 if name == "mnist" else 11, seed=20, shuffle=shuffle, stop_step=STEPS, depth=4,  # type: ignore[arg-type]
        fingerprints="step", poison=True, transform=_TRANSFORMS[name],
    )  # fmt: skip


def hashes(feed: FeedSpec) -> list[dict[str, int]]:
    with Feed.from_spec(feed) as opened:
        return [batch.hashes for batch in opened]


def load() -> dict[str, list[dict[str, int]]]:
    """By "set/shuffle": the hashes of steps 0 to 13."""
    document = json.loads(FILE.read_text())
    return {
        name: [{key: int(value, 16) for key, value in step.items()} for step in steps]
        for name, steps in document["batches"].items()
    }


def write() -> None:
    batches = {
        f"{name}/{shuffle}": [
            {key: f"{value:016x}" for key, value in step.items()} for step in hashes(spec(name, shuffle))
        ]
        for name in SETS
        for shuffle in ("none", "block", "full")
    }
    FILE.write_text(json.dumps({"schema": 1, "batches": batches}, indent=1) + "\n")


if __name__ == "__main__":
    write()
