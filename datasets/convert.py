"""``python -m datasets.convert {images,list,idx,npz} SRC OUT``: build an LMDB or a LevelDB of Datum records.

Records are those of Caffe's own tools (keys, fields, colour order, resizing), shuffled by default: a reader that goes
through a database in its order would otherwise see one class at a time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from datasets import convert_inputs, writer
from datasets.convert_inputs import ImageOptions, Inputs
from datasets.manifest import Manifest, Tally, remove_manifest, write_manifest
from datasets.order import Order
from profiler.cli import EXIT_NOT_FINE, EXIT_OK, Parser, run
from profiler.errors import StallscopeError, UsageError

DEFAULT_SEED = 1
MOST_RECORDS = 10**8
"""Keys begin with eight digits; with more records their byte order would not be their numeric order."""
_LONGEST_KEY = 511  # LMDB's limit; held for LevelDB as well, so both can hold the same records
_LISTED_SKIPS = 100


def convert(
    inputs: Inputs,
    out: Path,
    *,
    backend: str = "lmdb",
    shuffle_seed: int | None = DEFAULT_SEED,
    force: bool = False,
    on_error: str = "stop",
    source: str = "",
    options: dict[str, Any] | None = None,
    progress: Callable[[int], object] = lambda done: None,
) -> Manifest:
    """Write ``inputs`` to a new database at ``out`` with its manifest beside it.

    The database appears under its name only when it is complete.

    Parameters
    ----------
    shuffle_seed: seed of the order in which the items are stored; None keeps their own.
    force: replace a database that is there already.
    on_error: ``stop`` raises the first error of an item; ``skip`` leaves the item out and lists it in the manifest.
        Keys are numbered by place, so a skipped item leaves a gap.
    progress: called now and then with the number of items done.

    Raises :class:`StallscopeError`: wrong target, unreadable item, or nothing left to store.
    """
    count = len(inputs)
    if count > MOST_RECORDS:
        raise UsageError("too many records for one database", expected=f"at most {MOST_RECORDS}", found=count)
    writer.check_target(out, force)
    order = Order(count, shuffle_seed or 0, "none" if shuffle_seed is None else "full")
    tally = Tally()
    skipped: list[str] = []
    skipped_count = 0
    with writer.new_folder(out) as folder:
        target = writer.WRITERS[backend](folder)
        try:
            for place, index in _in_order(order):
                try:
                    item = inputs.convert(index)
                    key = f"{place:08d}{inputs.suffix(index)}".encode("utf-8", "surrogateescape")
                    if len(key) > _LONGEST_KEY:
                        raise UsageError(
                            f"{inputs.where(index)}: the path is too long for a key",
                            expected=f"at most {_LONGEST_KEY} bytes",
                            found=len(key),
                        )
                except StallscopeError as error:
                    if on_error == "stop":
                        raise
                    skipped_count += 1
                    if len(skipped) < _LISTED_SKIPS:
                        skipped.append(str(error).splitlines()[0])
                else:
                    target.put(key, item.value)
                    tally.add(key, item.value, item.shape, item.label, item.encoded)
                if place % 100 == 99 or place == count - 1:
                    progress(place + 1)
            if tally.records == 0:
                raise StallscopeError("not one item could be read; no database was made", found=skipped[0])
            target.close()
        finally:
            target.abandon()
        # From here on the old manifest, if any, would speak of a database that is about to be replaced.
        remove_manifest(out)
    manifest = tally.manifest(
        backend=backend,
        classes=inputs.classes,
        source=source,
        options=options or {},
        shuffle_seed=shuffle_seed,
        skipped=skipped,
        skipped_count=skipped_count,
    )
    write_manifest(out, manifest, tally.crcs)
    return manifest


def _in_order(order: Order) -> Iterator[tuple[int, int]]:
    """(place, index) for all places, a chunk at a time: no list of all of them in memory."""
    chunk = 65536
    for start in range(0, len(order), chunk):
        places = np.arange(start, min(start + chunk, len(order)))
        yield from zip(places.tolist(), order.records(0, places).tolist(), strict=True)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    out = Path(arguments.out)
    writer.check_target(out, arguments.force)  # before a large source is read
    inputs = _open(arguments)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"writing {out.name}", total=len(inputs))
        manifest = convert(
            inputs,
            out,
            backend=arguments.backend,
            shuffle_seed=arguments.shuffle,
            force=arguments.force,
            on_error=arguments.on_error,
            source=str(arguments.source),
            options=_recorded(arguments),
            progress=lambda done: bar.update(task, completed=done),
        )
    sys.stdout.write(_summary(out, manifest))
    return EXIT_NOT_FINE if manifest.skipped_count else EXIT_OK


def _summary(out: Path, manifest: Manifest) -> str:
    shapes = list(manifest.shapes)
    size = shapes[0] if len(shapes) == 1 else f"{len(shapes)} different sizes"
    order = "source order" if manifest.shuffle_seed is None else f"shuffled with seed {manifest.shuffle_seed}"
    lines = [f"{manifest.records} records, {size}, {order}: {out} ({manifest.backend})"]
    if manifest.label_range is not None:
        low, high = manifest.label_range
        lines.append(f"labels {low} to {high}" + (f": {', '.join(manifest.classes)}" if manifest.classes else ""))
    if manifest.skipped_count:
        lines.append(f"SKIPPED {manifest.skipped_count}:")
        lines += [f"  {reason}" for reason in manifest.skipped[:20]]
        if manifest.skipped_count > 20:
            lines.append(f"  and {manifest.skipped_count - 20} more")
    return "\n".join(lines) + "\n"


def _open(arguments: argparse.Namespace) -> Inputs:
    source = Path(arguments.source)
    if arguments.kind in ("images", "list"):
        options = ImageOptions(arguments.resize, arguments.gray, arguments.encoded)
        if arguments.kind == "images":
            return convert_inputs.open_images(source, options)
        return convert_inputs.open_list(source, arguments.root, options)
    if arguments.kind == "idx":
        return convert_inputs.open_idx(source, arguments.labels)
    return convert_inputs.open_npz(source, arguments.layout, arguments.channel_order)


def _recorded(arguments: argparse.Namespace) -> dict[str, Any]:
    options = {key: value for key, value in vars(arguments).items() if key not in ("source", "out", "force", "shuffle")}
    return {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}


def _size(text: str) -> tuple[int, int]:
    numbers = text.replace("x", ",").split(",")
    if len(numbers) not in (1, 2) or not all(number.strip().isdecimal() and int(number) > 0 for number in numbers):
        raise argparse.ArgumentTypeError(f"'{text}' is not a size: N, or height,width")
    return int(numbers[0]), int(numbers[-1])


def _seed(text: str) -> int | None:
    if text == "off":
        return None
    if not text.isdecimal() or int(text) >= 2**64:
        raise argparse.ArgumentTypeError(f"'{text}' is neither a seed (a whole number below 2^64) nor 'off'")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m datasets.convert", description="Build an LMDB or a LevelDB of Caffe's Datum records."
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="{images,list,idx,npz}", parser_class=Parser)
    about = {
        "images": ("SRC: a folder with one folder of images for each class", "key: %08d_path"),
        "list": ("SRC: a text file, 'path label' on each line", "key: %08d_path"),
        "idx": ("SRC: MNIST's file of images, gzip or not", "key: %08d"),
        "npz": ("SRC: a .npz file with arrays 'images' (uint8) and 'labels'", "key: %08d"),
    }
    for kind, (text, key) in about.items():
        sub = kinds.add_parser(kind, help=text, description=f"{text}; {key}")
        sub.add_argument("source", metavar="SRC")
        sub.add_argument("out", metavar="OUT", help="folder of the new database")
        sub.add_argument("--backend", choices=sorted(writer.WRITERS), default="lmdb", help="default: lmdb")
        sub.add_argument(
            "--shuffle",
            type=_seed,
            default=DEFAULT_SEED,
            metavar="SEED|off",
            help=f"order of the records; default: seed {DEFAULT_SEED}",
        )
        sub.add_argument("--force", action="store_true", help="replace a database that is there already")
        sub.add_argument(
            "--on-error",
            choices=("stop", "skip"),
            default="stop",
            help="what to do about an item that cannot be read; with skip the exit code is 1 if any was",
        )
        if kind in ("images", "list"):
            sub.add_argument("--resize", type=_size, metavar="H,W | N", help="bilinear, as OpenCV does it")
            sub.add_argument("--gray", action="store_true", help="one channel instead of three")
            sub.add_argument(
                "--encoded",
                action="store_true",
                help="store image files; their bytes are unchanged without --resize and --gray",
            )
        if kind == "list":
            sub.add_argument(
                "--root", type=Path, metavar="DIR", help="where the paths begin; default: the list's folder"
            )
        if kind == "idx":
            sub.add_argument("--labels", type=Path, metavar="FILE", help="default: found by MNIST's names")
        if kind == "npz":
            sub.add_argument("--layout", choices=("nchw", "nhwc"), help="where the channels are in a 4-D array")
            sub.add_argument(
                "--channel-order",
                choices=("bgr", "rgb"),
                default="bgr",
                help="order of three channels in the array; stored is bgr, as Caffe has it (default: bgr)",
            )
    return parser


if __name__ == "__main__":
    run(main)
