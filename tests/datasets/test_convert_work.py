"""Whole or not at all, and going on after an interruption: what a conversion leaves behind and takes up again."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from datasets import convert_arrays, convert_inputs, convert_work, writer
from datasets.source import open_source
from profiler.errors import StallscopeError, UsageError
from tests.datasets.converting import IDX, facts, pairs, picture, records, run, writer_of


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    np.savez(tmp_path / "in.npz", images=np.arange(30 * 35).reshape(30, 5, 7).astype(np.uint8), labels=np.arange(30))
    return tmp_path / "in.npz"


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
        (["--shuffle", "off", "--force"], False, "the options changed since: starting over"),
        (["--backend", "leveldb", "--force"], False, "the options changed since: starting over"),
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


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--shuffle", "off"], r"expected: --shuffle 1\n  found:    --shuffle off\n"),
        (
            ["--shuffle", "7", "--backend", "leveldb"],
            r"expected: --backend lmdb, --shuffle 1\n  found:    --backend l.*7",
        ),
        (["--layout", "nchw"], r"expected: no --layout\n  found:    --layout nchw\n"),
    ],
)
def test_other_options_are_refused_by_name_and_the_same_ones_go_on(npz, half: Path, capsys, flags, told: str) -> None:
    for _ in range(2):  # refusing loses nothing
        with pytest.raises(UsageError, match=rf"other options(.|\n)*{told}(.|\n)*--force starts over"):
            run("npz", npz, half, *flags)
    run("npz", npz, half)
    assert "going on after the 20" in capsys.readouterr().err


def test_what_only_says_how_to_go_on_does_not_start_over(npz: Path, half: Path, capsys) -> None:
    run("npz", npz, half, "--on-error", "skip", "--force")
    assert "going on after the 20" in capsys.readouterr().err


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
