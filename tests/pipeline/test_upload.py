"""Case E11: what a submitted job would carry with it is told before, and data and weights stay where they are."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from pipeline import upload
from profiler import cli
from profiler.errors import UsageError

ROOT = Path(__file__).parents[2]
CODE = ["datasets/__init__.py", "datasets/source.py", "net.prototxt", "train.yaml", "notes.log"]
DATA = [
    "train_lmdb/data.mdb", "train_lmdb/lock.mdb", "copies/data.mdb", "old_leveldb/CURRENT", "old_leveldb/000003.log",
    "db/000005.ldb", "db/000007.sst", "lenet.caffemodel", "lenet.caffemodel.h5", "lenet.solverstate", ".git/HEAD",
]  # fmt: skip


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """With a database of 150 MB that takes no room."""
    for name in (*CODE, *DATA):
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * len(name))
    os.truncate(tmp_path / "project" / "train_lmdb" / "data.mdb", 150 << 20)
    return tmp_path / "project"


def names(found: upload.Survey) -> set[str]:
    return {name for _, name in found.files}


def test_the_database_is_told_and_kept_out_when_asked(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert upload.main([str(project)]) == cli.EXIT_NOT_FINE
    said = capsys.readouterr().out
    assert "150.0 MiB" in said
    listed = [line for line in said.splitlines() if line.startswith("  ")]
    assert len(listed) == 5
    assert listed[0].endswith("train_lmdb/data.mdb")
    assert "--write" in said
    assert not (project / ".rayignore").exists(), "nothing is written unasked"

    assert upload.main([str(project), "--write"]) == cli.EXIT_OK
    assert names(upload.survey(project)) == {*CODE, ".rayignore"}, "the package datasets is code"
    assert upload.write(project) == [], "once"
    capsys.readouterr()


def test_it_is_what_ray_packs(project: Path, tmp_path: Path) -> None:
    from ray._private import ray_constants
    from ray._private.runtime_env import packaging

    for step in ("without", "with"):
        target = tmp_path / f"{step}.zip"
        defaults = ray_constants.get_runtime_env_default_excludes()
        packaging.create_package(str(project), target, include_gitignore=True, excludes=defaults)
        with zipfile.ZipFile(target) as packed:
            assert {name for name in packed.namelist() if not name.endswith("/")} == names(upload.survey(project))
        os.truncate(project / "train_lmdb" / "data.mdb", 10)
        upload.write(project)


def test_lines_of_ones_own_are_kept_and_count(project: Path) -> None:
    (project / ".rayignore").write_text("*.log\n*.mdb")
    assert upload.write(project) == [pattern for pattern in upload.PATTERNS if pattern != "*.mdb"]
    assert (project / ".rayignore").read_text().splitlines()[:2] == ["*.log", "*.mdb"]
    assert "notes.log" not in names(upload.survey(project))


def test_too_much_code_is_told_too(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    upload.write(project)
    os.truncate(project / "notes.log", 1 << 40)
    assert upload.main([str(project)]) == cli.EXIT_NOT_FINE
    assert "Ray takes" in capsys.readouterr().out


def test_this_checkout_carries_no_data_set_and_no_weights() -> None:
    assert (ROOT / ".rayignore").read_text().splitlines()[1:] == list(upload.PATTERNS)
    found = upload.survey(ROOT)
    assert found.fine
    assert {"pipeline/train.py", "datasets/source.py"} <= names(found)


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing is not a folder"):
        upload.main([str(tmp_path / "nothing")])
