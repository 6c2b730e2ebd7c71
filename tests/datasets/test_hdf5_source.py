"""HDF5 files as a source: rows in order over files, several tops, traps told at once, and never a whole file."""

import json
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datasets import datum, export, inspect, mean, verify
from datasets.errors import DatasetChanged, NotADataset, SourceError, SourceMissing
from datasets.hdf5_source import Hdf5Source
from datasets.paired import PairedRecord
from datasets.source import Record, Source, open_source
from profiler.errors import UsageError
from tests.datasets import golden


def write(path: Path, **arrays: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array)
    return path


def row(record: Record) -> tuple[np.ndarray, np.ndarray]:
    assert isinstance(record, PairedRecord)
    sample, labels = datum.parse(record.value), datum.parse(record.label_value)
    assert sample.float_data is not None
    assert labels.float_data is not None
    return sample.float_data, labels.float_data


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_rows_come_in_order_over_files_whatever_is_asked_for(tmp_path_factory: Any, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("h5")
    lengths = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any))
    shape = data.draw(st.lists(st.integers(1, 3), max_size=4))
    rng = np.random.default_rng(1)
    values = rng.standard_normal((sum(lengths), *shape)).astype(np.float32)
    labels = rng.integers(0, 9, (sum(lengths), 2))
    ends = np.cumsum(lengths)
    for number, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        write(folder / f"{number}.h5", data=values[end - length : end], label=labels[end - length : end])
    (folder / "list.txt").write_text("".join(f"{number}.h5\n" for number in range(len(lengths))))
    with open_source(folder / "list.txt") as source:
        assert (source.backend, len(source)) == ("hdf5", sum(lengths))
        assert source.blobs == (tuple(shape), (2,))
        asked = data.draw(st.lists(st.integers(0, sum(lengths) - 1), max_size=12))
        for index, record in zip(asked, source.read_many(asked), strict=True):
            sample, label = row(record)
            np.testing.assert_array_equal(sample, values[index].reshape(-1))
            np.testing.assert_array_equal(label, labels[index])
            assert record.index == index


def test_a_file_alone_and_tops_of_any_kind_of_number(tmp_path: Path) -> None:
    file = write(
        tmp_path / "x.h5", image=np.arange(24, dtype=np.uint8).reshape(4, 2, 3), a=np.arange(4, dtype=np.int64),
        b=np.arange(8, dtype=np.float64).reshape(4, 2), text=np.array([b"x"] * 4),
    )  # fmt: skip
    with open_source(file, tops=("image", "a", "b")) as source:
        assert source.blobs == ((2, 3), (), (2,))
        sample, labels = row(source.read(3))
        np.testing.assert_array_equal(sample, np.arange(18, 24))
        np.testing.assert_array_equal(labels, [3, 6, 7])
        assert f"row 3 of {file}" in str(source.read(3))
    with open_source(file, tops=("image",)) as source:
        record = source.read(1)
        assert type(record) is Record
        assert datum.parse(record.value).label == 0


def test_everything_that_does_not_belong_together_is_told_at_once(tmp_path: Path) -> None:
    write(tmp_path / "a.h5", data=np.zeros((5, 3)), label=np.zeros(4))
    write(tmp_path / "b.h5", data=np.zeros((5, 2)), label=np.zeros(5))
    write(tmp_path / "c.h5", data=np.zeros((5, 3)), name=np.array([b"x"] * 5))
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file.create_group("data")
        file["label"] = np.array([b"x"])
    (tmp_path / "list.txt").write_text("a.h5\nb.h5\nc.h5\nd.h5\n")
    with pytest.raises(UsageError) as caught:
        open_source(tmp_path / "list.txt")
    text = str(caught.value)
    assert "a.h5: the data sets have different numbers of rows: data 5, label 4" in text
    assert "rows of 'data': 3 in" in text
    assert "c.h5: there is no data set 'label'; it holds 'data', 'name'" in text
    assert "d.h5: 'data' is a group" in text
    assert "d.h5: 'label' holds |S1, not numbers" in text


