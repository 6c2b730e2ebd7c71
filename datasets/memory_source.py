"""Records that lie in memory: synthetic images, and another source's records held for measurements without storage.

Both have a specification in text, so that a configuration can name them where it names a path::

    memory:records=1000,shape=3x32x32,classes=10,seed=1         raw Datum records (all parts may be left out)
    memory:records=1000,shape=3x224x224,encoding=jpeg,quality=90
    memory:cached:/data/train_lmdb                              everything from /data/train_lmdb, read once
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np

from datasets import datum
from datasets.source import MEMORY_PREFIX, Record, Source, open_source
from profiler.errors import UsageError

_MAX_BYTES = 8 << 30
_CACHED = "cached:"
_CHUNK = 256


@dataclass(frozen=True, slots=True)
class Synthetic:
    """What synthetic records look like; a pure function of these fields gives the bytes of every record.

    Attributes
    ----------
    records, channels, height, width, classes: sizes. Labels are drawn evenly from 0 .. classes - 1.
    seed: of pictures and labels.
    encoding: ``raw`` (uint8 pixels) or ``jpeg`` (an image file, bytes as simplejpeg writes them).
    quality: of the JPEG, 1..100.
    """

    records: int = 1000
    channels: int = 3
    height: int = 32
    width: int = 32
    classes: int = 10
    seed: int = 1
    encoding: str = "raw"
    quality: int = 90

    def __post_init__(self) -> None:
        for name, least, most in (
            ("records", 1, 10**8), ("channels", 1, 1024), ("height", 1, 65500), ("width", 1, 65500),
            ("classes", 1, 2**31 - 1), ("seed", 0, 2**64 - 1), ("quality", 1, 100),
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= most:
                raise UsageError(f"synthetic records: {name} is out of range", expected=f"{least}..{most}", found=value)
        if self.encoding not in ("raw", "jpeg"):
            raise UsageError("synthetic records: unknown encoding", expected="raw or jpeg", found=self.encoding)
        if self.encoding == "jpeg" and self.channels not in (1, 3):
            raise UsageError("a JPEG has 1 or 3 channels", expected="shape 1xHxW or 3xHxW", found=self.channels)


class SyntheticSource(Source):
    """Images made up when read: a pattern for each class under noise, so that a net has something to learn."""

    backend = "memory"

    def __init__(self, spec: Synthetic) -> None:
        self.spec = spec
        self.path = (
            f"{MEMORY_PREFIX}records={spec.records},shape={spec.channels}x{spec.height}x{spec.width},"
            f"classes={spec.classes},seed={spec.seed},encoding={spec.encoding}"
        )
        if spec.encoding == "jpeg":
            self.path += f",quality={spec.quality}"

    def __len__(self) -> int:
        return self.spec.records

    def key(self, index: int) -> bytes:
        return b"%08d" % self._check_index(index)

    def read(self, index: int) -> Record:
        key = self.key(index)
        spec = self.spec
        noise = _draw(spec.seed, 0, index)
        label = int(noise.integers(spec.classes))
        shape = (spec.channels, spec.height, spec.width)
        # Integers only, so that no machine rounds differently: three parts pattern, one part noise.
        image = _pattern(spec.seed, label, shape).astype(np.uint16) * 3
        image += noise.integers(0, 256, shape, dtype=np.uint8)
        pixels = (image >> 2).astype(np.uint8)
        if spec.encoding == "jpeg":
            import simplejpeg

            rows = np.ascontiguousarray(pixels.transpose(1, 2, 0))
            colorspace = "BGR" if spec.channels == 3 else "GRAY"
            file = simplejpeg.encode_jpeg(rows, quality=spec.quality, colorspace=colorspace, fastdct=False)
            value = datum.serialize(data=file, label=label, encoded=True)
        else:
            value = datum.serialize(
                channels=spec.channels, height=spec.height, width=spec.width, data=pixels.tobytes(), label=label
            )
        return Record(int(index), key, value, self.name)

    def identity(self) -> dict[str, Any]:
        return {"path": self.path, "backend": self.backend, "db": None, **asdict(self.spec)}

    def close(self) -> None:
        """There is nothing to give back."""


class CachedSource(Source):
    """All records of another source, read once per process at first use.

    Keys, records and order are those of the other source. Pickling takes the other source along, not the records.
    """

    backend = "memory"

    def __init__(self, source: Source, max_bytes: int = _MAX_BYTES) -> None:
        self.source = source
        self.path = f"{MEMORY_PREFIX}{_CACHED}{source.path}"
        self.max_bytes = max_bytes
        self._records: list[Record] | None = None

    def __len__(self) -> int:
        return len(self.source)

    def key(self, index: int) -> bytes:
        return self._loaded()[self._check_index(index)].key

    def read(self, index: int) -> Record:
        return self._loaded()[self._check_index(index)]

    def identity(self) -> dict[str, Any]:
        return self.source.identity() | {"path": self.path, "backend": self.backend, "cached": self.source.backend}

    def close(self) -> None:
        self._records = None
        self.source.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source, "path": self.path, "max_bytes": self.max_bytes, "_records": None}

    def _loaded(self) -> list[Record]:
        if self._records is None:
            held: list[Record] = []
            nbytes = 0
            total = len(self.source)
            for start in range(0, total, _CHUNK):
                held += self.source.read_many(range(start, min(start + _CHUNK, total)))
                nbytes += sum(len(record.value) + len(record.key) for record in held[start:])
                if nbytes > self.max_bytes:
                    raise UsageError(
                        f"{self.source.name} is too large to be held in memory",
                        expected=f"at most {self.max_bytes:,} bytes",
                        found=f"more than that in the first {len(held):,} of {total:,} records",
                        hint="read it from storage: the system's page cache keeps what fits",
                    )
            self._records = held
        return self._records


def cached(source: Source, max_bytes: int = _MAX_BYTES) -> CachedSource:
    """Hold the records of ``source`` in memory; refuses (UsageError, at first use) more than ``max_bytes``."""
    return CachedSource(source, max_bytes)


def open_memory(text: str) -> Source:
    """Open a specification that begins with ``memory:``; see the module's text for its forms.

    Raises
    ------
    UsageError: a part of it is unknown or out of range. Whatever :func:`open_source` raises for a cached path.
    """
    rest = text.removeprefix(MEMORY_PREFIX)
    if rest.startswith(_CACHED):
        path = rest.removeprefix(_CACHED)
        if path.startswith(MEMORY_PREFIX + _CACHED):
            raise UsageError("a cached source need not be cached again", found=text)
        return cached(open_source(path))
    parts: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or name in parts:
            raise UsageError(f"'{text}' cannot be understood", expected="name=value, each once", found=part)
        parts[name] = value
    return SyntheticSource(Synthetic(**_typed(parts, text)))


def _typed(parts: dict[str, Any], text: str) -> dict[str, Any]:
    typed: dict[str, Any] = {}
    for name, value in parts.items():
        try:
            if name == "shape":
                typed["channels"], typed["height"], typed["width"] = map(int, value.lower().split("x"))
            elif name == "encoding":
                typed[name] = value
            elif name in ("records", "classes", "seed", "quality"):
                typed[name] = int(value)
            else:
                raise UsageError(
                    f"'{text}' cannot be understood",
                    expected="records, shape, classes, seed, encoding, quality; or memory:cached:<path>",
                    found=name,
                )
        except ValueError:
            kind = "CxHxW, such as 3x32x32" if name == "shape" else "a whole number"
            raise UsageError(f"'{text}' cannot be understood", expected=f"{name}={kind}", found=value) from None
    return typed


def _draw(seed: int, stream: int, number: int) -> np.random.Generator:
    words = np.array([seed, stream, 0, 0, 0, number], np.uint64)
    return np.random.Generator(np.random.Philox(key=words[:2], counter=words[2:]))


@lru_cache(maxsize=64)
def _pattern(seed: int, label: int, shape: tuple[int, int, int]) -> np.ndarray:
    """uint8[C, H, W]: blocks of an eighth of the picture, drawn from (seed, label)."""
    draw = _draw(seed, 1, label)
    channels, height, width = shape
    coarse = draw.integers(0, 256, (channels, min(8, height), min(8, width)), dtype=np.uint8)
    rows = np.arange(height) * coarse.shape[1] // height
    columns = np.arange(width) * coarse.shape[2] // width
    pattern = cast(np.ndarray, coarse[:, rows[:, None], columns[None, :]])
    pattern.flags.writeable = False
    return pattern
