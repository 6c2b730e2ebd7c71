"""The manifest beside a database: what it should hold, so that a cut copy or a flipped bit does not go unnoticed.

``<database>.manifest.json`` lies beside the database, never inside of it: a database stays exactly what Caffe expects.
``<database>.crc32`` holds one CRC-32 a record (uint32, little-endian, in key order). Opening a data set compares the
number of records and the key range (:func:`datasets.source.open_source`); :mod:`datasets.verify` reads everything.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from array import array
from collections import Counter
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from datasets.errors import ManifestMismatch
from datasets.source import manifest_path
from profiler.errors import StallscopeError

SCHEMA = 1
_MOST_LABELS = 1000
"""A histogram of more labels than this is left out."""
_NUMBER = re.compile(rb"\d{1,18}")


@dataclass(frozen=True)
class Manifest:
    """What a database was when it was made.

    Attributes
    ----------
    records: number of records. first_key, last_key: in byte order, as text (bytes that are no UTF-8 escaped).
    key_order: ``numeric`` where byte order is also the order of the numbers at the start of the keys, else ``bytes``.
    content_sha256: over all records in key order, each as length and bytes of key and value (lengths uint32,
        little-endian): the same for an LMDB and a LevelDB with the same records.
    shapes: "CxHxW" to number of records, after decoding. encoded: number of records that hold an image file.
    labels: label (as text) to number of records; None where there are more than 1000 different ones.
    label_range: smallest and largest label. classes: name of each label, where the source has names.
    made_from: hash of all that the records depend on: the source's files, options, versions of libraries; empty where
        that is not known.
    shuffle_seed: None where the source's order was kept. skipped: what of the source is not in here, and why.
    """

    records: int
    backend: str
    first_key: str
    last_key: str
    key_order: str
    content_sha256: str
    shapes: dict[str, int] = field(default_factory=dict)
    encoded: int = 0
    labels: dict[str, int] | None = None
    label_range: tuple[int, int] | None = None
    classes: list[str] | None = None
    source: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    made_from: str = ""
    shuffle_seed: int | None = None
    skipped: list[str] = field(default_factory=list)
    skipped_count: int = 0
    created_by: str = ""
    schema: int = SCHEMA


class Tally:
    """Adds up a manifest while records are written, which must happen in key order."""

    def __init__(self) -> None:
        self.records = 0
        self.first_key = b""
        self.last_key = b""
        self.encoded = 0
        self.shapes: Counter[tuple[int, int, int]] = Counter()
        self.labels: Counter[int] = Counter()
        self.key_order = "numeric"
        self._last_number = -1
        self._crcs = array("I")
        self._hash = hashlib.sha256()

    def add(self, key: bytes, value: bytes, shape: tuple[int, int, int], label: int | None, encoded: bool) -> None:
        if self.records == 0:
            self.first_key = key
        elif key <= self.last_key:
            raise ValueError(f"keys must ascend: {key!r} after {self.last_key!r}")
        self.last_key = key
        self.records += 1
        self.shapes[shape] += 1
        if label is not None:
            self.labels[label] += 1
        number = _NUMBER.match(key)
        if number is None or int(number[0]) < self._last_number:
            self.key_order = "bytes"
        else:
            self._last_number = int(number[0])
        self.encoded += encoded
        self._crcs.append(record_crc(key, value))
        for part in (key, value):
            self._hash.update(len(part).to_bytes(4, "little"))
            self._hash.update(part)

    @property
    def crcs(self) -> NDArray[np.uint32]:
        """uint32[records]"""
        return np.array(self._crcs, "<u4")

    def manifest(self, **about: Any) -> Manifest:
        """The manifest of all records added; ``about`` fills in the fields that records do not tell."""
        few = len(self.labels) <= _MOST_LABELS
        return Manifest(
            records=self.records,
            first_key=key_text(self.first_key),
            last_key=key_text(self.last_key),
            key_order=self.key_order,
            content_sha256=self._hash.hexdigest(),
            shapes={"x".join(map(str, shape)): count for shape, count in sorted(self.shapes.items())},
            encoded=self.encoded,
            labels={str(label): count for label, count in sorted(self.labels.items())} if few else None,
            label_range=(min(self.labels), max(self.labels)) if self.labels else None,
            created_by=_created_by(),
            **about,
        )


def record_crc(key: bytes, value: bytes) -> int:
    """CRC-32 of the bytes of the key followed by those of the value."""
    return zlib.crc32(value, zlib.crc32(key))


def key_text(key: bytes) -> str:
    return key.decode("utf-8", "backslashreplace")


def checksum_path(path: str | os.PathLike[str]) -> Path:
    """Where the checksums of a database lie."""
    beside = manifest_path(path)
    return beside.with_name(beside.name.removesuffix(".manifest.json") + ".crc32")


def write_manifest(path: str | os.PathLike[str], manifest: Manifest, crcs: NDArray[np.uint32]) -> None:
    """Write manifest and checksums of the database at ``path``; each file appears whole or not at all.

    The manifest comes last, so where there is a manifest there are checksums. Raises :class:`StallscopeError`.
    """
    write_whole(checksum_path(path), crcs.astype("<u4").tobytes())
    text = json.dumps(asdict(manifest), indent=1, ensure_ascii=False) + "\n"
    # What is left of a name that is no UTF-8 becomes an escape of JSON, and the same name again when it is read.
    write_whole(manifest_path(path), text.encode("utf-8", "backslashreplace"))


def remove_manifest(path: str | os.PathLike[str]) -> None:
    """Remove manifest and checksums, where they exist."""
    for place in (manifest_path(path), checksum_path(path)):
        place.unlink(missing_ok=True)


def read_manifest(path: str | os.PathLike[str]) -> Manifest | None:
    """The manifest of the database at ``path``, or None where there is none.

    Raises :class:`datasets.errors.ManifestMismatch` for a file that is no manifest or of a newer schema.
    """
    place = manifest_path(path)
    try:
        text = place.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StallscopeError(f"the manifest {place} cannot be read: {error.strerror}") from error
    try:
        document = json.loads(text)
        if document["schema"] > SCHEMA:
            raise ManifestMismatch(
                f"{place} was written by a newer version", expected=f"schema {SCHEMA}", found=document["schema"]
            )
        known = {name: value for name, value in document.items() if name in Manifest.__dataclass_fields__}
        if known.get("label_range") is not None:
            known["label_range"] = tuple(known["label_range"])
        return Manifest(**known)
    except (ValueError, KeyError, TypeError) as error:
        raise ManifestMismatch(
            f"{place} is not a manifest of a data set",
            found=str(error),
            hint="make it again by converting again, or remove it to read the data set unchecked",
        ) from error


def read_checksums(path: str | os.PathLike[str]) -> NDArray[np.uint32] | None:
    """uint32[records], one CRC-32 a record in key order, or None where the file is missing."""
    try:
        stored = checksum_path(path).read_bytes()
    except FileNotFoundError:
        return None
    if len(stored) % 4:
        raise ManifestMismatch(f"{checksum_path(path)} is cut", expected="a multiple of 4 bytes", found=len(stored))
    return np.frombuffer(stored, "<u4")


def write_whole(place: Path, content: bytes) -> None:
    """Write a file that appears whole or not at all. Raises :class:`StallscopeError`."""
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, place)
    except OSError as error:
        raise StallscopeError(f"{place} cannot be written: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _created_by() -> str:
    try:
        return f"stallscope {metadata.version('stallscope')}"
    except metadata.PackageNotFoundError:
        return "stallscope"  # run from a checkout that is not installed
