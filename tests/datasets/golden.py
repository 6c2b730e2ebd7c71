"""The databases made by Caffe that lie in tests/data/db, and small helpers for tests on databases."""

import hashlib
import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

DB = Path(__file__).resolve().parents[1] / "data" / "db"
LMDBS = ["mnist_test_lmdb", "crops24_encoded_native_lmdb", "crops96_raw_40x48_lmdb", "lenet_ip2_float_lmdb"]
LEVELDBS = ["mnist_test_leveldb", "crops96_raw_40x48_leveldb", "crops24_gray_jpg_72_leveldb"]
ALL = sorted(place.name for place in DB.iterdir() if (place / "data.mdb").exists() or (place / "CURRENT").exists())
UNPRIVILEGED = 65534


@cache
def manifest():
    return json.loads((DB / "db_manifest.json").read_text())


def described(name):
    """What Caffe's side says of a database; one that was opened again holds what it held before."""
    return manifest()[name.removesuffix("_reopened")]


def records(name):
    """Position and fields of golden records: all of them, or the first 50 and the last 50 of a large database."""
    entry = described(name)
    listed = [dict(zip(entry["fields"], record, strict=True)) for record in entry["records"]]
    left_out = entry["n"] - len(listed)
    return {index if index < 50 or not left_out else index + left_out: record for index, record in enumerate(listed)}


def md5(data):
    return hashlib.md5(data).hexdigest()


def copy(name, folder):
    target = Path(folder) / name
    shutil.copytree(DB / name, target)
    return target


def snapshot(folder):
    """Everything about a folder that reading must leave alone: names, bytes, modes, times of change."""
    seen = {}
    for place in [Path(folder), *sorted(Path(folder).rglob("*"))]:
        status = place.stat()
        content = md5(place.read_bytes()) if place.is_file() else ""
        seen[str(place)] = (content, status.st_size, status.st_mode, status.st_mtime_ns, status.st_ino)
    return seen


@contextmanager
def public_folder():
    """A temporary folder of our own that every user can reach, unlike pytest's. Changes no folder but itself."""
    with tempfile.TemporaryDirectory(prefix="stallscope-test-", dir=os.environ.get("TMPDIR", "/tmp")) as name:
        folder = Path(name)
        if not all(place.stat().st_mode & 0o001 for place in folder.parents):
            pytest.skip("other users cannot reach the temporary folder")
        folder.chmod(0o755)
        yield folder


def in_child(function):
    """Exit status of ``function()`` in a forked child: 0, 1 after an exception, or minus the signal."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            function()
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)
