"""What is measured: three data sets, and the work that every feed does on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

MEAN = (104.0, 117.0, 123.0)
"""Subtracted per channel where the samples are float32."""


@dataclass(frozen=True)
class DataSet:
    """Records whose label is their number, so that what a feed delivers says where it comes from."""

    name: str
    records: int
    height: int
    width: int
    encoded: bool = False

    @property
    def folder(self) -> str:
        """Other numbers of records lie in other folders."""
        return f"{self.name}-{self.records}"


@dataclass(frozen=True)
class Case:
    """One row of work: records of a data set, cropped and mirrored at random, as ``dtype[B, 3, crop, crop]``.

    An encoded record is decoded, a random part of it (8 to 100 % of the area) resized to the crop, as in Inception.
    """

    name: str
    data: DataSet
    crop: int
    batch: int
    dtype: Literal["uint8", "float32"]
    decode: Literal["full", "region"] = "full"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.batch, 3, self.crop, self.crop)


SMALL = DataSet("small", 20_000, 32, 32)
RAW = DataSet("raw", 1_500, 256, 256)
JPEG = DataSet("jpeg", 600, 375, 500, encoded=True)

CASES = {
    case.name: case
    for case in (
        Case("small-u8", SMALL, 28, 256, "uint8"),
        Case("small-f32", SMALL, 28, 256, "float32"),
        Case("raw-u8", RAW, 227, 64, "uint8"),
        Case("raw-f32", RAW, 227, 64, "float32"),
        Case("jpeg-u8", JPEG, 224, 64, "uint8"),
        Case("jpeg-region", JPEG, 224, 64, "uint8", "region"),
    )
}


def case_named(name: str, quick: bool = False) -> Case:
    """A case; ``quick``: with few records and small batches, for a look whether all of it works."""
    case = CASES[name]
    if not quick:
        return case
    return replace(case, data=replace(case.data, records=64 if case.data.encoded else 200), batch=16)
