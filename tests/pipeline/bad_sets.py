"""Data sets with bad records of every kind, for the tests of ``data.on_bad_record``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import datum
from pipeline.feed import Feed
from pipeline.spec import FeedSpec, TransformSpec
from tests.pipeline.build import encoded, image_file, picture, raw, write_leveldb, write_lmdb

RECORDS, BATCH, STEPS = 103, 8, 30


SHAPE = (3, 20, 24)


PINNED = Path("tests/data/golden_bad_records.json")


def values() -> dict[int, bytes]:
    """Case C15 and its relatives: the bad records by number. All but 60 have a label that can be read."""
    photo, drawing = image_file(picture(7, SHAPE)), image_file(picture(11, SHAPE), "PNG")
    return {
        5: datum.serialize(data=photo[: len(photo) // 2], label=1, encoded=True),
        17: datum.serialize(data=b"not an image, but a text file\n", label=2, encoded=True),
        40: datum.serialize(channels=3, height=4, width=5, data=b"ten bytes.", label=3),
        41: raw(picture(9, (3, 19, 24)), 4),
        60: raw(picture(8, SHAPE), None),
        77: encoded(picture(10, (1, 20, 24)), 6),
        98: datum.serialize(data=drawing[: len(drawing) // 2], label=7, encoded=True),
    }


def sound(number: int) -> bytes:
    image = picture(100 + number, SHAPE)
    if number % 3 == 0:
        return encoded(image, number % 10, "PNG")  # some photos are .png under a .jpg name: only the bytes count
    return raw(image, number % 10)


def write_sets(folder: Path) -> dict[str, str]:
    """The set as LMDB and as LevelDB: paths by kind."""
    bad = values()
    records = [bad.get(i) or sound(i) for i in range(RECORDS)]
    return {"lmdb": write_lmdb(folder / "lmdb", records), "leveldb": write_leveldb(folder / "leveldb", records)}


def spec(path: str, policy: str, **more: Any) -> FeedSpec:
    settings: dict[str, Any] = {"stop_step": STEPS, "depth": 4, "bad_record_cap": 0.1, **more}
    return FeedSpec(
        path, BATCH, seed=3, shuffle="full", fingerprints="step", poison=True, on_bad_record=policy,  # type: ignore[arg-type]
        transform=TransformSpec(crop=20, mirror=True, mean_value=(100.0,), scale=0.5), **settings,
    )  # fmt: skip


def zeroable(folder: Path) -> str:
    """The set without the one record that has no label: a copy."""
    bad = values()
    del bad[60]
    return write_lmdb(folder, [bad.get(i) or sound(i) for i in range(RECORDS)])


def hashes(asked: FeedSpec) -> list[dict[str, int]]:
    with Feed.from_spec(asked) as feed:
        return [batch.hashes for batch in feed]