def test_files_that_are_not_there_or_no_hdf5_are_named(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("gone.h5\n\nx.h5\n")
    (tmp_path / "x.h5").write_bytes(b"no such thing")
    with pytest.raises(SourceMissing, match=r"line 1: .*gone\.h5"):
        open_source(tmp_path / "list.txt")
    (tmp_path / "list.txt").write_text("x.h5\n")
    with pytest.raises(NotADataset, match=r"x\.h5 is no HDF5 file"):
        open_source(tmp_path / "list.txt")
    whole = write(tmp_path / "y.h5", data=np.zeros((5000, 3)), label=np.zeros(5000))
    whole.write_bytes(whole.read_bytes()[:20_000])
    with pytest.raises(SourceError, match=r"y\.h5 cannot be opened"):
        open_source(whole)
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(NotADataset, match="is empty"):
        open_source(tmp_path / "empty.txt", backend="hdf5")


def test_damage_inside_a_file_names_rows(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "z.h5", "w") as file:
        file.create_dataset(
            "data", data=np.random.default_rng(1).random((64, 500)), chunks=(8, 500), compression="gzip"
        )
        file.create_dataset("label", data=np.zeros(64))
        place = file["data"].id.get_chunk_info(3).byte_offset
    with open(tmp_path / "z.h5", "r+b") as stream:
        stream.seek(place + 100)
        stream.write(bytes(2000))
    with open_source(tmp_path / "z.h5") as source:
        source.read(5)
        with pytest.raises(SourceError, match=r"rows 25 to 25 of the data set 'data' in .*z\.h5 cannot be read"):
            source.read(25)


def test_a_file_that_was_written_to_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "x.h5", data=np.zeros((5, 3)), label=np.zeros(5))
    source = open_source(file)
    identity = source.identity()
    copy: Source = pickle.loads(pickle.dumps(source))
    source.close()
    write(file, data=np.ones((6, 3)), label=np.zeros(6))
    with pytest.raises(DatasetChanged, match="was written to"):
        copy.read(0)
    assert open_source(file).identity() != identity


def test_reading_leaves_the_folder_alone_and_a_fork_opens_for_itself(tmp_path: Path) -> None:
    file = write(tmp_path / "x.h5", data=np.arange(15).reshape(5, 3), label=np.arange(5))
    before = golden.snapshot(tmp_path)
    with open_source(file) as source:
        source.read(4)

        def child() -> None:
            np.testing.assert_array_equal(row(source.read(2))[0], [6, 7, 8])

        assert golden.in_child(child) == 0
        np.testing.assert_array_equal(row(source.read(1))[0], [3, 4, 5])
    assert golden.snapshot(tmp_path) == before


def test_many_files_are_not_all_held_open(tmp_path: Path) -> None:
    for number in range(40):
        write(tmp_path / f"{number}.h5", data=np.full((2, 1), number), label=np.zeros(2))
    (tmp_path / "list.txt").write_text("".join(f"{number}.h5\n" for number in range(40)))
    with Hdf5Source(str(tmp_path / "list.txt")) as source:
        for index in np.random.default_rng(1).permutation(80).tolist():
            assert row(source.read(index))[0] == index // 2
        assert len(source._open) == 16


def test_a_file_larger_than_memory_is_read_by_rows(tmp_path: Path) -> None:
    """A file of 12 GB (with holes: it takes no room) in a process that may have 3 GB."""
    with h5py.File(tmp_path / "large.h5", "w") as file:
        data = file.create_dataset("data", (3_000_000, 1000), np.float32)
        data[2_999_999] = 7
        file.create_dataset("label", (3_000_000,), np.float32)
    script = textwrap.dedent("""
        import resource, sys
        from datasets import datum
        from datasets.source import open_source
        resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
        with open_source(sys.argv[1]) as source:
            records = source.read_many([2_999_999, 0, 1, 1_500_000])
            print(len(source), *(datum.parse(record.value).float_data.sum() for record in records[:2]))
        status = open("/proc/self/status").read()  # ru_maxrss would count what the parent had before exec
        print(status.split("VmHWM:")[1].split()[0])
    """)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "large.h5")], capture_output=True, text=True, check=False
    )
    *values, largest_kib = done.stdout.split()
    assert values == ["3000000", "7000.0", "0.0"], done.stderr
    assert int(largest_kib) < 1_000_000


