"""A folder that is not a run's is never removed."""

import json
from pathlib import Path

import pytest

from pipeline import runfolder
from pipeline.config import Config, RunConfig
from profiler import store
from profiler.errors import UsageError


def config(folder: Path | str) -> Config:
    return Config(run=RunConfig(folder=str(folder), if_exists="replace"))


@pytest.mark.parametrize(
    "files",
    [
        {"samples/photo.jpg": "a photo"},
        {"manifest.json": '{"kind": "something else"}', "events/a": ""},
        {"manifest.json": "[1, 2]"},
        {"manifest.json": "not json"},
        {"notes.txt": "mine"},
    ],
)
def test_replace_keeps_what_no_run_made(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    with pytest.raises(UsageError, match="does not look like a run"):
        runfolder.prepare(config(tmp_path))
    assert {name: (tmp_path / name).read_text() for name in files} == files


def test_replace_clears_a_run(tmp_path: Path) -> None:
    folder = runfolder.prepare(config(tmp_path / "run")).folder
    runfolder.prepare(config(folder)).settle()  # it died before it wrote a manifest
    store.write_manifest(folder, {"run": "old"})
    (folder / "report.html").write_text("old")
    place = runfolder.prepare(config(folder))
    assert not (folder / "report.html").exists()
    assert not (folder / "manifest.json").exists()
    place.settle()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_job_that_never_began_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    place = runfolder.prepare(config(tmp_path / "run"))
    assert place.undo()
    assert list(tmp_path.iterdir()) == []
    place = runfolder.prepare(config(tmp_path / "run"))
    store.write_manifest(place.folder, {"run": "old"})
    assert runfolder.prepare(config(place.folder)).undo()
    assert json.loads((place.folder / "manifest.json").read_text())["run"] == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_job_copy_needs_an_absolute_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    with pytest.raises(UsageError, match="Ray deletes"):
        runfolder.prepare(config("runs/x"))
    assert runfolder.prepare(config(tmp_path / "run"))[0].is_dir()


@pytest.mark.parametrize("if_exists", ["refuse", "replace", "resume"])
@pytest.mark.parametrize("name", ["x" * 300, "run\0folder"])
def test_a_folder_that_cannot_be(tmp_path: Path, name: str, if_exists: str) -> None:
    wanted = Config(run=RunConfig(folder=str(tmp_path / name), if_exists=if_exists))
    with pytest.raises(UsageError, match=r"run\.folder: .* cannot be used"):
        runfolder.prepare(wanted)
    assert list(tmp_path.iterdir()) == []
