"""``python -m datasets.convert KIND SRC OUT``: build an LMDB or a LevelDB of Datum records.

Records are those of Caffe's own tools (keys, fields, colour order, resizing), shuffled by default: a reader that goes
through a database in its order would otherwise see one class at a time.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import convert_arrays, convert_files, convert_list, writer
from datasets.convert_inputs import ImageOptions, Inputs
from datasets.convert_plan import DEFAULT_SEED, Plan, check_names, check_targets, may_be_there
from datasets.convert_run import convert
from datasets.convert_stream import SampleStream
from datasets.convert_work import folder_of
from datasets.image_file import MAX_PIXELS
from datasets.manifest import Manifest
from datasets.source import show_text
from datasets.targets import check_apart
from profiler.cli import EXIT_NOT_FINE, EXIT_OK, Parser, run
from profiler.osread import usable_cpus

_LISTED = 20
_NOT_RECORDED = ("sources", "out", "force", "shuffle", "workers", "on_error", "label_db", "backend")

_ABOUT = {
    "images": (
        "a folder with one folder of images for each class",
        "SRC is a folder with one folder for each class, and images (also in folders) in these. Labels number the "
        "classes from 0 in the order of their names. Keys: %08d_class/file, as convert_imageset writes them.",
    ),
    "list": (
        "a text file with a path and a label on each line",
        "SRC is a list as Caffe's convert_imageset takes it: a path, a space and a whole number on each line. All "
        "lines are checked before anything is written. Keys: %08d_path, as convert_imageset writes them.",
    ),
    "idx": (
        "the IDX files of MNIST, gzip or not",
        "SRC is a file of images in MNIST's IDX format, compressed by gzip or not. Keys: %08d, as "
        "convert_mnist_data writes them.",
    ),
    "npz": (
        "a NumPy archive with arrays 'images' and 'labels'",
        "SRC is a .npz file with the arrays 'images' (uint8, [N, H, W], [N, C, H, W] or [N, H, W, C]) and 'labels' "
        "(whole numbers, [N]). Keys: %08d.",
    ),
    "parquet": (
        "Parquet with a column of images and one of labels",
        "SRC are Parquet files, folders of them, globs, or patterns like 'train-{00000..00003}.parquet'. Images are "
        "bytes, Hugging Face's struct of bytes and path, or paths as text. Keys: %08d, and _path where there is "
        "one. Shuffling keeps a copy of the images beside OUT for as long as it takes.",
    ),
    "tar": (
        "WebDataset archives: an image and a .cls or .json of one name each",
        "SRC are .tar or .tar.gz files, folders of them, globs, or patterns like 'shard-{000..127}.tar'. Files of one "
        "name that follow one another are a sample: an image, and its label as a whole number in .cls or in .json. "
        "Links and paths that lead out of the archive are ignored and told. Nothing is unpacked; shuffling compressed "
        "archives keeps a copy of the images in one file beside OUT for as long as it takes. Keys: %08d_name.",
    ),
}

_MODES = (
    "Images become three channels in the order blue, green, red, or one with --gray: palettes are looked up, "
    "transparency is dropped, CMYK is converted, 16-bit images are refused, an orientation noted in EXIF is not "
    "applied. --encoded alone keeps files unchanged, and so takes only plain gray and RGB ones."
)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    images = arguments.kind not in ("idx", "npz")
    plan = Plan(
        out=Path(arguments.out),
        backend=arguments.backend,
        shuffle_seed=arguments.shuffle,
        force=arguments.force,
        skip=arguments.on_error == "skip",
        workers=arguments.workers if images else 1,
        label_out=getattr(arguments, "label_db", None),
        source=" ".join(arguments.sources),
        options=_recorded(arguments),
    )
    check_names(plan)
    for source in arguments.sources:
        if os.path.isdir(source):  # what is written would change it, and might be taken for a part of it next time
            check_apart(plan.out, source)
    if not folder_of(plan.out).exists() and not may_be_there(plan):
        check_targets(plan)  # before a large source is read
    inputs = _open(arguments, plan)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)

    def say(text: str) -> None:
        console.print(_printable(text), markup=False, highlight=False, soft_wrap=True)

    for note in inputs.notes:
        say(f"note: {note}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        tasks: dict[str, Any] = {}

        def progress(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        manifest = convert(inputs, plan, progress=progress, say=say)
    sys.stdout.write(_printable(_summary(plan, manifest)))
    return EXIT_NOT_FINE if manifest.skipped_count else EXIT_OK


def _printable(text: str) -> str:
    """File names may be bytes that are no text, or hold what moves a terminal's cursor."""
    return "\n".join(show_text(line) for line in text.split("\n"))


