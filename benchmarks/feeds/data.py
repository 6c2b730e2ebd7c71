"""Build the data sets: an LMDB and a LevelDB of Datum records, and beside them the formats that peers have instead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.feeds.cases import DataSet
from benchmarks.feeds.pictures import photograph, pixels

QUALITY = 90


def key(number: int) -> bytes:
    return b"%08d" % number


def payloads(data: DataSet) -> Iterator[tuple[int, bytes]]:
    """The number of each record and its pixels, or its JPEG."""
    if data.encoded:
        import simplejpeg

        for number in range(data.records):
            picture = photograph(data, number)
            yield number, simplejpeg.encode_jpeg(picture, QUALITY, "BGR", "420")
    else:
        for number in range(data.records):
            yield number, pixels(data, number).tobytes()


def build(folder: Path, data: DataSet) -> Path:
    """The folder of a data set with its ``lmdb`` and ``leveldb``, built where it is not there."""
    from datasets import datum
    from datasets.publish import new_folder
    from datasets.writer import WRITERS

    place = folder / data.folder
    if place.is_dir():
        return place
    folder.mkdir(parents=True, exist_ok=True)
    with new_folder(place) as made:
        writers = []
        for name, writer in WRITERS.items():
            (made / name).mkdir()
            writers.append(writer(made / name))
        for number, payload in payloads(data):
            shape = {} if data.encoded else {"channels": 3, "height": data.height, "width": data.width}
            value = datum.serialize(**shape, data=payload, label=number, encoded=True if data.encoded else None)
            for one in writers:
                one.put(key(number), value)
        for one in writers:
            one.close()
    return place


def warm(place: Path) -> int:
    """Read all files below a folder once, so that they lie in the page cache; bytes."""
    total = 0
    for file in place.rglob("*"):
        if file.is_file():
            with file.open("rb") as stream:
                while piece := stream.read(8 << 20):
                    total += len(piece)
    return total
