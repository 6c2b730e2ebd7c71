"""List files: which lines are taken, what their labels may be, and what is told of lines that cannot be used."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datasets import convert_inputs, datum
from datasets.manifest import read_manifest
from datasets.source import open_source
from profiler.errors import UsageError
from tests.datasets.converting import damaged, picture, records, run


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("a.png 2.7272", "the label 2.7272 is not a whole number; Caffe would cut it off .*--label-db OUT2"),
        ("a.png 1e3", "the label 1e3 is not a whole number"),
        ("a.png", "no label after the path: 'a.png'"),
        ("a b.png", "no label after the path: 'a b.png'"),
        ("7", "no label after the path: '7'"),
        ("a.png cat", "the label 'cat' is not a whole number"),
        ("a.png 2147483648", "the label 2147483648 does not fit into 32 bits"),
        ("a.png -2147483649", "does not fit"),
        ("a.png \u0663", "is not a whole number"),
        ("b.png 1", "b.png: No such file or directory$"),
        ("a.png 1 2", "a.png 1: No such file or directory; if the line ends with several labels: --label-db OUT2"),
        (". 1", "is a folder"),
        ("pipe 1", "is no plain file"),
        ("empty.png 1", "empty.png is empty"),
        ("d" * 300 + ".png 1", "File name too long"),
    ],
)
def test_lines_that_cannot_be_used_are_told_by_number(tmp_path: Path, line: str, told: str) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "empty.png").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "list.txt").write_text(f"a.png 1\n\n{line}\na.png 2\n")
    with pytest.raises(convert_inputs.InputError, match=f"(?m)1 problem; nothing was written\n  line 3: .*{told}"):
        run("list", tmp_path / "list.txt", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "empty.png", "pipe", "list.txt"}
    assert run("list", tmp_path / "list.txt", tmp_path / "out", "--on-error", "skip", "--shuffle", "off") == 1
    assert [record.key[:8] for record in records(tmp_path / "out")] == [b"00000000", b"00000002"]
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest.skipped_count == 1
    assert "list.txt, line 3: " in manifest.skipped[0]


def test_all_problems_of_a_list_are_told_at_once_up_to_a_limit(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    lines = [f"missing{index}.png 0" if index % 2 else "a.png 0.5" for index in range(50)]
    (tmp_path / "list.txt").write_text("\n".join(lines))
    with pytest.raises(convert_inputs.InputError) as caught:
        run("list", tmp_path / "list.txt", tmp_path / "out")
    told = str(caught.value).splitlines()
    assert told[0].endswith("50 problems; nothing was written")
    assert [line for line in told if line.startswith("  line")][18:] == [
        told[19],
        f"  line 20: {tmp_path}/missing19.png: No such file or directory",
    ]
    assert "  and 30 more" in told


def test_what_a_list_hides_is_noted(tmp_path: Path, capsys) -> None:
    for name in ("a.png", "b.png", "c.png"):
        picture(tmp_path / name)
    (tmp_path / "root").mkdir()
    lines = [f"{tmp_path}/a.png 1", f"{tmp_path}/b.png -1", f"{tmp_path}/a.png 1", f"{tmp_path}/a.png 2"]
    (tmp_path / "list.txt").write_text("\n".join(lines))
    assert run("list", tmp_path / "list.txt", tmp_path / "out", "--root", tmp_path / "root") == 0
    told = capsys.readouterr().err
    assert "note: negative labels (Caffe's losses take one only as ignore_label), at line: 2\n" in told
    assert "note: paths that begin with / and so not at --root, at line: 1, 2, 3, 4\n" in told
    assert "note: paths that were there before, at line: 3 (as 1)\n" in told
    assert "note: paths that were there before with another label, at line: 4 (as 3)\n" in told
    assert len(records(tmp_path / "out")) == 4


def test_marks_and_line_ends_of_windows_are_no_part_of_a_path(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "list.txt").write_bytes(b"\xef\xbb\xbfa.png 1\r\n\r\n  a.png 2  \r\n")
    run("list", tmp_path / "list.txt", tmp_path / "out", "--shuffle", "off")
    assert [record.key for record in records(tmp_path / "out")] == [b"00000000_a.png", b"00000001_a.png"]
    (tmp_path / "wide.txt").write_bytes("a.png 1\n".encode("utf-16"))
    with pytest.raises(convert_inputs.InputError, match=r"UTF-16(.|\n)*iconv"):
        run("list", tmp_path / "wide.txt", tmp_path / "other")
    (tmp_path / "binary.txt").write_bytes(b"a.png 1\nPK\0\0")
    with pytest.raises(convert_inputs.InputError, match="is no text: line 2 holds a zero byte"):
        run("list", tmp_path / "binary.txt", tmp_path / "other")
    (tmp_path / "none.txt").write_text("\n \n")
    with pytest.raises(convert_inputs.InputError, match="is empty"):
        run("list", tmp_path / "none.txt", tmp_path / "other")
    with pytest.raises(convert_inputs.InputError, match="cannot be read"):
        run("list", tmp_path / "nothing.txt", tmp_path / "other")


def test_names_are_bytes_and_may_hold_what_other_systems_end_lines_with(tmp_path: Path) -> None:
    names = [b"gr\xfcn.png", "a\u2028b.png".encode(), b"c\x0bd.png"]
    for name in names:
        with open(os.path.join(os.fsencode(tmp_path), name), "wb") as file:
            Image.new("RGB", (2, 2)).save(file, "PNG")
    (tmp_path / "list.txt").write_bytes(b"".join(name + b" 3\n" for name in names))
    run("list", tmp_path / "list.txt", tmp_path / "out", "--shuffle", "off")
    assert [record.key[9:] for record in records(tmp_path / "out")] == names


def test_lists_may_have_spaces_tabs_signs_and_a_root(tmp_path: Path) -> None:
    picture(tmp_path / "root" / "a b.png")
    (tmp_path / "list.txt").write_bytes(b"a b.png -1\r\na b.png\t300\n")
    assert run("list", tmp_path / "list.txt", tmp_path / "out", "--root", tmp_path / "root", "--shuffle", "off") == 0
    made = records(tmp_path / "out")
    assert [record.key for record in made] == [b"00000000_a b.png", b"00000001_a b.png"]
    assert [datum.parse(record.value).label for record in made] == [-1, 300]


def test_a_list_whose_paths_begin_in_the_working_folder_is_told_the_flag_for_it(tmp_path: Path, monkeypatch) -> None:
    picture(tmp_path / "pictures" / "a.png")
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "train.txt").write_text("pictures/a.png 1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(convert_inputs.InputError, match=r"No such file(.|\n)*try: .*--root \."):
        run("list", "lists/train.txt", "out")
    assert run("list", "lists/train.txt", "out", "--root", ".") == 0
    (tmp_path / "lists" / "train.txt").write_text("nowhere/a.png 1\n")
    with pytest.raises(convert_inputs.InputError, match="correct the list"):
        run("list", "lists/train.txt", "out2")


@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
def test_several_labels_go_into_a_database_of_their_own(tmp_path: Path, backend: str, capsys) -> None:
    for index in range(40):
        picture(tmp_path / f"im {index}.png", (index, 0, 0))
    lines = [f"im {index}.png {index} {index / 8} -1e-3\n" for index in range(40)]
    (tmp_path / "list.txt").write_text("".join(lines))
    arguments = ["list", tmp_path / "list.txt", tmp_path / "out", "--label-db", tmp_path / "two", "--backend", backend]
    assert run(*arguments) == 0
    assert f"labels, under the same keys: {tmp_path / 'two'}" in capsys.readouterr().out
    images, labels = records(tmp_path / "out"), records(tmp_path / "two")
    assert [record.key for record in images] == [record.key for record in labels]
    for image, record in zip(images, labels, strict=True):
        index = datum.parse(image.value).data[-1]  # a pixel of red
        parsed = datum.parse(record.value)
        assert parsed.float_data is not None
        assert parsed.float_data.tolist() == np.array([index, index / 8, -1e-3], np.float32).tolist()
        assert (parsed.channels, parsed.height, parsed.width, parsed.label) == (3, 1, 1, None)
        assert datum.parse(image.value).label is None
    for name in ("out", "two"):
        with open_source(tmp_path / name) as source:
            assert damaged(source) == []
    (tmp_path / "list.txt").write_text("".join(lines) + "im 0.png 1 2\nim 1.png 1 x 3\n")
    with pytest.raises(
        convert_inputs.InputError, match=r"2 problems(.|\n)*line 41 ends with 2 numbers, line 1 with 3(.|\n)*line 42"
    ):
        run(*arguments, "--force")
    assert len(records(tmp_path / "two")) == 40
    (tmp_path / "list.txt").write_text("\n" + "".join(lines) + "im 0.png 1 2 3 4\n")
    with pytest.raises(
        convert_inputs.InputError, match=r"line 42 ends with 4 numbers, line 2 with 3: 'im 0\.png 1 2 3 4'"
    ):
        run(*arguments, "--force")


def test_a_path_that_ends_with_a_number_is_not_taken_for_another_count_of_labels(tmp_path: Path) -> None:
    picture(tmp_path / "im.png").rename(tmp_path / "im 4")
    (tmp_path / "list.txt").write_text("im 4 1 2\nim 5 1 2\n")
    with pytest.raises(convert_inputs.InputError, match=r"line 2: .*im 5: No such file"):
        run("list", tmp_path / "list.txt", tmp_path / "out", "--label-db", tmp_path / "two")


def test_a_database_of_labels_needs_numbers_and_a_place_beside_the_images(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "list.txt").write_text("a.png\n")
    with pytest.raises(convert_inputs.InputError, match="ends with no number"):
        run("list", tmp_path / "list.txt", tmp_path / "out", "--label-db", tmp_path / "two")
    (tmp_path / "list.txt").write_text("a.png 0.5\n")
    (tmp_path / "sub").mkdir()
    with pytest.raises(UsageError, match="must lie beside"):
        run("list", tmp_path / "list.txt", tmp_path / "out", "--label-db", tmp_path / "sub" / "two")
    with pytest.raises(UsageError, match="cannot go into one"):
        run("list", tmp_path / "list.txt", tmp_path / "out", "--label-db", tmp_path / "out")
    run("list", tmp_path / "list.txt", tmp_path / "out", "--label-db", tmp_path / "two")
    with pytest.raises(UsageError, match="two exists already"):
        run("list", tmp_path / "list.txt", tmp_path / "new", "--label-db", tmp_path / "two")
    assert not (tmp_path / "new").exists()


def test_a_set_in_blocks_of_classes_is_mixed(tmp_path: Path, capsys) -> None:
    for name in ("a.png", "b.png"):
        picture(tmp_path / name)
    (tmp_path / "list.txt").write_text("a.png 0\n" * 500 + "b.png 1\n" * 500)
    assert run("list", tmp_path / "list.txt", tmp_path / "out") == 0
    assert "shuffled with seed 1" in capsys.readouterr().out
    labels = [datum.parse(record.value).label for record in records(tmp_path / "out")]
    assert labels.count(1) == 500
    longest = max(len(list(group)) for _, group in itertools.groupby(labels))
    assert longest < 25  # of 1000 fair coins, about 10
    halves = sum(label or 0 for label in labels[:500])
    assert 200 < halves < 300
