"""Whole or not at all, and going on after a kill: what a conversion leaves behind at any moment."""

from __future__ import annotations

import itertools
import os
import random
import re
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

from datasets import convert_arrays, convert_files, convert_inputs, convert_work, writer
from datasets.manifest import damaged, read_checksums, read_manifest
from datasets.source import open_source
from profiler.errors import StallscopeError, UsageError
from tests.datasets import golden
from tests.datasets.converting import IDX, ROOT, pairs, picture, records, run

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


def facts(out: Path) -> tuple[Any, ...]:
    """Everything about a database that must not depend on interruptions."""
    crcs = read_checksums(out)
    assert crcs is not None
    return pairs(out), read_manifest(out), crcs.tolist()


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


@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
def test_kills_at_any_moment_neither_lose_nor_repeat_a_record(pictures: Path, tmp_path: Path, backend: str) -> None:
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
    for kill in range(6):
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


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("module", "name"),
    [(os, "rename"), (os, "replace"), (shutil, "rmtree"), (convert_work, "remove_manifest"), (os, "unlink")],
)
def test_a_kill_between_any_two_steps_is_made_good(
    tmp_path: Path, monkeypatch, module: Any, name: str, after: bool, pair: bool
) -> None:
    """The old database is there until the new one is, and the next run ends what the killed one began."""
    monkeypatch.setattr(writer, "sync", lambda path: None)  # the disk is not what is tested here
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
                assert list(damaged(source)) == []
        names = {out.name + ending for out in outs for ending in ("", ".crc32", ".manifest.json")}
        assert {path.name for path in target.iterdir()} == names
        if not died:
            break
    assert call > 1 or name == "unlink"


def test_a_complete_conversion_that_lacks_its_manifest_gets_it_without_force(npz: Path, tmp_path: Path, capsys) -> None:
    run("npz", npz, tmp_path / "whole")
    assert killed_at(writer, "publish", 1, True, ["npz", npz, tmp_path / "out"])
    assert read_manifest(tmp_path / "out") is None
    capsys.readouterr()
    assert run("npz", npz, tmp_path / "out") == 0
    told = capsys.readouterr()
    assert "was complete but for its name" in told.err
    assert "30 records" in told.out
    assert facts(tmp_path / "out") == facts(tmp_path / "whole")
    assert not convert_work.folder_of(tmp_path / "out").exists()


def test_another_command_finds_the_manifest_of_a_complete_one_and_refuses_to_replace_it(npz: Path, tmp_path) -> None:
    assert killed_at(writer, "publish", 1, True, ["npz", npz, tmp_path / "out"])
    with pytest.raises(UsageError, match="exists already"):
        run("npz", npz, tmp_path / "out", "--shuffle", "off")
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest.shuffle_seed == 1
    assert not convert_work.folder_of(tmp_path / "out").exists()


def interrupted(monkeypatch, after: int) -> None:
    """Ctrl-C when so many items are made."""
    made = convert_arrays.Arrays.convert

    def stop(self: convert_arrays.Arrays, index: int) -> convert_inputs.Converted:
        stop.calls += 1
        if stop.calls > after:
            raise KeyboardInterrupt
        return made(self, index)

    stop.calls = 0
    monkeypatch.setattr(convert_arrays.Arrays, "convert", stop)


@pytest.fixture
def half(npz: Path, tmp_path: Path, monkeypatch, capsys) -> Path:
    """A conversion to ``out`` that was interrupted after 20 of 30 records, in transactions of 8."""
    monkeypatch.setattr(writer, "COMMIT_RECORDS", 8)
    with monkeypatch.context() as patch:
        interrupted(patch, 20)
        with pytest.raises(KeyboardInterrupt):
            run("npz", npz, tmp_path / "out")
    assert "20 records are kept in" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    return tmp_path / "out"


def test_an_interrupted_conversion_goes_on_and_says_so(npz: Path, half: Path, capsys) -> None:
    run("npz", npz, half)
    assert "going on after the 20 records of an interrupted conversion" in capsys.readouterr().err
    run("npz", npz, half.with_name("whole"))
    assert facts(half) == facts(half.with_name("whole"))


@pytest.mark.parametrize(
    ("flags", "change", "told"),
    [
        (["--shuffle", "off"], False, "the options changed since: starting over"),
        (["--backend", "leveldb"], False, "the options changed since: starting over"),
        ([], True, "the input changed since: starting over"),
        (["--shuffle", "7"], True, "the input and the options changed since: starting over"),
    ],
)
def test_other_input_or_options_start_over(
    npz: Path, half: Path, capsys, flags: list[str], change: bool, told: str
) -> None:
    if change:
        np.savez(npz, images=np.zeros((30, 5, 7), np.uint8), labels=np.arange(30))
        os.utime(npz, ns=(1, 1))
    run("npz", npz, half, *flags)
    assert told in capsys.readouterr().err
    run("npz", npz, half.with_name("whole"), *flags)
    assert facts(half) == facts(half.with_name("whole"))


