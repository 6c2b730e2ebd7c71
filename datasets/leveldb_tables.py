"""Where a LevelDB is damaged: the checksums of its tables and logs, block by block.

LevelDB says ``block checksum mismatch`` and no more. What a person needs is the file, the place and the keys that are
gone, so after such an error the files are read once more here. The formats: ``doc/table_format.md`` and
``doc/log_format.md`` of LevelDB.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from datasets import leveldb_block
from datasets.leveldb_log import cut_end, fragment_sound, log_fragments


@dataclass(frozen=True, slots=True)
class BadBlock:
    """A part of a file that fails its check.

    Attributes
    ----------
    place: file and byte. reason: what is wrong.
    upto: a key at or after the last one of the block; empty where it is not one block that is damaged.
    """

    place: str
    reason: str
    upto: bytes = b""


def bad_blocks(table: Path) -> list[BadBlock]:
    """The damaged blocks of a table (``.ldb`` or ``.sst``), in key order."""
    try:
        whole = table.read_bytes()
        index = leveldb_block.footer(whole[-leveldb_block.FOOTER :])
        if not _sound(whole, index):
            return [
                BadBlock(
                    f"{table.name}, byte {index.start}", "checksum mismatch in the index: none of its keys can be found"
                )
            ]
        stored = whole[index.start : index.start + index.size + leveldb_block.TRAILER]
        block = leveldb_block.content(stored)
        found = []
        for key, start, end in leveldb_block.entries(block):
            place, _ = leveldb_block.handle(block[start:end])
            if not _sound(whole, place):
                found.append(
                    BadBlock(f"{table.name}, byte {place.start}", "block checksum mismatch", key[: -leveldb_block.TAG])
                )
        return found
    except leveldb_block.BlockDamaged as error:
        return [BadBlock(table.name, str(error))]
    except (IndexError, ValueError, OSError) as error:
        return [BadBlock(table.name, f"cannot be understood: {error}")]


def bad_log(log: Path) -> list[BadBlock]:
    """What LevelDB leaves out of a write-ahead log without a word: a cut end, or records that fail their checksum."""
    content = log.read_bytes()
    found: list[BadBlock] = []
    try:
        for start, _, payload in log_fragments(content):
            if not fragment_sound(content, start, len(payload)):
                found.append(BadBlock(f"{log.name}, byte {start}", "checksum mismatch in the write-ahead log"))
        end = cut_end(content)
    except ValueError as error:
        return [*found, BadBlock(log.name, f"cannot be understood: {error}")]
    if end is not None:
        found.append(
            BadBlock(
                f"{log.name}, byte {end}",
                f"the write-ahead log of {len(content)} bytes ends inside a record: cut by a copy or a kill; "
                "what followed is lost",
            )
        )
    return found


def _sound(whole: bytes, place: leveldb_block.Handle) -> bool:
    end = place.start + place.size + leveldb_block.TRAILER
    return end <= len(whole) and leveldb_block.sound(memoryview(whole)[place.start : end])
