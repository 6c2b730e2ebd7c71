"""Running the converter in tests, and looking at what it made."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from datasets import convert
from datasets.source import Record, open_source

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
