"""From a database back to files: ``python -m datasets.export DB OUT --to npz|images|parquet``.

    npz       of HDF5 files, an array for each data set under its name (float32); else
              arrays images (uint8[N, C, H, W], B, G, R) and labels (int32[N]); image files are decoded
    images    a folder for each class, and list.txt in Caffe's format ('path label' a line), in the order of the keys
    parquet   columns key (string), image (bytes of an image file) and label (int32)

Records that hold an image file keep its bytes; raw pixels become PNG files, which lose nothing. ``datasets.convert``
with npz, list (of list.txt) or parquet makes the same records of them again, with the options that this command prints.
All three are written record by record: memory does not grow with the data set.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
import zipfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from datasets import datum, decode, publish, terminal, writer
from datasets.convert_inputs import IMAGE_SUFFIXES, encode
from datasets.datum import Datum, DatumError
from datasets.manifest import key_text, read_manifest
from datasets.mean import records_of
from datasets.paired import label_numbers
from datasets.source import EVERY_TOP, Record, Source, open_source, show_key
from datasets.targets import check_apart, check_file, check_parent
from datasets.threads import in_order
from profiler import cli
from profiler.errors import StallscopeError, UsageError

if TYPE_CHECKING:
    from datasets.decode import Color

LIST = "list.txt"
_SUFFIXES = {"jpeg": ".jpg", "tiff": ".tif"}
_ROWS = 256
_ROW_BYTES = 32 << 20
"""A row group of a Parquet file ends after so many rows or bytes of images, whichever comes first."""
_LARGE = 4 << 30
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME = 120
_FILE, _GRAY, _COLOR = "image files", "raw gray pixels", "raw colour pixels"
_BACK = {_FILE: " --encoded", _GRAY: " --gray", _COLOR: ""}
"""With which option of ``datasets.convert`` a record becomes again what it was."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A record as an image file. ``suffix`` begins with a dot; ``origin`` says what the record holds."""

    record: Record
    label: int
    content: bytes
    suffix: str
    origin: str


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written. ``note`` is what a person should know; ``back`` the command that reads it again."""

    records: int
    out: Path
    back: str
    note: str = ""


Progress = Callable[[int], object]


def to_npz(source: Source, out: Path, color: Color | None, progress: Progress) -> Exported:
    """Raises :class:`DatumError` for records of different sizes, both named, and for records without a label."""
    count = len(source)
    labels = array("i")
    first: tuple[Record, tuple[int, ...]] | None = None

    def image_of(record: Record) -> tuple[Record, int, NDArray[np.uint8]]:
        parsed = datum.parse(record.value, record)
        label = _label(parsed, record)
        image = decode.to_image(parsed, record, color)
        if image.dtype != np.uint8:
            raise _no_pixels(record)
        return record, label, image

    with _new_file(out) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        # An array's header comes first and tells its shape, so it takes one record to begin and none to be kept.
        with archive.open("images.npy", "w", force_zip64=True) as images:
            for record, label, image in in_order(image_of, records_of(source)):
                if first is None:
                    first = record, image.shape
                    _write_header(images, (count, *image.shape))
                elif image.shape != first[1]:
                    raise DatumError(
                        f"{source.name}: records of different sizes do not fit into one array",
                        expected=f"{_size(first[1])}, as record {first[0].index} (key {show_key(first[0].key)})",
                        found=f"{_size(image.shape)} in record {record.index} (key {show_key(record.key)})",
                        hint="--to images or parquet; --color color or gray gives all the same number of channels",
                    )
                images.write(image.tobytes())
                labels.append(label)
                _tell(progress, len(labels))
        with archive.open("labels.npy", "w") as stored:
            np.lib.format.write_array(stored, np.array(labels, np.int32), allow_pickle=False)
    assert first is not None
    nbytes = count * int(np.prod(first[1]))
    note = f"reading the arrays back takes {nbytes / 2**30:.1f} GiB of memory" if nbytes > _LARGE else ""
    layout = "" if _layout_is_clear(first[1]) else " --layout nchw"
    return Exported(count, out, f"npz {_quoted(out)} DB{layout} --shuffle off", note)


def to_arrays(source: Source, out: Path, progress: Progress) -> Exported:
    """The data sets of HDF5 files under their names, float32[N, ...]; each takes a pass over the rows."""
    count = len(source)
    with _new_file(out) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for at, (top, shape) in enumerate(zip(source.tops, source.blobs, strict=True)):
            start = sum(math.prod(before) for before in source.blobs[1:at])
            with archive.open(f"{top}.npy", "w", force_zip64=True) as array:
                _write_header(array, (count, *shape), np.float32)
                for done, record in enumerate(records_of(source), 1):
                    numbers = label_numbers(record) if at else datum.parse(record.value, record).float_data
                    assert numbers is not None
                    array.write(numbers[start : start + math.prod(shape)].tobytes())
                    _tell(progress, (at * count + done) // len(source.tops))
    told = ", ".join(source.tops)
    return Exported(count, out, "", f"the arrays are the data sets {told}; numpy.load reads them, convert does not")


def to_images(source: Source, out: Path, progress: Progress) -> Exported:
    """Files ``<class>/<number>[_<rest of the key>].<suffix>``; the class by its name, where a manifest has names."""
    classes = _classes(source)
    origins: Counter[str] = Counter()
    made: set[str] = set()
    try:
        with publish.new_folder(out) as folder, open(folder / LIST, "w", encoding="utf-8") as listed:
            for item in in_order(_as_file, records_of(source)):
                name = classes[item.label] if 0 <= item.label < len(classes) else f"{item.label:03d}"
                if name not in made:
                    (folder / name).mkdir()
                    made.add(name)
                path = f"{name}/{_file_name(item)}"
                (folder / path).write_bytes(item.content)
                listed.write(f"{path} {item.label}\n")
                origins[item.origin] += 1
                _tell(progress, origins.total())
    except OSError as error:
        raise StallscopeError(f"{out} cannot be written: {error.strerror}", found=error.filename) from error
    return Exported(origins.total(), out, *_back(f"list {_quoted(out / LIST)} DB --shuffle off", origins))


def to_parquet(source: Source, out: Path, progress: Progress) -> Exported:
    """Class names of a manifest go into the schema's metadata, where Hugging Face's library looks for them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("key", pa.string()), ("image", pa.binary()), ("label", pa.int32())])
    classes = _classes(source)
    if classes:
        features = {
            "key": {"dtype": "string", "_type": "Value"},
            "image": {"_type": "Image"},
            "label": {"names": classes, "_type": "ClassLabel"},
        }
        schema = schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    origins: Counter[str] = Counter()
    # Image files do not shrink any further.
    compression = {"key": "zstd", "image": "none", "label": "zstd"}
    with (
        _new_file(out) as file,
        pq.ParquetWriter(file, schema, compression=compression, use_dictionary=False) as parquet,
    ):
        for group in _groups(in_order(_as_file, records_of(source))):
            columns = [
                pa.array([key_text(item.record.key) for item in group], pa.string()),
                pa.array([item.content for item in group], pa.binary()),
                pa.array([item.label for item in group], pa.int32()),
            ]
            parquet.write_table(pa.table(columns, schema=schema), row_group_size=len(group))
            origins.update(item.origin for item in group)
            progress(origins.total())
    return Exported(origins.total(), out, *_back(f"parquet {_quoted(out)} DB --shuffle off", origins))