def test_labels_are_not_lost_by_a_rescue(tmp_path: Path) -> None:
    from datasets.raw import open_raw
    from datasets.salvage import salvage

    file = write(tmp_path / "x.h5", data=np.arange(15).reshape(5, 3), label=np.arange(5))
    with pytest.raises(UsageError, match="cannot be salvaged"):
        salvage(open_raw(str(file)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def several(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """A list of two files with four data sets that belong together, and what does not."""
    arrays = {
        "data": np.random.default_rng(0).random((12, 3, 4, 5), np.float32),
        "label": np.arange(12) % 3,
        "box": np.random.default_rng(1).random((12, 2, 2), np.float32),
        "weight": np.linspace(0, 1, 12, dtype=np.float64),
    }
    for number in range(2):
        file = write(tmp_path / f"{number}.h5", **{top: array[6 * number :][:6] for top, array in arrays.items()})
        with h5py.File(file, "a") as opened:
            opened["names"], opened["deep/down"], opened["ids"] = [b"a"] * 6, np.zeros(6), np.zeros(4)
    (tmp_path / "list.txt").write_text("0.h5\n1.h5\n")
    return tmp_path / "list.txt", arrays


def test_commands_know_every_data_set(several: tuple[Path, dict[str, np.ndarray]], capsys: Any) -> None:
    path, arrays = several
    out = path.parent / "out.npz"
    assert export.main([str(path), str(out), "--to", "npz"]) == 0
    assert "data, label, box, weight; numpy.load reads them" in capsys.readouterr().out
    with np.load(out) as read:
        assert set(read) == set(arrays)
        for top, array in arrays.items():
            np.testing.assert_array_equal(read[top], array.astype(np.float32))
    for kind in ("images", "parquet"):
        with pytest.raises(UsageError, match="rows of numbers"):
            export.main([str(path), str(path.parent / "other"), "--to", kind])
    assert inspect.main([str(path), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["data_sets"] == {"data": [3, 4, 5], "label": [], "box": [2, 2], "weight": []}
    assert (seen["labels"]["vectors"], seen["labels"]["absent"]) == (12, 0)
    left = "data sets left alone: deep (no rows of numbers), ids (4 rows, data has 6), names (no rows of numbers)"
    assert seen["warnings"] == [left]
    assert inspect.main([str(path)]) == 0
    assert "data 3x4x5, label one number, box 2x2, weight one number" in capsys.readouterr().out
    assert verify.main([str(path), "--json"]) == 0
    assert left in json.loads(capsys.readouterr().out)["warnings"]
    assert mean.main([str(path), str(path.parent / "mean.binaryproto")]) == 0


@pytest.mark.parametrize("top", ["data", "label", "box"])
def test_what_is_not_finite_is_told_in_whatever_data_set_it_lies(
    several: tuple[Path, dict[str, np.ndarray]], top: str, capsys: Any
) -> None:
    path, arrays = several
    with h5py.File(path.parent / "1.h5", "r+") as file:
        changed = arrays[top][6:].astype(np.float32)
        changed[3] = np.nan
        del file[top]
        file[top] = changed
    assert verify.main([str(path)]) == 0
    assert "1 records hold NaN or infinity, the first has key '0000000009'" in capsys.readouterr().out
    inspect.main([str(path), "--json"])
    assert any("NaN" in line for line in json.loads(capsys.readouterr().out)["warnings"])


def test_labels_are_counted_where_they_are_whole_and_never_made_up(tmp_path: Path, capsys: Any) -> None:
    file = write(tmp_path / "x.h5", data=np.ones((10, 3)), label=np.arange(10.0) % 2)
    inspect.main([str(file), "--json"])
    assert json.loads(capsys.readouterr().out)["labels"]["counts"] == {"0": 5, "1": 5}
    verify.main([str(file)])
    assert "no label" not in capsys.readouterr().out
    write(tmp_path / "y.h5", features=np.ones((10, 3)))
    inspect.main([str(tmp_path / "y.h5"), "--json"])
    labels = json.loads(capsys.readouterr().out)["labels"]
    assert (labels["present"], labels["absent"]) == (0, 10)


def test_no_rescue_is_offered_where_there_is_none(tmp_path: Path, capsys: Any) -> None:
    file = write(tmp_path / "x.h5", label=np.arange(400))
    with h5py.File(file, "a") as opened:
        opened.create_dataset("data", data=np.arange(40000).reshape(400, 100), chunks=(10, 100), compression="gzip")
        chunk = opened["data"].id.get_chunk_info(20)
    with open(file, "r+b") as raw:
        raw.seek(chunk.byte_offset)
        raw.write(bytes(chunk.size))
    assert verify.main([str(file)]) == 1
    told = capsys.readouterr().out
    assert "NOT FINE" in told
    assert "--salvage" not in told
