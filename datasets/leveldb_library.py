"""plyvel, the library that reads LevelDB: its import, its messages, its limits, and which codecs it was built with."""

from __future__ import annotations

import resource
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from datasets.errors import CodecMissing, SourceError

_PROBE_BYTES = 1 << 16
_FILES_MOST = 1000
_FILES_RESERVE = 128


@cache
def has_snappy() -> bool:
    """Whether this build of LevelDB compresses with Snappy: without it, a table of zeros is written as it is."""
    import plyvel

    with tempfile.TemporaryDirectory(prefix="stallscope-snappy-") as folder:
        db = plyvel.DB(folder, create_if_missing=True, compression="snappy")
        try:
            db.put(b"probe", bytes(_PROBE_BYTES))
            db.compact_range()
        finally:
            db.close()
        return sum(table.stat().st_size for table in Path(folder).glob("*.ldb")) < _PROBE_BYTES // 2


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
        expected="a LevelDB library that can decompress its blocks",
        found=f"{text}, while the checksum is right",
        hint="pip install --force-reinstall 'plyvel>=1.5.1' (its wheels have Snappy), or convert the data to LMDB on a "
        "machine that can read it",
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