def _back(command: str, origins: Counter[str]) -> tuple[str, str]:
    """The command that makes the same records again, and a note where none does."""
    if len(origins) == 1:
        return command + _BACK[next(iter(origins))], ""
    kinds = ", ".join(f"{count} with {origin}" for origin, count in origins.most_common())
    return command, f"the records are of several kinds ({kinds}); what is read back is of one"


def _quoted(path: Path) -> str:
    """A path as a word of a command line, also where it begins like an option."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def _as_file(record: Record) -> ImageFile:
    parsed = datum.parse(record.value, record)
    label = _label(parsed, record)
    seen = decode.probe(parsed, record)
    if seen.encoding == "raw":
        image = decode.to_image(parsed, record)
        return ImageFile(record, label, _png(image, record), ".png", _GRAY if len(image) == 1 else _COLOR)
    if seen.encoding == "float":
        raise _no_pixels(record)
    return ImageFile(record, label, bytes(parsed.data), _SUFFIXES.get(seen.encoding, f".{seen.encoding}"), _FILE)


def _png(image: NDArray[np.uint8], record: Record) -> bytes:
    if len(image) not in (1, 3):
        raise DatumError(
            f"{record}: its pixels cannot be an image file",
            expected="1 or 3 channels",
            found=len(image),
            hint="--to npz",
        )
    return encode(image, "png")


def _label(parsed: Datum, record: Record) -> int:
    if parsed.label is None:
        raise DatumError(
            f"{record}: has no label",
            expected="a label in each record",
            hint="a label that is not there is not 0: features and images without labels cannot be exported",
        )
    return parsed.label


def _no_pixels(record: Record) -> DatumError:
    return DatumError(
        f"{record}: holds float_data and no pixels",
        expected="raw pixels or an image file",
        hint="read features with datasets.open_source and datasets.decode.to_image",
    )


def _file_name(item: ImageFile) -> str:
    """The record's number, so that names are unique and sort like the keys, then what the key says beside it."""
    number = f"{item.record.index:08d}"
    rest = key_text(item.record.key).removeprefix(number).removeprefix("_")
    stem, suffix = os.path.splitext(rest)
    rest = stem if suffix.lower() in IMAGE_SUFFIXES else rest
    rest = _UNSAFE.sub("_", rest)[-_LONGEST_NAME:].strip("._")
    return f"{number}_{rest}{item.suffix}" if rest else f"{number}{item.suffix}"


