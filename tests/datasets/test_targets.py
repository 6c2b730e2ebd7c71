"""Nothing is written into a data set, whatever else a command is told."""

import shutil
from pathlib import Path

import pytest

from datasets import convert, export, inspect, mean, verify
from profiler.errors import UsageError
from tests.datasets import golden

COMMANDS = {
    "mean": lambda db, out: mean.main([db, out, "--force"]),
    "mean --npy": lambda db, out: mean.main([db, str(Path(db).parent / "sound"), "--npy", out, "--force"]),
    "export npz": lambda db, out: export.main([db, out, "--to", "npz", "--force"]),
    "export parquet": lambda db, out: export.main([db, out, "--to", "parquet", "--force"]),
    "export images": lambda db, out: export.main([db, out, "--to", "images", "--force"]),
    "salvage": lambda db, out: verify.main([db, "--salvage", out, "--force"]),
    "inspect": lambda db, out: inspect.main([db, "--html", out]),
    "convert": lambda db, out: convert.main(["idx", str(golden.DB.parent / "mnist" / IDX), out, "--force"]),
}
IDX = "t10k-images-idx3-ubyte.gz"
FORMS = {"lmdb": "crops96_raw_40x48_lmdb", "leveldb": "crops96_raw_40x48_leveldb"}


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_writes_into_a_database(tmp_path: Path, command: str, kind: str) -> None:
    folder = tmp_path / "db"
    shutil.copytree(golden.DB / FORMS[kind], folder)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755)
    before = golden.snapshot(folder)
    existing = "data.mdb" if kind == "lmdb" else "CURRENT"
    for out in (folder / existing, folder / "new.npz"):
        with pytest.raises(UsageError, match=r"not apart|folder of a database"):
            COMMANDS[command](str(folder), str(out))
    assert golden.snapshot(folder) == before


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("convert", "export images", "salvage")])
def test_no_command_replaces_a_single_file_source(tmp_path: Path, command: str) -> None:
    single = tmp_path / "set.mdb"
    shutil.copyfile(golden.DB / "crops96_raw_40x48_lmdb" / "data.mdb", single)
    (tmp_path / "link.mdb").symlink_to(single)
    before = single.read_bytes()
    for out in (single, tmp_path / "link.mdb"):
        with pytest.raises(UsageError, match="not apart"):
            COMMANDS[command](str(single), str(out))
    assert single.read_bytes() == before
