"""What is said of a data set in any process of a job stands in its report, once."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import plyvel
import pytest
from PIL import Image

from datasets import lmdb_slot
from datasets.errors import DatasetWarning, ReadersFull
from datasets.leveldb_source import LevelDbSource
from pipeline.actors import OwnerActor
from pipeline.run import run
from pipeline.settings import load
from pipeline.spec import FeedSpec
from pipeline.worker import recording
from profiler import report, store
from tests.pipeline.build import picture, raw, write_leveldb, write_lmdb

RECORDS = [raw(picture(i, (1, 8, 8)), i % 10) for i in range(40)]
WRITER = """
import plyvel, sys
with plyvel.DB(sys.argv[1]) as db:
    for key, value in list(db): db.put(key, value)
"""


HOLDER = """
import lmdb, sys
env = lmdb.open(sys.argv[1], readonly=True, max_readers=8)
held = [env.begin() for _ in range(int(sys.argv[2]) if sys.argv[2:] else 1)]
print("open", flush=True); sys.stdin.readline()
"""


def write_into(path: str) -> None:
    subprocess.run([sys.executable, "-c", WRITER, path], check=True)


def warned(folder: Path) -> list[str]:
    found = report.build(store.load_run(folder)).findings
    assert {finding.level for finding in found if finding.kind == "data_warning"} <= {"warning"}
    return [finding.text for finding in found if finding.kind == "data_warning"]


def spec_in(folder: Path, source: str) -> FeedSpec:
    store.write_manifest(folder, {})
    return FeedSpec(source=source, batch=4, recorder_folder=str(folder), detail="full")


def test_only_warnings_about_data_sets_are_noted_and_all_are_shown(tmp_path: Path) -> None:
    spec = spec_in(tmp_path / "run", "memory:3x1x2x2")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        before = warnings.showwarning
        for row in range(2):
            with recording(spec, row):
                warnings.warn("the set is odd", DatasetWarning, stacklevel=1)
                warnings.warn("something else", UserWarning, stacklevel=1)
        assert warnings.showwarning is before
        warnings.warn("said when nobody records", DatasetWarning, stacklevel=1)
    assert len(shown) == 5
    assert warned(tmp_path / "run") == ["the set is odd"], "two processes, one finding"


def test_a_leveldb_written_to_while_its_owner_serves_is_told_in_the_report(tmp_path: Path) -> None:
    """The owner is an actor, whose log nobody sees."""
    source = write_leveldb(tmp_path / "db", RECORDS)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always", DatasetWarning)
        owner = OwnerActor(spec_in(tmp_path / "run", source))
        owner.read_many(np.arange(4), {})
        write_into(source)
        for _ in range(3):
            owner.read_many(np.arange(4), {})
        owner.close()
    (told,) = warned(tmp_path / "run")
    assert source in told
    assert "what is read is what it held then" in told


def job(tmp_path: Path, source: str, **more: Any) -> Path:
    flags = {
        "data.train.source": source, "data.train.batch": 4, "run.iterations": 12, "run.log_level": "error",
        "run.folder": str(tmp_path / "run"), "device.backend": "emulated", "device.step_ms": 0,
        "profile.samplers_hz": 0, "feed.engine": "inline", **more,
    }  # fmt: skip
    assert run(load(None, [f"--{key}={value}" for key, value in flags.items()])) == 0
    return tmp_path / "run"


def test_a_writer_beside_an_inline_job_is_told_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_leveldb(tmp_path / "db", RECORDS)
    opened = LevelDbSource.read_many
    calls: list[int] = []

    def read_many(self: LevelDbSource, indices: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            write_into(source)
        return opened(self, indices)

    monkeypatch.setattr(LevelDbSource, "read_many", read_many)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always", DatasetWarning)
        folder = job(tmp_path, source)
    assert any("what is read is what it held then" in text for text in warned(folder))


def test_the_cost_of_verifying_checksums_is_told_in_the_report(tmp_path: Path) -> None:
    records = [raw(picture(i, (3, 64, 64)), i % 10) for i in range(40)]
    source = write_leveldb(tmp_path / "db", records)
    plyvel.DB(source).close()  # the log, which is verified when it is opened, becomes a table
    folder = job(tmp_path, source, **{"run.iterations": 140})
    (finding,) = [found for found in report.build(store.load_run(folder)).findings if found.kind == "checksums"]
    assert finding.level == "info"
    text = rf"Verifying the checksums of LevelDB {tmp_path}/db takes \d+ % of the CPU time of .* by \d+ blocks"
    assert re.match(text, finding.text)
    folder = job(tmp_path, write_lmdb(tmp_path / "lmdb", records), **{"run.if_exists": "replace"})
    assert "checksums" not in {found.kind for found in report.build(store.load_run(folder)).findings}


@pytest.mark.parametrize("engine", ["inline", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.long])])
def test_locking_tells_the_limit_in_force_at_the_start_and_in_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str
) -> None:
    source = write_lmdb(tmp_path / "db", RECORDS)
    (Path(source) / "lock.mdb").unlink(missing_ok=True)
    locked = {"data.train.lock": "true", "run.log_level": "info"}
    with subprocess.Popen([sys.executable, "-c", HOLDER, source], stdin=PIPE, stdout=PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        folder = job(tmp_path, source, **locked, **{"feed.engine": engine, "feed.workers": 1})
        holder.communicate("")
    told = " ".join(capsys.readouterr().out.split())
    assert f"LMDB {source}: read with locking; its table has 8 reader slots (another process fixed it" in told
    (finding,) = [found for found in report.build(store.load_run(folder)).findings if found.kind == "reader_slot"]
    assert "slots 8" in finding.text
    assert lmdb_slot.held() == []


def test_a_job_that_cannot_get_a_slot_ends_with_who_holds_them(tmp_path: Path) -> None:
    source = write_lmdb(tmp_path / "db", RECORDS)
    (Path(source) / "lock.mdb").unlink(missing_ok=True)
    with subprocess.Popen([sys.executable, "-c", HOLDER, source, "8"], stdin=PIPE, stdout=PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(ReadersFull) as caught:
            job(tmp_path, source, **{"data.train.lock": "true"})
        holder.communicate("")
    assert "another process fixed the table at 8" in str(caught.value)
    assert str(holder.pid) in str(caught.value)


@pytest.mark.parametrize("engine", ["inline", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.long])])
def test_what_a_list_of_images_hides_and_the_lines_that_cannot_be_used_are_told(tmp_path: Path, engine: str) -> None:
    for i in range(12):
        Image.new("RGB", (8, 8), (i, i, i)).save(tmp_path / f"{i}.png")
    lines = [f"{i}.png {i % 3}" for i in range(12)]
    lines[3], lines[7] = "2.png 1", "gone.png 1"
    (tmp_path / "list.txt").write_text("\n".join([*lines, "0.png much"]) + "\n")
    skipping = {"data.on_bad_record": "skip", "data.bad_record_cap": 0.5, "feed.engine": engine, "feed.workers": 1}
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always", DatasetWarning)
        folder = job(tmp_path, str(tmp_path / "list.txt"), **skipping)
    (told,) = warned(folder)
    assert told.endswith("list.txt: paths that were there before with another label, at line: 4 (as 3)")
    bad = {note["record"]: note["key"] for note in store.load_run(folder).notes if note["note"] == "bad_record"}
    assert bad == {7: "'00000007_gone.png'", 12: "'00000012_'"}
