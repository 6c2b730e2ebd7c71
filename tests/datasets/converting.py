"""Running the converter in tests, and looking at what it made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image

from datasets import convert, writer
from datasets.manifest import read_checksums, read_manifest, record_crc
from datasets.source import Record, Source, open_source

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
IDX = DATA / "mnist" / "t10k-images-idx3-ubyte.gz"


def run(*arguments: object) -> int:
    return convert.main([str(argument) for argument in arguments])


def records(path: Path) -> list[Record]:
    with open_source(path) as source:
        return source.read_many(range(len(source)))


def pairs(path: Path) -> list[tuple[bytes, bytes]]:
    return [(record.key, record.value) for record in records(path)]


def picture(path: Path, colour: tuple[int, ...] | int = (255, 0, 0), mode: str = "RGB", size=(6, 4)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)
    return path


def damaged(source: Source) -> list[int]:
    """Records whose bytes are not those that the converter wrote, by the checksums beside the database."""
    crcs = read_checksums(source.path)
    assert crcs is not None
    assert len(crcs) == len(source)
    stored = source.read_many(range(len(source)))
    return [record.index for record in stored if record_crc(record.key, record.value) != crcs[record.index]]


def facts(out: Path) -> tuple[Any, ...]:
    """Everything about a database that must not depend on interruptions."""
    crcs = read_checksums(out)
    assert crcs is not None
    return pairs(out), read_manifest(out), crcs.tolist()


class writer_of:
    """The writer's view of a database that a killed run left; None where it had not come so far."""

    def __init__(self, backend: str, folder: Path) -> None:
        files = list(folder.glob("*")) if folder.exists() else []
        self._writer = writer.WRITERS[backend](folder) if files else None

    def __enter__(self) -> writer.Writer | None:
        return self._writer

    def __exit__(self, *error: object) -> None:
        if self._writer is not None:
            self._writer.abandon()
