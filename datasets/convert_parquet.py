"""Parquet as input: a column of images (bytes, Hugging Face's struct of bytes and path, or paths) and one of labels.

Files are read a row group at a time and a few rows of it at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from datasets.convert_inputs import INT32, MAX_FILE_BYTES, ImageOptions, InputError
from datasets.convert_stream import ALONE, Sample, SampleStream, expand

IMAGE_COLUMNS = ("image", "img", "image_bytes", "bytes", "jpg", "png", "path", "file_name")
LABEL_COLUMNS = ("label", "labels", "cls", "class", "fine_label", "target")
"""Names that are looked for, in this order, where none is given."""
_ROWS = 32


class Columns(SampleStream):
    """Rows of Parquet files of one schema. ``root``: where paths begin, for images that are not in the file."""

    def __init__(self, files: list[Path], options: ImageOptions, image: str, label: str, root: Path | None) -> None:
        super().__init__(files, options)
        self.image = image
        self.label = label
        self.root = root

    def samples(self) -> Iterator[Sample]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.left_out.clear()
        for path in self.files:
            row = 0
            try:
                # Without pre_buffer and with a small buffer, pages are read as they are needed, not a whole row group.
                with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
                    for batch in file.iter_batches(_ROWS, columns=[self.image, self.label]):
                        images, labels = batch.column(self.image), batch.column(self.label)
                        for place in range(len(batch)):
                            yield self._sample(path, row, images[place].as_py(), labels[place].as_py())
                            row += 1
            except (pa.ArrowException, OSError) as error:
                # What is left of this file is lost, and it is told as one item.
                text = " ".join(str(error).split())[:300]
                yield Sample(str(path), problem=f"{path}: nothing can be read after row {row}: {text}")

    def _sample(self, path: Path, row: int, image: Any, label: Any) -> Sample:
        where = f"{path}, row {row}"
        if label is None:
            return Sample(where, problem=f"{where}: the label is missing")
        if not INT32.min <= int(label) <= INT32.max:
            return Sample(where, problem=f"{where}: the label {label} does not fit into 32 bits")
        name = ""
        if isinstance(image, dict):
            image, name = image.get("bytes"), image.get("path") or ""
            image = image if image is not None else name
        if isinstance(image, str) and image:
            return self._file(where, (self.root or path.parent) / image, image, int(label))
        if not image:
            return Sample(where, problem=f"{where}: the image is missing")
        return Sample(where, f"_{name}" if name else "", int(label), image)

    def _file(self, where: str, file: Path, name: str, label: int) -> Sample:
        try:
            size = file.stat().st_size
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            return Sample(where, problem=f"{where}: {file}: {reason}")
        if not 0 < size <= MAX_FILE_BYTES:
            return Sample(where, problem=f"{where}: {file} has {size} bytes: that is no image")
        return Sample(str(file), f"_{name}", label, None, ALONE, 0, size)


def open_parquet(
    sources: Sequence[str], options: ImageOptions, image: str | None, label: str | None, root: Path | None
) -> Columns:
    """One or several files of the same columns. Raises :class:`InputError` for files and columns that do not fit.

    sources: see :func:`datasets.convert_stream.expand`. image, label: names of columns; None looks for common ones.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = expand(sources, (".parquet",))
    count = 0
    chosen: tuple[str, str] | None = None
    names: list[str] | None = None
    for path in files:
        try:
            about = pq.ParquetFile(path)
            schema = about.schema_arrow
        except (pa.ArrowException, OSError) as error:
            text = " ".join(str(error).split())[:200]
            raise InputError(
                f"{path} is not a readable Parquet file", found=text, hint="is it cut? copy it again"
            ) from error
        count += about.metadata.num_rows
        about.close()
        if chosen is None:
            chosen = (
                _column(path, schema, image, IMAGE_COLUMNS, "image"),
                _column(path, schema, label, LABEL_COLUMNS, "label"),
            )
            names = _class_names(schema, chosen[1])
        for name, kind in zip(chosen, ("image", "label"), strict=True):
            _column(path, schema, name, (), kind)
        _check_types(path, schema, *chosen)
    assert chosen is not None
    stream = Columns(files, options, *chosen, root)
    stream.count = count
    stream.classes = names
    if count == 0:
        raise InputError(f"{files[0]} has no rows")
    return stream


def _column(path: Path, schema: Any, name: str | None, usual: tuple[str, ...], kind: str) -> str:
    for candidate in (name,) if name is not None else usual:
        if candidate in schema.names:
            return candidate
    raise InputError(
        f"{path} has no column '{name}'" if name is not None else f"{path} has no column that looks like the {kind}",
        expected=f"a column named {', '.join(usual)}" if name is None else None,
        found=", ".join(f"{field.name} ({field.type})" for field in list(schema)[:20]),
        hint=f"--{kind}-column NAME",
    )


def _check_types(path: Path, schema: Any, image: str, label: str) -> None:
    import pyarrow as pa

    kind = schema.field(image).type
    fields = {kind.field(place).name for place in range(kind.num_fields)} if pa.types.is_struct(kind) else set()
    stored = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    if not (stored or pa.types.is_string(kind) or pa.types.is_large_string(kind) or fields & {"bytes", "path"}):
        raise InputError(
            f"{path}: the column '{image}' holds no images",
            expected="bytes, a struct of bytes and path, or paths as text",
            found=str(kind)[:200],
            hint="--image-column NAME",
        )
    kind = schema.field(label).type
    if not pa.types.is_integer(kind):
        raise InputError(
            f"{path}: the column '{label}' holds no whole numbers",
            expected="an integer type",
            found=str(kind)[:200],
            hint="--label-column NAME, or number the classes first: a Datum's label is an int32",
        )


def _class_names(schema: Any, label: str) -> list[str] | None:
    """Names of the classes, where Hugging Face's library has noted them beside the schema."""
    try:
        about = json.loads((schema.metadata or {})[b"huggingface"])
        names = about["info"]["features"][label]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else None
