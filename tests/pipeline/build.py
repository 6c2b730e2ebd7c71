"""Databases and images that tests make: small, real, and wrong in the way that the test is about."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from PIL import Image

from datasets import caffe_pb2, datum


def write_lmdb(folder: Path, values: Iterable[bytes], keys: Iterable[bytes] | None = None) -> str:
    """An LMDB of these values in this order; keys are ``00000000_name`` unless given. Returns its path."""
    values = list(values)
    names = [b"%08d_img" % i for i in range(len(values))] if keys is None else list(keys)
    folder.mkdir(parents=True, exist_ok=True)
    with lmdb.open(str(folder), map_size=64 << 20, lock=False) as env, env.begin(write=True) as txn:
        for name, value in zip(names, values, strict=True):
            txn.put(name, value)
    return str(folder)


def write_leveldb(folder: Path, values: Iterable[bytes]) -> str:
    """A LevelDB with the keys of :func:`write_lmdb`."""
    import plyvel

    db = plyvel.DB(str(folder), create_if_missing=True)
    for i, value in enumerate(values):
        db.put(b"%08d_img" % i, value)
    db.close()
    return str(folder)


def picture(seed: int, shape: tuple[int, int, int]) -> np.ndarray:
    """uint8[C, H, W] of noise."""
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def raw(image: np.ndarray, label: int | None, **more: Any) -> bytes:
    """A record with raw pixels."""
    channels, height, width = image.shape
    return datum.serialize(channels=channels, height=height, width=width, data=image.tobytes(), label=label, **more)


def encoded(image: np.ndarray, label: int | None, kind: str = "JPEG") -> bytes:
    """A record with an image file; ``image`` is BGR or gray."""
    return datum.serialize(data=image_file(image, kind), label=label, encoded=True)


def image_file(image: np.ndarray, kind: str = "JPEG") -> bytes:
    rows = image[0] if len(image) == 1 else np.ascontiguousarray(image[::-1].transpose(1, 2, 0))
    file = io.BytesIO()
    Image.fromarray(rows).save(file, kind)
    return file.getvalue()


def write_mean(path: Path, image: np.ndarray) -> str:
    """A mean image as Caffe's tool writes it, with the dimensions as they are."""
    blob = caffe_pb2.BlobProto(num=1, data=image.ravel().tolist())
    blob.channels, blob.height, blob.width = image.shape
    path.write_bytes(blob.SerializeToString())
    return str(path)


def photos(folder: Path) -> Path:
    """The 24 image files behind ``crops24_encoded_native_lmdb`` as files, and Caffe's list of them: ``list.txt``."""
    from datasets.source import open_source

    with open_source("tests/data/db/crops24_encoded_native_lmdb") as source:
        for index in range(len(source)):
            record = source.read(index)
            file = folder / "crops" / record.key.decode().split("_", 1)[1]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(datum.parse(record.value).data)
    path = folder / "list.txt"
    path.write_bytes(Path("tests/data/crops24_list.txt").read_bytes())
    return path


def commit(path: str) -> None:
    """One more record in an LMDB, written by another process."""
    script = (
        "import lmdb, sys\n"
        "with lmdb.open(sys.argv[1], map_size=64 << 20, lock=False) as env, env.begin(write=True) as txn:\n"
        "    txn.put(b'99999999', b'new')\n"
    )
    subprocess.run([sys.executable, "-c", script, path], check=True)