def test_what_only_says_how_to_go_on_does_not_start_over(npz: Path, half: Path, capsys) -> None:
    run("npz", npz, half, "--on-error", "skip", "--force")
    assert "going on after the 20" in capsys.readouterr().err


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


@pytest.mark.parametrize("damage", ["cut", "state", "foreign"])
def test_damaged_remains_start_over(npz: Path, half: Path, capsys, damage: str) -> None:
    folder = convert_work.folder_of(half)
    if damage == "cut":
        with open(folder / "db" / "data.mdb", "r+b") as file:
            file.write(bytes(8192))
    elif damage == "state":
        (folder / "state.json").write_text("{")
    else:
        with writer_of("lmdb", folder / "db") as database:
            assert database is not None
            database.put(b"00000099", b"no datum")
            database.commit()
    run("npz", npz, half)
    if damage != "state":
        assert re.search("is damaged .*: starting over", capsys.readouterr().err)
    run("npz", npz, half.with_name("whole"))
    assert facts(half) == facts(half.with_name("whole"))


def test_a_second_conversion_to_the_same_target_is_refused(npz: Path, half: Path) -> None:
    with convert_work.working([half]), pytest.raises(UsageError, match=rf"is running: process {os.getpid()} on "):
        run("npz", npz, half)
    assert (convert_work.folder_of(half) / "state.json").exists()
    run("npz", npz, half)