def _summary(plan: Plan, manifest: Manifest) -> str:
    shapes = list(manifest.shapes)
    size = shapes[0] if len(shapes) == 1 else f"{len(shapes)} different sizes"
    order = "source order" if manifest.shuffle_seed is None else f"shuffled with seed {manifest.shuffle_seed}"
    lines = [f"{manifest.records} records, {size}, {order}: {plan.out} ({manifest.backend})"]
    if plan.label_out is not None:
        lines.append(f"labels, under the same keys: {plan.label_out} ({manifest.backend})")
    if manifest.label_range is not None:
        low, high = manifest.label_range
        names = manifest.classes or []
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        lines.append(f"labels {low} to {high}" + (f": {', '.join(names[:_LISTED])}{more}" if names else ""))
    if manifest.skipped_count:
        lines.append(f"SKIPPED {manifest.skipped_count}:")
        lines += [f"  {reason}" for reason in manifest.skipped[:_LISTED]]
        if manifest.skipped_count > _LISTED:
            lines.append(f"  and {manifest.skipped_count - _LISTED} more")
    return "\n".join(lines) + "\n"


def _open(arguments: argparse.Namespace, plan: Plan) -> Inputs | SampleStream:
    sources = arguments.sources
    if arguments.kind == "idx":
        return convert_arrays.open_idx(Path(sources[0]), arguments.labels)
    if arguments.kind == "npz":
        return convert_arrays.open_npz(Path(sources[0]), arguments.layout, arguments.channel_order)
    options = ImageOptions(
        arguments.resize, arguments.gray, arguments.encoded or arguments.encode_type is not None, arguments.encode_type
    )
    if arguments.kind == "images":
        return convert_files.open_images(Path(sources[0]), options)
    if arguments.kind == "list":
        return convert_list.open_list(
            Path(sources[0]), arguments.root, options, pairs=plan.label_out is not None, skip=plan.skip
        )
    if arguments.kind == "parquet":
        from datasets.convert_parquet import open_parquet

        return open_parquet(sources, options, arguments.image_column, arguments.label_column, arguments.root)
    from datasets.convert_tar import open_tar

    return open_tar(sources, options, arguments.label_key, arguments.image)


def _recorded(arguments: argparse.Namespace) -> dict[str, Any]:
    options = {key: value for key, value in vars(arguments).items() if key not in _NOT_RECORDED}
    return {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}


# ------------------------------------------------------------------------------------------------------- command line


def _size(text: str) -> tuple[int, int]:
    numbers = text.replace("x", ",").split(",")
    if len(numbers) not in (1, 2) or not all(number.strip().isdecimal() and int(number) > 0 for number in numbers):
        raise argparse.ArgumentTypeError(f"'{text}' is not a size: N, or height,width")
    height, width = int(numbers[0]), int(numbers[-1])
    if height * width > MAX_PIXELS:
        raise argparse.ArgumentTypeError(f"{height} x {width} is more than the {MAX_PIXELS:,} pixels of an image")
    return height, width


