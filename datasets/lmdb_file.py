"""The file of an LMDB, read at positions and not mapped: a cut file gives short reads, and no signal.

A descriptor and numbers are all there is to it, so it may be used on both sides of a fork, and by any number of
processes. The format (64-bit, little-endian): ``lmdb.h`` and ``mdb.c`` of LMDB 0.9.
"""

from __future__ import annotations

import os
import stat
import struct
from dataclasses import dataclass, replace

from datasets.errors import DatasetCorrupt, DatasetTruncated, NotADataset, SourceError

HEADER = 16
"""Bytes before the content of a page: number u64, pad u16, flags u16, lower u16, upper u16."""
BRANCH, LEAF, OVERFLOW, META = 1, 2, 4, 8
KINDS = 0x6F
"""The flags of a page that say what it is."""
BIGDATA, SUBDATA = 1, 2  # flags of a node
NO_PAGE = 2**64 - 1
_REVERSEKEY, _DUPSORT, _INTEGERKEY = 2, 4, 8  # flags of a database
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_MARK = _MAGIC.to_bytes(4, "little")
_OTHER_VERSIONS = (2, 3, 999)  # LMDB 1.0, and what its developers use
_META_BYTES = 136
_TRANSACTION = HEADER + 128  # byte of a meta page: u64
_NOWHERE = 1 << 62
_AT_ONCE = 1 << 20
_LEAST_PAGE = 4096  # of memory
_PAGE_SIZES = (4096, 8192, 16384, 32768, 65536, 512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class Tree:
    """One database inside the file. pages: branch, leaf and overflow pages by its own count."""

    flags: int
    entries: int
    root: int
    pages: int


@dataclass(frozen=True, slots=True)
class Meta:
    """What the newer of the two meta pages says. doubt: the other one, where it cannot be read."""

    page_size: int
    last_page: int
    transaction: int
    main: Tree
    doubt: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the file by this page count."""
        return (self.last_page + 1) * self.page_size


def data_file(path: str) -> str:
    """The file that holds the pages of the LMDB at ``path``, a folder or a file."""
    return os.path.join(path, "data.mdb") if os.path.isdir(path) else path


class LmdbFile:
    """An open data file. Reads are plain and leave no state behind; ``close`` is idempotent.

    Parameters
    ----------
    path: folder or file of the LMDB. name: as errors show it.
    """

    def __init__(self, path: str, name: str) -> None:
        self.path = data_file(path)
        self.folder = self.path != path
        self.name = name
        self.fd = -1
        try:
            if not stat.S_ISREG(os.stat(self.path).st_mode):
                raise NotADataset(f"{self.path} is not a regular file", hint="name the folder or file of an LMDB")
            self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(
                f"{name} cannot be read: {error.strerror}",
                found=error.filename,
                hint="check the mode of the file and of the folders above it",
            ) from error

    @property
    def size(self) -> int:
        """Bytes of the file now. (A seek is the cheapest way to ask, and nothing here reads from where it leads to.)"""
        return os.lseek(self.fd, 0, os.SEEK_END)

    def read(self, start: int, size: int) -> bytes:
        """``size`` bytes from ``start``; fewer where the file ends."""
        if start >= _NOWHERE:
            return b""
        try:
            if size > _AT_ONCE:  # the number may be damage: memory for no more than there is
                size = min(size, max(self.size - start, 0))
            part = os.pread(self.fd, size, start)
            if 0 < len(part) < size:  # the end of the file, or more than the system gives in one call (2 GiB)
                parts = [part]
                while part := os.pread(self.fd, size - sum(map(len, parts)), start + sum(map(len, parts))):
                    parts.append(part)
                return b"".join(parts)
            return part
        except OSError as error:
            raise DatasetCorrupt(
                f"{self.name} cannot be read at byte {start}", found=error.strerror, hint="a failing disk, most likely"
            ) from error

    def meta(self) -> Meta:
        """The newer meta page. Raises :class:`NotADataset` where there is none.

        Where one of the two cannot be read, what the other says: ``doubt`` tells it, and its state may be an older one.
        """
        head = self.read(0, HEADER + _META_BYTES)
        self._refuse_others(head)
        first = _meta(head)
        sizes = (first.page_size,) if first else _PAGE_SIZES
        second = next((meta for size in sizes if (meta := _meta(self.read(size, HEADER + _META_BYTES)))), None)
        found = [meta for meta in (first, second) if meta is not None]
        if not found:
            raise NotADataset(
                f"{self.path} has no readable meta page of an LMDB",
                expected=f"the mark {_MAGIC:#x} and format version {_VERSION} on its first or second page",
                found=f"{self.size} bytes that begin {head[16:24].hex(' ') or 'nowhere'}",
                hint="a file of another kind, or one whose beginning is lost: copy it again",
            )
        newer = max(found, key=lambda meta: meta.transaction)
        return newer if len(found) == 2 else replace(newer, doubt=f"meta page {0 if first is None else 1}")

    def transaction(self, page_size: int) -> int | None:
        """Number of the last committed transaction; None where the file no longer reaches so far."""
        found = self.read(_TRANSACTION, page_size + 8)  # one call costs less than two, however short
        if len(found) < page_size + 8:
            return None
        return max(int.from_bytes(found[:8], "little"), int.from_bytes(found[-8:], "little"))

    def check_header(self) -> None:
        """Refuse what is no LMDB, what ends before its second page, and what lacks one of its two meta pages."""
        size = self.size
        try:
            head = os.pread(self.fd, HEADER + _META_BYTES, 0)
        except OSError as error:
            raise SourceError(f"{self.name} cannot be read: {error.strerror}", found=self.path) from error
        self._refuse_others(head)
        page = int.from_bytes(head[40:44], "little")
        if len(head) >= 20 and head[16:20] != _MARK and not any(map(self._has_mark, _PAGE_SIZES)):
            raise NotADataset(
                f"{self.path} is not an LMDB", expected="the LMDB mark at byte 16", found=head[16:20].hex(" ")
            )
        if size < 2 * max(page, 256):
            raise DatasetTruncated(
                f"{self.path} is too short for an LMDB",
                expected=f"at least 2 pages of {page} bytes" if page else "at least 2 pages",
                found=f"{size} bytes",
                hint="an interrupted copy, most likely: copy it again",
            )
        doubt = self.meta().doubt
        if doubt:  # the library refuses it as well: what the other page leads to may be older than the last commit
            raise DatasetCorrupt(
                f"{self.name} is damaged: {doubt} cannot be read",
                expected="two meta pages",
                found="one, which may be older than the last commit",
                hint=f"copy it again from where it was made; python -m datasets.verify {self.path} reads what the "
                "other one leads to, and with --salvage OUT saves it",
            )

    def _has_mark(self, start: int) -> bool:
        return self.read(start + HEADER, 4) == _MARK

    def _refuse_others(self, head: bytes) -> None:
        """Refuse the formats of other machines and versions, by name."""
        for found, what, hint in (
            (head[16:20] == _MARK[::-1], "was written on a big-endian machine", "convert it there"),
            (head[12:16] in (_MARK, _MARK[::-1]), "was written by a 32-bit program", "copy it with a 64-bit one there"),
        ):
            if found:
                raise NotADataset(
                    f"{self.path} {what}", expected="an LMDB of a 64-bit little-endian machine",
                    hint=f"LMDB's files are those of one kind of machine: {hint} (mdb_dump there, mdb_load here)",
                )  # fmt: skip
        version = int.from_bytes(head[20:24], "little")
        if head[16:20] == _MARK and version in _OTHER_VERSIONS:
            raise NotADataset(
                f"{self.path} has the format of another LMDB",
                expected=f"format version {_VERSION} (LMDB 0.9)",
                found=f"version {version}",
                hint="mdb_dump with the version that wrote it, mdb_load with LMDB 0.9",
            )

    def read_ahead(self, wanted: bool) -> None:
        """Tell the system whether it should read ahead of what is asked for."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_NORMAL if wanted else os.POSIX_FADV_RANDOM)

    def announce(self, starts: list[int], sizes: list[int]) -> int:
        """Tell the system that these bytes will be asked for. Returns how many: less than a page is not announced."""
        told = 0
        if hasattr(os, "posix_fadvise"):
            for start, size in zip(starts, sizes, strict=True):
                if size >= _LEAST_PAGE:
                    os.posix_fadvise(self.fd, start, size, os.POSIX_FADV_WILLNEED)
                    told += size
        return told

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> LmdbFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_order(tree: Tree, name: str) -> None:
    """Refuse databases whose records are not found by one key each, in the byte order of the keys."""
    if tree.flags & _DUPSORT:
        raise NotADataset(f"{name} holds several values per key", expected="one record per key")
    if tree.flags & (_REVERSEKEY | _INTEGERKEY):
        kind = "from their last byte (MDB_REVERSEKEY)" if tree.flags & _REVERSEKEY else "as integers (MDB_INTEGERKEY)"
        raise NotADataset(
            f"{name} orders its keys {kind}",
            expected="keys in byte order",
            hint="copy the records to a new database, under keys that are padded numbers",
        )


def tree_of(stored: bytes) -> Tree:
    """The database that these 48 bytes describe."""
    flags, branches, leaves, overflow, entries, root = struct.unpack("<4xH2x5Q", stored)
    return Tree(flags, entries, root, branches + leaves + overflow)


def _meta(page: bytes) -> Meta | None:
    if len(page) < HEADER + _META_BYTES:
        return None
    magic, version = struct.unpack_from("<II", page, HEADER)
    if magic != _MAGIC or version != _VERSION:
        return None
    page_size = int.from_bytes(page[40:44], "little")
    if page_size not in _PAGE_SIZES:
        return None
    last_page, transaction = struct.unpack_from("<QQ", page, 136)
    return Meta(page_size, last_page, transaction, tree_of(page[88:136]))