def test_a_full_disk_keeps_what_is_done_and_says_how_to_go_on(npz: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(writer, "COMMIT_RECORDS", 8)
    free = iter([2**40] * 3 + [2**20] * 100)
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(writer.shutil, "disk_usage", lambda path: usage._replace(free=next(free)))
        with pytest.raises(writer.DiskFull) as caught:
            run("npz", npz, tmp_path / "out")
    told = str(caught.value)
    assert re.search(r"no room for the next records\n  expected: .* MiB free\n  found:    1.0 MiB free", told)
    assert "16 records are kept in" in told
    assert "the same command goes on from there" in told
    assert not (tmp_path / "out").exists()
    run("npz", npz, tmp_path / "out")
    assert "going on after the 16 records" in capsys.readouterr().err


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(npz: Path, tmp_path: Path, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: usage._replace(free=16 << 20))
    with pytest.raises(writer.DiskFull, match="no room for the 30 records of this input"):
        run("npz", npz, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in.npz"]


def test_a_failed_conversion_leaves_what_was_there(npz: Path, tmp_path: Path, monkeypatch) -> None:
    run("npz", npz, tmp_path / "out")
    before = pairs(tmp_path / "out")

    def interrupted(self: convert_arrays.Arrays, index: int) -> convert_inputs.Converted:
        raise KeyboardInterrupt

    def broken(self: convert_arrays.Arrays, index: int) -> convert_inputs.Converted:
        raise convert_inputs.InputError(f"item {index} is broken")

    monkeypatch.setattr(convert_arrays.Arrays, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("npz", npz, tmp_path / "out", "--force")
    monkeypatch.setattr(convert_arrays.Arrays, "convert", broken)
    with pytest.raises(StallscopeError, match="is broken"):
        run("npz", npz, tmp_path / "out", "--force")
    with pytest.raises(StallscopeError, match="not one item"):
        run("npz", npz, tmp_path / "out", "--force", "--on-error", "skip")
    assert pairs(tmp_path / "out") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.npz", "out", "out.crc32", "out.manifest.json"]


def test_an_existing_database_is_replaced_only_with_force(npz: Path, tmp_path: Path) -> None:
    run("idx", IDX, tmp_path / "out")
    with pytest.raises(UsageError, match="exists already"):
        run("npz", npz, tmp_path / "out")
    assert len(records(tmp_path / "out")) == 1000
    assert run("npz", npz, tmp_path / "out", "--force", "--backend", "leveldb") == 0
    with open_source(tmp_path / "out") as source:
        assert (source.backend, len(source)) == ("leveldb", 30)


def test_force_never_replaces_a_folder_of_other_files(npz: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match=r"other files(.|\n)*thesis.tex"):
        run("npz", npz, tmp_path / "home", "--force")
    with pytest.raises(UsageError, match="not the folder of a database"):
        run("npz", npz, npz, "--force")
    with pytest.raises(UsageError, match="does not exist"):
        run("npz", npz, tmp_path / "no" / "such" / "place")
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"


def test_an_empty_folder_may_be_filled(npz: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert run("npz", npz, tmp_path / "out") == 0
    assert len(records(tmp_path / "out")) == 30


@pytest.mark.parametrize("pair", [False, True])
def test_the_same_command_again_has_nothing_to_do(tmp_path: Path, capsys, pair: bool) -> None:
    """Also where a kill came when all had its name and only the temporary folder was left."""
    picture(tmp_path / "a.png")
    (tmp_path / "list.txt").write_text("a.png 3\n")
    arguments = ["list", tmp_path / "list.txt", tmp_path / "out"]
    if pair:
        arguments += ["--label-db", tmp_path / "two"]
    assert run(*arguments) == 0
    names = sorted(tmp_path.iterdir())
    before = facts(tmp_path / "out"), (tmp_path / "out").stat().st_ino
    (convert_work.folder_of(tmp_path / "out") / "db").mkdir(parents=True)
    capsys.readouterr()
    assert run(*arguments) == 0
    told = capsys.readouterr()
    assert "a complete database of this input is there already; nothing to do" in told.err
    assert "1 records" in told.out
    assert (facts(tmp_path / "out"), (tmp_path / "out").stat().st_ino) == before
    assert sorted(tmp_path.iterdir()) == names
    assert run(*arguments, "--force") == 0
    assert (tmp_path / "out").stat().st_ino != before[1]


@pytest.mark.parametrize("change", ["options", "input", "database", "labels"])
def test_a_database_that_is_another_or_damaged_is_not_taken_for_complete(tmp_path: Path, change: str) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "list.txt").write_text("a.png 3\na.png 4\n")
    arguments = ["list", tmp_path / "list.txt", tmp_path / "out", "--label-db", tmp_path / "two"]
    assert run(*arguments) == 0
    if change == "options":
        arguments.append("--gray")
    elif change == "input":
        (tmp_path / "list.txt").write_text("a.png 3\na.png 5\n")
    elif change == "database":
        os.truncate(tmp_path / "out" / "data.mdb", 4096)
    else:
        (tmp_path / "two.manifest.json").unlink()
    with pytest.raises(UsageError, match="exists already"):
        run(*arguments)
    assert not convert_work.folder_of(tmp_path / "out").exists()


def test_a_database_that_lacks_items_is_complete_only_for_who_skips_them(tmp_path: Path, capsys) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"nothing")
    (tmp_path / "list.txt").write_text("a.png 3\nb.png 4\n")
    arguments = ["list", tmp_path / "list.txt", tmp_path / "out"]
    for _ in range(2):
        assert run(*arguments, "--on-error", "skip") == 1
    assert "nothing to do" in capsys.readouterr().err
    with pytest.raises(UsageError, match="exists already"):
        run(*arguments)


def test_an_interrupted_conversion_with_other_options_outlives_a_run_with_nothing_to_do(npz: Path, half: Path) -> None:
    kept = half.with_name("kept")
    convert_work.folder_of(half).rename(kept)
    assert run("npz", npz, half, "--shuffle", "off") == 0
    kept.rename(convert_work.folder_of(half))
    assert run("npz", npz, half, "--shuffle", "off") == 0
    assert (convert_work.folder_of(half) / "state.json").exists()


@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
def test_an_item_that_stops_a_conversion_does_not_lose_what_came_before(
    npz: Path, tmp_path: Path, monkeypatch, capsys, backend: str
) -> None:
    made = convert_arrays.Arrays.convert

    def broken(self: convert_arrays.Arrays, index: int) -> convert_inputs.Converted:
        if index == 7:
            raise convert_inputs.InputError("item 7 is broken")
        return made(self, index)

    arguments = ["npz", npz, tmp_path / "out", "--shuffle", "off", "--backend", backend]
    with monkeypatch.context() as patch:
        patch.setattr(convert_arrays.Arrays, "convert", broken)
        with pytest.raises(StallscopeError, match=r"7 is broken(.|\n)*7 records are kept in"):
            run(*arguments)
    assert run(*arguments) == 0
    assert "going on after the 7 records" in capsys.readouterr().err
    assert len(records(tmp_path / "out")) == 30


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("module", "name"), [(os, "rename"), (os, "replace"), (shutil, "rmtree"), (os, "unlink")])
def test_after_a_kill_at_any_step_the_same_command_ends_well_without_force(
    npz: Path, tmp_path: Path, monkeypatch, module: Any, name: str, after: bool
) -> None:
    monkeypatch.setattr(writer, "sync", lambda path: None)  # the disk is not what is tested here
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    for call in itertools.count(1):
        out = tmp_path / str(call)
        died = killed_at(module, name, call, after, ["npz", npz, out])
        assert run("npz", npz, out) == 0
        with open_source(out) as source:
            assert (len(source), list(damaged(source))) == (30, [])
        assert not convert_work.folder_of(out).exists()
        if not died:
            break
    assert call > 1