def _classes(source: Source) -> list[str]:
    """Names of the classes that can be names of folders; none where one cannot."""
    manifest = read_manifest(source.path) if source.backend in writer.WRITERS and source.db is None else None
    names = (manifest.classes if manifest else None) or []
    usable = all(name and name == name.strip() and not re.search(r"[/\0\n\t]|^\.", name) for name in names)
    return names if usable and len(set(names)) == len(names) else []


def _groups(items: Iterator[ImageFile]) -> Iterator[list[ImageFile]]:
    group: list[ImageFile] = []
    nbytes = 0
    for item in items:
        group.append(item)
        nbytes += len(item.content)
        if len(group) == _ROWS or nbytes >= _ROW_BYTES:
            yield group
            group, nbytes = [], 0
    if group:
        yield group


def _write_header(file: IO[bytes], shape: tuple[int, ...], kind: type[np.generic] = np.uint8) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(kind)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def _layout_is_clear(shape: tuple[int, ...]) -> bool:
    """Whether ``datasets.convert npz`` can tell that the channels come first."""
    return shape[0] in (1, 3, 4) and shape[2] not in (1, 3, 4)


def _size(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _tell(progress: Progress, done: int) -> None:
    if done % 64 == 0:
        progress(done)


@contextmanager
def _new_file(out: Path) -> Iterator[IO[bytes]]:
    """A file under a temporary name beside ``out``, which takes its name when the block ends well."""
    publish.sweep(out)
    temporary = publish.part_of(out)
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, out)
    except OSError as error:
        raise StallscopeError(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _check_folder(out: Path, force: bool) -> None:
    """Refuse to replace anything but an earlier export."""
    check_parent(out)
    if not os.path.lexists(out) or (out.is_dir() and not os.listdir(out)):
        return
    if out.is_symlink() or not out.is_dir() or not (out / LIST).is_file():
        raise UsageError(f"{out} exists and is no folder of exported images", hint="name another target")
    strangers = [name for name in sorted(os.listdir(out)) if name != LIST and not _only_images(out / name)]
    if strangers:
        raise UsageError(
            f"{out} is a folder with other files in it than exported images; it stays as it is",
            found=", ".join(strangers[:5]),
            hint="name another target",
        )
    if not force:
        raise UsageError(f"{out} exists already", hint="--force replaces it, or name another target")


def _only_images(folder: Path) -> bool:
    if folder.is_symlink() or not folder.is_dir():
        return False
    return all(path.suffix in IMAGE_SUFFIXES and path.is_file() for path in folder.iterdir())


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns 0."""
    parser = cli.Parser(
        prog="python -m datasets.export", description="Write the records of a database as files that other tools read."
    )
    parser.add_argument("path", metavar="DB", help="folder of an LMDB or LevelDB, single-file LMDB, or memory:…")
    parser.add_argument("out", metavar="OUT", help="file (npz, parquet) or folder (images) to write")
    parser.add_argument("--to", choices=("npz", "images", "parquet"), required=True, help="what to write")
    parser.add_argument("--color", choices=("color", "gray"), help="npz: decode image files to 3 channels or to 1")
    parser.add_argument("--force", action="store_true", help="replace what an earlier export wrote there")
    parser.add_argument("--backend", help="lmdb or leveldb; by default what lies there decides")
    parser.add_argument("--db", help="named sub-database (LMDB)")
    arguments = parser.parse_args(argv)
    if arguments.color and arguments.to != "npz":
        parser.error("--color is of use with --to npz only: images and parquet keep the bytes of image files")
    cli.warn_if_shadowed()
    out = Path(arguments.out)
    if arguments.to == "images":
        check_apart(out, arguments.path)
        _check_folder(out, arguments.force)
    else:
        check_file(out, arguments.force, arguments.path)
    with open_source(arguments.path, backend=arguments.backend, db=arguments.db, tops=EVERY_TOP) as source:
        if not len(source):
            raise StallscopeError(f"{source.name} holds no records")
        with terminal.progress(f"writing {out.name}", len(source)) as progress:
            done = _export(arguments.to, source, out, arguments.color, progress)
    sys.stdout.write(f"{done.records:,} records: {done.out} ({arguments.to})\n")
    if done.back:
        sys.stdout.write(f"read it back with: python -m datasets.convert {done.back}\n")
    if done.note:
        sys.stdout.write(f"note: {done.note}\n")
    return cli.EXIT_OK


def _export(kind: str, source: Source, out: Path, color: Any, progress: Progress) -> Exported:
    if source.tops:
        if kind != "npz" or color:
            raise UsageError(f"{source.name} holds rows of numbers and no images", hint="--to npz without --color")
        return to_arrays(source, out, progress)
    if kind == "npz":
        return to_npz(source, out, color, progress)
    return to_images(source, out, progress) if kind == "images" else to_parquet(source, out, progress)


if __name__ == "__main__":
    cli.run(main)