def _seed(text: str) -> int | None:
    if text == "off":
        return None
    if not text.isdecimal() or int(text) >= 2**64:
        raise argparse.ArgumentTypeError(f"'{text}' is neither a seed (a whole number below 2^64) nor 'off'")
    return int(text)


def _workers(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 256:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of threads from 1 to 256")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m datasets.convert",
        description="Build an LMDB or a LevelDB of Caffe's Datum records, readable by Caffe itself.",
        epilog="python -m datasets.convert KIND --help tells the options of each kind of source. A conversion that "
        "was killed goes on where it was when the same command is given again. Exit code 1: something was left out.",
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND", parser_class=Parser)
    for kind, (short, long) in _ABOUT.items():
        images = kind not in ("idx", "npz")
        sub = kinds.add_parser(kind, help=short, description=long, epilog=_MODES if images else None)
        several = kind in ("parquet", "tar")
        sub.add_argument("sources", metavar="SRC", nargs="+" if several else 1, help=short)
        sub.add_argument("out", metavar="OUT", help="folder of the new database; its manifest goes beside it")
        _add_common(sub)
        if images:
            _add_image_options(sub)
        _ADD.get(kind, lambda sub: None)(sub)
    return parser


def _add_common(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--backend", choices=sorted(writer.WRITERS), default="lmdb", help="default: lmdb")
    sub.add_argument(
        "--shuffle",
        type=_seed,
        default=DEFAULT_SEED,
        metavar="SEED|off",
        help=f"order of the records; default: shuffled with seed {DEFAULT_SEED}",
    )
    sub.add_argument("--force", action="store_true", help="replace a database that is there already")
    sub.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="what to do about an item that cannot be read; with skip the exit code is 1 if any was (default: stop)",
    )


def _add_image_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--resize", type=_size, metavar="H,W | N", help="bilinear, as OpenCV (so Caffe) does it")
    sub.add_argument(
        "--gray",
        action="store_true",
        help="one channel instead of three",
    )
    sub.add_argument(
        "--encoded",
        action="store_true",
        help="store image files: unchanged without --resize and --gray, else compressed again, JPEG as JPEG "
        "(quality 95) and others as PNG",
    )
    sub.add_argument("--encode-type", choices=("jpg", "png"), help="store all as files of this kind")
    sub.add_argument(
        "--workers",
        type=_workers,
        default=usable_cpus(),
        metavar="N",
        help="threads that decode; the result does not depend on it (default: one for each core, %(default)s)",
    )


def _add_list(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--root", type=Path, metavar="DIR", help="where the paths begin; default: the list's folder")
    sub.add_argument(
        "--label-db",
        type=Path,
        metavar="OUT2",
        help="lines end with one or more numbers, with or without a fraction: they are stored as float_data in a "
        "second database under the same keys, and the images have no label",
    )


def _add_idx(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--labels", type=Path, metavar="FILE", help="default: found by MNIST's names")


def _add_npz(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--layout", choices=("nchw", "nhwc"), help="where the channels are in a 4-D array")
    sub.add_argument(
        "--channel-order",
        choices=("bgr", "rgb"),
        default="bgr",
        help="order of three channels in the array; stored is bgr, as Caffe has it (default: bgr)",
    )


def _add_parquet(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--image-column", metavar="NAME", help="default: image, img, image_bytes, bytes, … or path")
    sub.add_argument("--label-column", metavar="NAME", help="default: label, labels, cls, class, …")
    sub.add_argument("--root", type=Path, metavar="DIR", help="where paths begin; default: the file's folder")


def _add_tar(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--label-key", default="label", metavar="KEY", help="key of the label in .json (default: label)")
    sub.add_argument("--image", metavar="ENDING", help="ending of the image where samples have several, like left.jpg")


_ADD = {"list": _add_list, "idx": _add_idx, "npz": _add_npz, "parquet": _add_parquet, "tar": _add_tar}


if __name__ == "__main__":
    run(main)
