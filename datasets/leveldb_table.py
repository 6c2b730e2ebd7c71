"""A table of a LevelDB, read by plain reads: nothing is mapped, so a cut file is a short read and never a SIGBUS."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from datasets import leveldb_block
from datasets.leveldb_block import FOOTER, TAG, TRAILER, BlockDamaged, Handle


class Version(NamedTuple):
    """That a key was written: the user's key, the sequence number, and whether it was deleted then."""

    key: bytes
    sequence: int
    deleted: bool


class Cut(Exception):
    """A file has become shorter: it ends before a block that its index names. found: bytes that it has."""

    def __init__(self, file: str, found: int) -> None:
        super().__init__(file, found)
        self.file, self.found = file, found


class Damaged(Exception):
    """A block cannot be used. file, start: where it lies. reason: what is wrong; unknown_codec: and nothing else is."""

    def __init__(self, file: str, start: int, reason: str, unknown_codec: bool = False) -> None:
        super().__init__(file, start, reason)
        self.file, self.start, self.reason, self.unknown_codec = file, start, reason, unknown_codec


class Table:
    """One table, open.

    Parameters
    ----------
    path: of the file. nbytes: its size, as its manifest gives it.

    Raises :class:`Damaged`, :class:`Cut` and OSError, here and in every call.
    """

    def __init__(self, path: str, nbytes: int) -> None:
        self.file = os.path.basename(path)
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._lasts: list[bytes] = []
            self._blocks: list[Handle] = []
            self._read_index(nbytes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def place(self, key: bytes) -> Handle | None:
        """Where the block lies that holds a key, if the table has it."""
        number = bisect_left(self._lasts, key)
        return self._blocks[number] if number < len(self._blocks) else None

    def stored(self, place: Handle) -> bytes:
        """A block as it lies in the file, with what stands behind it; not verified."""
        size = place.size + TRAILER
        stored = os.pread(self.fd, size, place.start)
        while 0 < len(stored) < size and (more := os.pread(self.fd, size - len(stored), place.start + len(stored))):
            stored += more
        if len(stored) < size:
            raise Cut(self.file, os.fstat(self.fd).st_size)
        return stored

    def block(self, place: Handle) -> bytes:
        """The content of a block, its checksum verified."""
        stored = self.stored(place)
        self.verify(stored, place)
        return self.opened(stored, place)

    def verify(self, stored: bytes, place: Handle) -> None:
        """Raise :class:`Damaged` where a block has not the checksum that was written."""
        if not leveldb_block.sound(stored):
            raise Damaged(self.file, place.start, "block checksum mismatch")

    def opened(self, stored: bytes, place: Handle) -> bytes:
        """The content of a block that has been verified."""
        try:
            return leveldb_block.content(stored)
        except BlockDamaged as error:
            raise Damaged(self.file, place.start, str(error)) from error
        except leveldb_block.CodecUnknown as error:
            raise Damaged(self.file, place.start, str(error), unknown_codec=True) from error

    def find(self, block: bytes, place: Handle, key: bytes) -> tuple[Version, bytes] | None:
        """The newest version of a key in the block that :meth:`place` named, and its value."""
        try:
            entry = leveldb_block.seek(block, key)
        except BlockDamaged as error:
            raise Damaged(self.file, place.start, str(error)) from error
        return None if entry is None else (_version(entry), block[entry.start : entry.end])

    def versions(self, start: bytes = b"") -> Iterator[Version]:
        """All that the table holds from a key on, in the order of the keys; of one key the newest first."""
        for place in self._blocks[bisect_left(self._lasts, start) :]:
            block = self.block(place)
            try:
                for entry in leveldb_block.entries(block):
                    if entry.key[:-TAG] >= start:
                        yield _version(entry)
            except BlockDamaged as error:
                raise Damaged(self.file, place.start, str(error)) from error

    def _read_index(self, nbytes: int) -> None:
        try:
            end = Handle(max(0, nbytes - FOOTER), FOOTER - TRAILER)
            place = leveldb_block.footer(self.stored(end))
        except BlockDamaged as error:
            raise Damaged(self.file, max(0, nbytes - FOOTER), str(error)) from error
        if place.start + place.size + TRAILER > nbytes:
            raise Damaged(self.file, place.start, "the index lies beyond the end")
        stored = self.stored(place)
        if not leveldb_block.sound(stored):
            raise Damaged(self.file, place.start, "checksum mismatch in the index: none of its keys can be found")
        index = self.opened(stored, place)
        try:
            for entry in leveldb_block.entries(index):
                block, _ = leveldb_block.handle(index[entry.start : entry.end])
                self._lasts.append(entry.key[:-TAG])
                self._blocks.append(block)
        except (BlockDamaged, IndexError) as error:
            raise Damaged(self.file, place.start, f"the index cannot be understood: {error}") from error


def _version(entry: leveldb_block.Entry) -> Version:
    tag = int.from_bytes(entry.key[-TAG:], "little")
    return Version(entry.key[:-TAG], tag >> 8, tag & 0xFF == 0)
