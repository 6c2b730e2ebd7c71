from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline import checkpoint
from pipeline.functions import TransformError
from tests.pipeline.test_iter_size import job


@pytest.mark.parametrize("form", ["BINARYPROTO", "HDF5"])
def test_a_run_that_fails_says_where_its_last_snapshot_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    """Case E14: whatever ends a run (Ray's head, a function), what to go on from is said."""
    monkeypatch.setenv("STALLSCOPE_TEST_FAIL", str(tmp_path / "fail"))
    written: list[Any] = []
    original = checkpoint.write

    def write(*args: Any) -> Any:
        written.append(original(*args))
        if len(written) == 2:
            (tmp_path / "fail").touch()
        return written[-1]

    monkeypatch.setattr(checkpoint, "write", write)
    flags = ["--run.checkpoint_every=2", "--data.transform.python=tests.pipeline.functions:fails_at_last"]
    if form == "HDF5":
        monkeypatch.setattr("tests.pipeline.test_iter_size._SOLVER", 'base_lr: 0.1 lr_policy: "fixed" max_iter: 9 '
                            "iter_size: %d snapshot_format: HDF5")  # fmt: skip
    with pytest.raises(TransformError, match="fails_at_last failed on the batch of step 4"):
        job(tmp_path, "job", 2, 1, *flags)
    said = capsys.readouterr().out
    assert f"the last snapshot is {written[1].state}" in said
    assert written[1].iteration == 4
    assert "resume" in said


def test_one_that_fails_before_any_snapshot_says_nothing_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STALLSCOPE_TEST_FAIL", str(tmp_path))
    with pytest.raises(TransformError, match="fails_at_last"):
        job(tmp_path, "job", 2, 1, "--data.transform.python=tests.pipeline.functions:fails_at_last")
    assert "last snapshot" not in capsys.readouterr().out
