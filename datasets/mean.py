"""The mean image of a data set: ``python -m datasets.mean DB OUT.binaryproto [--npy FILE] [--json]``.

As Caffe's ``compute_image_mean`` makes it, bit for bit: the records are added up in float32 in the order of their keys
and the sum is divided by their number. The file is a ``BlobProto`` with num, channels, height and width, for the
``mean_file`` of a net. Channels are in the order B, G, R.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from datasets import datum, decode, terminal
from datasets.datum import DatumError
from datasets.manifest import write_whole
from datasets.source import EVERY_TOP, Record, Source, open_source, show_key
from datasets.targets import check_file
from datasets.threads import in_order
from profiler import cli
from profiler.errors import StallscopeError, UsageError

if TYPE_CHECKING:
    from datasets.decode import Color

SCHEMA = 1
_CHUNK = 64


@dataclass(frozen=True, slots=True, eq=False)
class Mean:
    """float32[C, H, W] over ``records`` records; ``channels`` holds the mean of each channel of that image."""

    image: NDArray[np.float32]
    records: int

    @property
    def channels(self) -> list[float]:
        return [float(value) for value in self.image.reshape(len(self.image), -1).mean(axis=1, dtype=np.float64)]


def compute(source: Source, color: Color | None = None, progress: Callable[[int], object] = lambda done: None) -> Mean:
    """Mean of all records of ``source``, which must be of one size.

    Parameters
    ----------
    color: as for :func:`datasets.decode.to_image`. progress: called now and then with the number of records done.

    Raises
    ------
    DatumError: a record cannot be decoded, is not finite, or has another size than the first; both are named.
    StallscopeError: there are no records.
    """
    total: NDArray[np.float32] | None = None
    first: Record | None = None
    done = 0

    def image_of(record: Record) -> tuple[Record, NDArray[Any]]:
        parsed = datum.parse(record.value, record)
        if not parsed.finite:
            raise DatumError(
                f"{record} holds NaN or infinity: every value that it enters of the mean would be lost",
                hint="python -m datasets.verify counts such records",
            )
        return record, decode.to_image(parsed, record, color)

    for record, image in in_order(image_of, records_of(source)):
        if total is None:
            total, first = np.zeros(image.shape, np.float32), record
        if image.shape != total.shape:
            raise DatumError(
                f"{source.name}: records of different sizes have no mean image",
                expected=f"{_size(total.shape)}, as record {first.index} (key {show_key(first.key)})"
                if first
                else None,
                found=f"{_size(image.shape)} in record {record.index} (key {show_key(record.key)})",
                hint="convert the images again with --resize"
                + ("; --color color or gray gives all the same number of channels" if color is None else ""),
            )
        total += image
        done += 1
        if done % _CHUNK == 0:
            progress(done)
    if total is None:
        raise StallscopeError(f"{source.name} holds no records")
    progress(done)
    # One division by a float32, as Caffe does it: multiplying with the reciprocal rounds differently.
    return Mean(total / np.float32(done), done)


def records_of(source: Source) -> Iterator[Record]:
    """All records in key order, a few at a time."""
    for start in range(0, len(source), _CHUNK):
        yield from source.read_many(range(start, min(start + _CHUNK, len(source))))


def binaryproto(image: NDArray[np.float32]) -> bytes:
    """The bytes of a BlobProto that holds float32[C, H, W], as Caffe writes a mean image."""
    from datasets.caffe_pb2 import BlobProto

    channels, height, width = image.shape
    blob = BlobProto(num=1, channels=channels, height=height, width=width)
    blob.data.extend(image.reshape(-1).tolist())
    return blob.SerializeToString(deterministic=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns 0."""
    parser = cli.Parser(prog="python -m datasets.mean", description="Mean image of a data set, as Caffe computes it.")
    parser.add_argument("path", metavar="DB", help="folder of an LMDB or LevelDB, single-file LMDB, or memory:…")
    parser.add_argument("out", metavar="OUT.binaryproto", help="file for mean_file of a net's transform_param")
    parser.add_argument("--npy", metavar="FILE", help="the same as float32[C, H, W] in NumPy's format")
    parser.add_argument("--color", choices=("color", "gray"), help="decode image files to 3 channels or to 1")
    parser.add_argument("--force", action="store_true", help="replace files that are there already")
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of text")
    parser.add_argument("--backend", help="lmdb or leveldb; by default what lies there decides")
    parser.add_argument("--db", help="named sub-database (LMDB)")
    arguments = parser.parse_args(argv)
    cli.warn_if_shadowed()
    targets = [Path(name) for name in (arguments.out, arguments.npy) if name]
    for target in targets:
        check_file(target, arguments.force, arguments.path)
    if len({target.absolute() for target in targets}) < len(targets):
        raise UsageError("OUT and --npy name the same file", found=arguments.npy)
    with (
        open_source(arguments.path, backend=arguments.backend, db=arguments.db, tops=EVERY_TOP) as source,
        terminal.progress("adding up records", len(source)) as progress,
    ):
        mean = compute(source, arguments.color, progress)
        name = source.name
    write_whole(targets[0], binaryproto(mean.image))
    if arguments.npy:
        buffer = io.BytesIO()
        np.save(buffer, mean.image, allow_pickle=False)
        write_whole(targets[1], buffer.getvalue())
    document = {
        "schema": SCHEMA,
        "path": arguments.path,
        "records": mean.records,
        "shape": list(mean.image.shape),
        "channel_means": mean.channels,
        "files": [str(target) for target in targets],
    }
    sys.stdout.write(cli.dumps(document) + "\n" if arguments.json else _text(name, mean, targets))
    return cli.EXIT_OK


def _text(name: str, mean: Mean, targets: list[Path]) -> str:
    letters = ("B ", "G ", "R ") if len(mean.channels) == 3 else ("",) * len(mean.channels)
    values = ", ".join(f"{letter}{value:.4f}" for letter, value in zip(letters, mean.channels, strict=True))
    return (
        f"mean of {mean.records:,} records, {_size(mean.image.shape)}: {name}\n"
        f"channel means (mean_value): {values}\n"
        f"written: {', '.join(map(str, targets))}\n"
    )


def _size(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


if __name__ == "__main__":
    cli.run(main)
