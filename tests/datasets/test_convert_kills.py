"""Conversions killed at any moment, and between any two steps of their end: the next run makes it good."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from datasets import convert_files, convert_work, publish, writer
from datasets.manifest import read_manifest
from datasets.source import open_source
from profiler.errors import UsageError
from tests.datasets import golden
from tests.datasets.converting import ROOT, damaged, facts, pairs, picture, run, writer_of

COUNT = 1600


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    np.savez(tmp_path / "in.npz", images=np.arange(30 * 35).reshape(30, 5, 7).astype(np.uint8), labels=np.arange(30))
    return tmp_path / "in.npz"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """A list of 1600 lines over a few images, two of which cannot be read."""
    folder = tmp_path_factory.mktemp("pictures")
    noise = np.random.default_rng(3)
    for index in range(20):
        Image.fromarray(noise.integers(0, 256, (24, 24, 3), np.uint8)).save(folder / f"{index}.png")
    (folder / "bad.png").write_bytes((folder / "0.png").read_bytes()[:200])
    lines = [f"{'bad' if index % 611 == 17 else index % 20}.png {index}\n" for index in range(COUNT)]
    (folder / "list.txt").write_text("".join(lines))
    return folder


def killed(command: list[str], target: Path, moment: float, writing: bool) -> bool:
    """Start the conversion and kill it ``moment`` seconds after it began (``writing``: after its first transaction).

    True if it was still running.
    """
    database = convert_work.folder_of(target) / "db"
    before = stamps(database)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and not (stamps(database) != before if writing else database.exists()):
            time.sleep(0.001)
        time.sleep(moment)
        process.send_signal(signal.SIGKILL)
        return process.wait() == -signal.SIGKILL


def stamps(database: Path) -> list[tuple[str, int]]:
    """Name and time of change of what holds records. LevelDB removes logs at any moment."""
    told = []
    for file in [*database.glob("data.mdb"), *database.glob("*.log")]:
        with suppress(FileNotFoundError):
            status = file.stat()
            if status.st_size > 32768:
                told.append((file.name, status.st_mtime_ns))
    return told


@pytest.mark.parametrize("most", [4, pytest.param(15, marks=pytest.mark.long)])
@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
def test_kills_at_any_moment_neither_lose_nor_repeat_a_record(
    pictures: Path, tmp_path: Path, backend: str, most: int
) -> None:
    arguments = ["list", str(pictures / "list.txt"), "--backend", backend, "--on-error", "skip"]
    assert run(*arguments[:2], tmp_path / "whole", *arguments[2:]) == 1
    out = tmp_path / "parts" / "out"
    out.parent.mkdir()
    script = (
        "import sys, time; from datasets import convert, convert_inputs, writer; writer.COMMIT_RECORDS = 50\n"
        "make = convert_inputs.image_datum; from datasets import convert_files\n"
        "convert_files.image_datum = lambda *about: (time.sleep(0.001), make(*about))[1]\n"
        "sys.exit(convert.main())"
    )
    command = [sys.executable, "-c", script, *arguments[:2], str(out), *arguments[2:]]
    moments = random.Random(f"{backend} 1")
    kept, kills = [], 0
    for kill in range(most):
        if not killed(command, out, moments.uniform(0, 0.2), writing=kill % 3 > 0):
            break
        kills += 1
        assert not out.exists()
        with writer_of(backend, convert_work.folder_of(out) / "db") as database:
            kept.append(0 if database is None else sum(1 for _ in database.records()))
    assert kills >= 3, "it ended before it could be killed"
    assert kept == sorted(kept), "a run lost what an earlier one had committed"
    assert kept[-1] > 0
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"going on after the {kept[-1]} records" in done.stderr
    assert facts(out) == facts(tmp_path / "whole")
    assert sorted(path.name for path in out.parent.iterdir()) == ["out", "out.crc32", "out.manifest.json"]


KILLED = 77


def killed_at(module: Any, name: str, call: int, after: bool, arguments: list[object]) -> bool:
    """Convert in a child that dies before (or after) the given call of ``module.name``; False if it came through."""

    def convert() -> None:
        original, calls = getattr(module, name), itertools.count(1)

        def die(*about: Any, **options: Any) -> Any:
            last = next(calls) == call
            if last and not after:
                os._exit(KILLED)
            try:
                return original(*about, **options)
            finally:
                if last:
                    os._exit(KILLED)

        setattr(module, name, die)
        if run(*arguments) != 0:
            raise AssertionError("the conversion failed")

    status = golden.in_child(convert)
    assert status in (0, KILLED)
    return status == KILLED


@pytest.mark.parametrize(
    ("after", "pair"),
    [(False, True), (True, True), (False, False), pytest.param(True, False, marks=pytest.mark.long)],
)
@pytest.mark.parametrize(
    ("module", "name"),
    [(os, "rename"), (os, "replace"), (shutil, "rmtree"), (convert_work, "remove_manifest"), (os, "unlink")],
)
def test_a_kill_between_any_two_steps_is_made_good(
    tmp_path: Path, monkeypatch, module: Any, name: str, after: bool, pair: bool
) -> None:
    """The old database is there until the new one is, and the next run ends what the killed one began."""
    monkeypatch.setattr(publish, "sync", lambda path: None)  # the disk is not what is tested here
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    picture(tmp_path / "a.png")
    target = tmp_path / "target"
    target.mkdir()
    arguments = ["list", tmp_path / "list.txt", target / "out", "--force"]
    outs = [target / "out"]
    if pair:
        arguments += ["--label-db", target / "two"]
        outs.append(target / "two")
    for call in itertools.count(1):
        (tmp_path / "list.txt").write_text("a.png 3\n")
        assert run(*arguments) == 0
        (tmp_path / "list.txt").write_text("a.png 4\na.png 5\n")
        died = killed_at(module, name, call, after, arguments)
        for out in outs:
            if out.exists():
                assert len(pairs(out)) in (1, 2)
            else:
                (aside,) = target.glob(f".{out.name}.old-*")
                assert len(pairs(aside)) == 1, "the old database is nowhere"
        assert run(*arguments) == 0
        for out in outs:
            assert len(pairs(out)) == 2
            with open_source(out) as source:
                assert damaged(source) == []
        names = {out.name + ending for out in outs for ending in ("", ".crc32", ".manifest.json")}
        assert {path.name for path in target.iterdir()} == names
        if not died:
            break
    assert call > 1 or name == "unlink"


def test_a_complete_conversion_that_lacks_its_manifest_gets_it_without_force(npz: Path, tmp_path: Path, capsys) -> None:
    run("npz", npz, tmp_path / "whole")
    assert killed_at(publish, "publish", 1, True, ["npz", npz, tmp_path / "out"])
    assert read_manifest(tmp_path / "out") is None
    capsys.readouterr()
    assert run("npz", npz, tmp_path / "out") == 0
    told = capsys.readouterr()
    assert "was complete but for its name" in told.err
    assert "30 records" in told.out
    assert facts(tmp_path / "out") == facts(tmp_path / "whole")
    assert not convert_work.folder_of(tmp_path / "out").exists()


def test_another_command_finds_the_manifest_of_a_complete_one_and_refuses_to_replace_it(npz: Path, tmp_path) -> None:
    assert killed_at(publish, "publish", 1, True, ["npz", npz, tmp_path / "out"])
    with pytest.raises(UsageError, match="exists already"):
        run("npz", npz, tmp_path / "out", "--shuffle", "off")
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest.shuffle_seed == 1
    assert not convert_work.folder_of(tmp_path / "out").exists()


@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
@pytest.mark.parametrize("call", [5, 20, 39])
def test_of_two_databases_one_may_be_ahead_when_they_are_cut_short(tmp_path: Path, backend: str, call: int) -> None:
    for index in range(40):
        picture(tmp_path / f"{index}.png", (index, 0, 0))
    (tmp_path / "list.txt").write_text("".join(f"{index}.png {index} {index / 4}\n" for index in range(40)))
    arguments = ["list", tmp_path / "list.txt", tmp_path / "out", "--label-db", tmp_path / "two", "--backend", backend]
    assert run(*arguments[:2], tmp_path / "whole", "--label-db", tmp_path / "whole2", *arguments[5:]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "COMMIT_RECORDS", 7)
        patch.setattr(writer, "COMMIT_BYTES", 300)  # three images, and seven records of labels
        assert killed_at(convert_files, "image_datum", call, False, [*arguments, "--workers", "1"])
        folder = convert_work.folder_of(tmp_path / "out")
        counts = []
        for name in ("db", "labels"):
            with writer_of(backend, folder / name) as database:
                assert database is not None
                counts.append(sum(1 for _ in database.records()))
        assert counts[0] > counts[1]
        assert run(*arguments) == 0
    for made, whole in (("out", "whole"), ("two", "whole2")):
        assert facts(tmp_path / made)[::2] == facts(tmp_path / whole)[::2]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("module", "name"), [(os, "rename"), (os, "replace"), (shutil, "rmtree"), (os, "unlink")])
def test_after_a_kill_at_any_step_the_same_command_ends_well_without_force(
    npz: Path, tmp_path: Path, monkeypatch, module: Any, name: str, after: bool
) -> None:
    monkeypatch.setattr(publish, "sync", lambda path: None)  # the disk is not what is tested here
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    for call in itertools.count(1):
        out = tmp_path / str(call)
        died = killed_at(module, name, call, after, ["npz", npz, out])
        assert run("npz", npz, out) == 0
        with open_source(out) as source:
            assert (len(source), damaged(source)) == (30, [])
        assert not convert_work.folder_of(out).exists()
        if not died:
            break
    assert call > 1
