"""plyvel, the library that reads LevelDB: its import, its messages, its limits, and which codecs it was built with."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterable
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

from datasets.errors import CodecMissing, SourceError
from datasets.leveldb_log import varint

_PROBE_BYTES = 1 << 16
_FOOTER = 48
_SNAPPY = 1
_LOOKED_AT = 64
_EXPECTED = "a LevelDB library that can decompress its blocks"
_HINT = (
    "pip install --force-reinstall 'plyvel>=1.5.1' (its wheels have Snappy), or convert the data to LMDB on a machine "
    "that can read it"
)
_FILES_MOST = 1000
_FILES_RESERVE = 128


@cache
def has_snappy() -> bool:
    """Whether this build of LevelDB compresses with Snappy: without it, a table of zeros is written as it is.

    Tried once a process, by writing a tiny database and reading it back. True where that cannot be tried.
    """
    import plyvel

    written = bytes(_PROBE_BYTES)
    try:
        with tempfile.TemporaryDirectory(prefix="stallscope-snappy-") as folder:
            db = plyvel.DB(folder, create_if_missing=True, compression="snappy")
            try:
                db.put(b"probe", written)
                db.compact_range()
                read = db.get(b"probe", verify_checksums=True)
            except plyvel.CorruptionError:
                return False
            finally:
                db.close()
            stored = sum(table.stat().st_size for table in Path(folder).glob("*.ldb"))
    except (OSError, plyvel.IOError):
        return True
    return read == written and stored < _PROBE_BYTES // 2


def refuse_without_codec(name: str, tables: Iterable[Path]) -> None:
    """Raise :class:`CodecMissing` where tables hold blocks that this build of LevelDB cannot decompress.

    Looks at one or two blocks of some tables (a few small reads each) and tries the codec once a process, only where
    one of them is compressed. Tables with damage are left to be read, and called damaged. What is not seen here
    is told at the block's first read (:func:`codec_missing`).
    """
    compressed = ((table, place) for table in islice(tables, _LOOKED_AT) if (place := _snappy_block(table)) is not None)
    first = next(compressed, None)
    if first is None or has_snappy():
        return
    from datasets.leveldb_tables import bad_blocks  # compiles a kernel: only where the codec is missing

    for table, place in chain((first,), compressed):
        if not bad_blocks(table):
            raise CodecMissing(
                f"{name} cannot be read: this build of plyvel lacks Snappy",
                expected=_EXPECTED,
                found=f"blocks compressed with Snappy, such as that at byte {place} of {table.name}, "
                "where the checksum is right",
                hint=_HINT,
            )


def _snappy_block(table: Path) -> int | None:
    """Place of a block compressed with Snappy: the index of a table, or its first data block. None for a table
    without, and for one that cannot be understood: whoever reads it is told why."""
    try:
        with open(table, "rb") as file:
            end = file.seek(-_FOOTER, os.SEEK_END)
            footer = file.read(_FOOTER)
            _, position = _handle(footer, 0)  # of the block about other blocks
            (start, size), _ = _handle(footer, position)
            if start + size > end:
                return None
            file.seek(start)
            stored = file.read(size + 1)
            if stored[-1] == _SNAPPY:
                return start
            if stored[-1] != 0:
                return None
            _, position = varint(stored, 0)  # an entry: bytes shared with the key before, sizes of key and value, both
            key, position = varint(stored, position)
            _, position = varint(stored, position)
            (start, size), _ = _handle(stored, position + key)
            file.seek(start + size)
            return start if file.read(1) == bytes([_SNAPPY]) else None
    except (OSError, ValueError, IndexError, OverflowError):
        return None


def _handle(stored: bytes, position: int) -> tuple[tuple[int, int], int]:
    """(place and size of a block) and the position behind it."""
    start, position = varint(stored, position)
    size, position = varint(stored, position)
    return (start, size), position


def codec_missing(name: str, text: str) -> CodecMissing | None:
    """The error to raise for LevelDB's message ``text``, where the codec and not the data is to blame.

    Checksums are verified before a block is decompressed, so one that comes this far is as it was written.
    """
    if "corrupted compressed block" in text and not has_snappy():
        lacks = "Snappy"
    elif "bad block type" in text:
        lacks = "a codec other than Snappy (Zstandard, most likely)"
    else:
        return None
    return CodecMissing(
        f"{name} is sound, but this build of plyvel lacks {lacks}",
        expected=_EXPECTED,
        found=f"{text}, while the checksum is right",
        hint=_HINT,
    )


def error_text(error: Exception) -> str:
    """plyvel's messages are bytes."""
    text = error.args[0] if error.args else ""
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)


def open_files_limit() -> int:
    """How many tables LevelDB may keep open under this process's limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _FILES_MOST
    return max(16, min(_FILES_MOST, soft - _FILES_RESERVE))


def import_plyvel(name: str) -> Any:
    """The module, or a :class:`SourceError` that says how to get it."""
    try:
        import plyvel
    except ImportError as error:
        raise SourceError(
            f"reading {name} needs the package 'plyvel', which is not installed",
            found=str(error),
            hint="pip install 'plyvel>=1.5.1' (it has wheels for Python 3.11 and 3.12), or convert the data to LMDB",
        ) from error
    return plyvel
