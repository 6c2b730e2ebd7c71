"""Parquet and WebDataset archives: what is read, what is refused, and that nothing leaves an archive."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from datasets import convert_inputs, convert_stream, convert_tar, convert_work, datum
from datasets.manifest import read_manifest
from datasets.source import open_source
from profiler.errors import StallscopeError
from tests.datasets import golden
from tests.datasets.converting import damaged, pairs, records, run


def png(value: int) -> bytes:
    """A 3 x 2 image whose every byte is ``value``."""
    buffer = io.BytesIO()
    Image.new("RGB", (3, 2), (value, value, value)).save(buffer, "PNG")
    return buffer.getvalue()


def found(out: Path) -> list[tuple[str, int, int]]:
    """Key, first byte and label of every record."""
    parsed = [(record.key.decode(), datum.parse(record.value)) for record in records(out)]
    return [(key, value.data[0], value.label) for key, value in parsed]  # type: ignore[misc]


def samples(out: Path) -> list[tuple[str, int, int]]:
    """The same without the numbers, sorted."""
    return sorted((key[8:], value, label) for key, value, label in found(out))


# ------------------------------------------------------------------------------------------------------------- Parquet

STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def parquet(path: Path, images: list[Any], kind: pa.DataType, **columns: Any) -> Path:
    table = pa.table({"image": pa.array(images, kind), **columns})
    pq.write_table(table, path, row_group_size=7)
    return path


@pytest.mark.parametrize("shuffle", ["off", "3"])
def test_images_as_bytes_as_hugging_face_writes_them_and_as_paths(tmp_path: Path, shuffle: str) -> None:
    labels = list(range(20))
    (tmp_path / "files").mkdir()
    for label in labels:
        (tmp_path / "files" / f"{label}.png").write_bytes(png(label))
    stored = [png(label) for label in labels]
    structs = [{"bytes": stored[label], "path": f"{label}.png"} for label in labels]
    structs[4] = {"bytes": None, "path": "files/4.png"}
    cases: dict[str, tuple[list[Any], pa.DataType, str]] = {
        "bytes": (stored, pa.binary(), ""),
        "large": (stored, pa.large_binary(), ""),
        "struct": (structs, STRUCT, "_{0}.png"),
        "paths": ([f"files/{label}.png" for label in labels], pa.string(), "_files/{0}.png"),
    }
    for name, (images, kind, suffix) in cases.items():
        file = parquet(tmp_path / f"{name}.parquet", images, kind, label=labels)
        assert run("parquet", file, tmp_path / name, "--shuffle", shuffle) == 0
        expected = [(suffix.format(label), label, label) for label in labels]
        if name == "struct":
            expected[4] = ("_files/4.png", 4, 4)
        assert samples(tmp_path / name) == sorted(expected)
        assert [key[:8] for key, _, _ in found(tmp_path / name)] == [f"{place:08d}" for place in range(20)]
        in_order = [value for _, value, _ in found(tmp_path / name)] == labels
        assert in_order == (shuffle == "off")
        with open_source(tmp_path / name) as source:
            assert damaged(source) == []
    assert not list(tmp_path.glob(".*"))


def test_columns_are_found_named_and_their_classes_known(tmp_path: Path) -> None:
    about = {"info": {"features": {"fine_label": {"_type": "ClassLabel", "names": ["cat", "dog"]}}}}
    table = pa.table({"img": [png(1), png(2)], "fine_label": pa.array([1, 0], pa.int8()), "other": [5, 6]})
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(about)}), tmp_path / "in.parquet")
    run("parquet", tmp_path / "in.parquet", tmp_path / "out", "--shuffle", "off")
    assert found(tmp_path / "out") == [("00000000", 1, 1), ("00000001", 2, 0)]
    told = read_manifest(tmp_path / "out")
    assert told is not None
    assert told.classes == ["cat", "dog"]
    run("parquet", tmp_path / "in.parquet", tmp_path / "named", "--label-column", "other", "--shuffle", "off")
    assert [label for _, _, label in found(tmp_path / "named")] == [5, 6]


@pytest.mark.parametrize("how", ["folder", "glob", "braces", "several"])
def test_several_files_are_one_source(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for part in range(3):
        images = [png(part * 10 + index) for index in range(5)]
        parquet(folder / f"train-0{part}.parquet", images, pa.binary(), label=[part] * 5)
    sources = {
        "folder": [folder],
        "glob": [folder / "train-*.parquet"],
        "braces": [str(folder / "train-{00..02}.parquet")],
        "several": [folder / f"train-0{part}.parquet" for part in range(3)],
    }[how]
    assert run("parquet", *sources, tmp_path / "out", "--shuffle", "off") == 0
    assert [(value, label) for _, value, label in found(tmp_path / "out")] == [
        (part * 10 + index, part) for part in range(3) for index in range(5)
    ]


@pytest.mark.parametrize(
    ("columns", "flags", "message"),
    [
        (
            {"image": [b"x"], "kind": [1]},
            [],
            r"no column that looks like the label(.|\n)*kind \(int64\)(.|\n)*--label-",
        ),
        ({"data": [b"x"], "label": [1]}, [], r"no column that looks like the image(.|\n)*--image-column"),
        ({"image": [b"x"], "label": [1]}, ["--image-column", "no"], "has no column 'no'"),
        ({"image": [1.5], "label": [1]}, [], r"'image' holds no images(.|\n)*found:    double"),
        ({"image": [b"x"], "label": [1.5]}, [], r"'label' holds no whole numbers(.|\n)*found:    double"),
        (
            {"image": [b"x"], "label": ["cat"]},
            [],
            r"'label' holds no whole numbers(.|\n)*string(.|\n)*number the classes",
        ),
        ({"image": pa.array([], pa.binary()), "label": pa.array([], pa.int32())}, [], "has no rows"),
    ],
)
def test_columns_that_do_not_fit(tmp_path: Path, columns: dict[str, Any], flags: list[str], message: str) -> None:
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    with pytest.raises(convert_inputs.InputError, match=message):
        run("parquet", tmp_path / "in.parquet", tmp_path / "out", *flags)
    assert [path.name for path in tmp_path.iterdir()] == ["in.parquet"]


def test_files_that_are_cut_or_no_parquet_or_not_there(tmp_path: Path) -> None:
    file = parquet(tmp_path / "in.parquet", [png(1)] * 30, pa.binary(), label=[1] * 30)
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b"hello", b""):
        file.write_bytes(content)
        with pytest.raises(convert_inputs.InputError, match="not a readable Parquet file"):
            run("parquet", file, tmp_path / "out")
    with pytest.raises(convert_inputs.InputError, match="the source does not exist"):
        run("parquet", tmp_path / "nothing.parquet", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        convert_inputs.InputError, match=r"does not exist or is empty(.|\n)*nothing in the folder .*empty"
    ):
        run("parquet", tmp_path / "empty", tmp_path / "out")
    with pytest.raises(convert_inputs.InputError, match="2 of the source's files do not exist"):
        run("parquet", file, str(tmp_path / "in-{0..1}.parquet"), tmp_path / "out")
    with pytest.raises(convert_inputs.InputError, match="more than once"):
        run("parquet", file, file, tmp_path / "out")


def test_damage_inside_a_file_is_one_item_and_the_next_file_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    file = parquet(folder / "a.parquet", [os.urandom(500) for _ in range(40)], pa.binary(), label=[1] * 40)
    content = bytearray(file.read_bytes())
    content[4:200] = bytes(196)
    file.write_bytes(content)
    parquet(folder / "b.parquet", [png(5)], pa.binary(), label=[2])
    with pytest.raises(convert_inputs.InputError, match=r"a\.parquet: nothing can be read after row 0"):
        run("parquet", folder, tmp_path / "out")
    assert run("parquet", folder, tmp_path / "out", "--on-error", "skip") == 1
    assert samples(tmp_path / "out") == [("", 5, 2)]


@pytest.mark.parametrize("shuffle", ["off", "1"])
def test_rows_that_cannot_be_used_are_told_by_number(tmp_path: Path, shuffle: str) -> None:
    images: list[Any] = [{"bytes": png(value), "path": None} for value in range(6)]
    images[1] = {"bytes": b"no image", "path": None}
    images[2] = None
    images[3] = {"bytes": None, "path": "gone.png"}
    file = parquet(tmp_path / "in.parquet", images, STRUCT, label=pa.array([0, 1, 2, 3, None, 2**31], pa.int64()))
    with pytest.raises(StallscopeError, match=r"in\.parquet, row \d"):
        run("parquet", file, tmp_path / "out", "--shuffle", shuffle)
    assert run("parquet", file, tmp_path / "out", "--shuffle", shuffle, "--on-error", "skip") == 1
    assert samples(tmp_path / "out") == [("", 0, 0)]
    told = read_manifest(tmp_path / "out")
    assert told is not None
    reasons = sorted(reason.split("in.parquet, ")[1] for reason in told.skipped)
    assert [reason[:30] for reason in reasons] == [
        "row 1: no image file",
        "row 2: the image is missing",
        f"row 3: {tmp_path}/gone.png: No such file"[:30],
        "row 4: the label is missing",
        "row 5: the label 2147483648 do",
    ]


# ---------------------------------------------------------------------------------------------------------- WebDataset


def member(name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "") -> tuple[Any, bytes]:
    about = tarfile.TarInfo(name)
    about.size, about.type, about.linkname = len(content), kind, link
    return about, content


def shard(path: Path, members: list[tuple[Any, bytes]], packed: bool = False) -> Path:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for about, content in members:
            archive.addfile(about, io.BytesIO(content))
    path.write_bytes(gzip.compress(buffer.getvalue(), mtime=0) if packed else buffer.getvalue())
    return path


def good(first: int, count: int, label: str = "cls") -> list[tuple[Any, bytes]]:
    members = []
    for number in range(first, first + count):
        text = str(number) if label == "cls" else json.dumps({"label": number, "caption": "x"})
        members += [
            member(f"./d/{number:04d}.meta.txt", b"ignored"),
            member(f"./d/{number:04d}.{label}", text.encode()),
            member(f"./d/{number:04d}.PNG", png(number)),
        ]
    return members


@pytest.mark.parametrize("packed", [False, True], ids=["tar", "gz"])
@pytest.mark.parametrize("shuffle", ["off", "4"])
@pytest.mark.parametrize("label", ["cls", "json"])
def test_samples_of_several_archives(tmp_path: Path, packed: bool, shuffle: str, label: str) -> None:
    ending = "tar.gz" if packed else "tar"
    for number in range(3):
        shard(tmp_path / f"s-00{number}.{ending}", good(number * 10, 10, label), packed)
    source = str(tmp_path / f"s-{{000..002}}.{ending}")
    assert run("tar", source, tmp_path / "out", "--shuffle", shuffle) == 0
    assert samples(tmp_path / "out") == [(f"_d/{number:04d}.png", number, number) for number in range(30)]
    values = [value for _, value, _ in found(tmp_path / "out")]
    assert (values == list(range(30))) == (shuffle == "off")
    assert not list(tmp_path.glob(".*"))
    run("tar", source, tmp_path / "two", "--shuffle", shuffle, "--workers", "2", "--backend", "leveldb")
    assert pairs(tmp_path / "two") == pairs(tmp_path / "out")


@pytest.mark.parametrize("packed", [False, True], ids=["tar", "gz"])
def test_unsafe_members_are_ignored_and_told_and_nothing_is_unpacked(tmp_path: Path, packed: bool, capsys) -> None:
    (tmp_path / "in").mkdir()
    hostile = [
        member("../evil.png", png(66)), member("../evil.cls", b"1"),
        member("/tmp/evil.png", png(66)), member("a/../../evil.png", png(66)),
        member("0001.png", kind=tarfile.SYMTYPE, link="/etc/passwd"),
        member("0002.png", kind=tarfile.LNKTYPE, link="0000.png"),
        member("0003.png", kind=tarfile.FIFOTYPE), member("0004.png", kind=tarfile.CHRTYPE),
        member("folder", kind=tarfile.DIRTYPE),
    ]  # fmt: skip
    file = shard(tmp_path / "in" / "s.tar", [*good(0, 1), *hostile, *good(7, 1)], packed)
    for shuffle in ("off", "1"):
        assert run("tar", file, tmp_path / "out", "--shuffle", shuffle, "--force") == 1
        assert samples(tmp_path / "out") == [("_d/0000.png", 0, 0), ("_d/0007.png", 7, 7)]
        told = capsys.readouterr().out
        assert "SKIPPED 8:" in told
        assert "'../evil.png' was ignored: its path leads out of the archive" in told
        assert "'0001.png' was ignored: a link" in told
        assert "'0003.png' was ignored: not a plain file" in told
    names = {path.name for path in tmp_path.rglob("*")}
    assert names == {"in", "s.tar", "out", "data.mdb", "out.manifest.json", "out.crc32"}


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ([member("a.png", png(1))], "a has no label: neither .cls nor .json"),
        ([member("a.cls", b"1")], "a has no image"),
        ([member("a.png", png(1)), member("a.cls", b"2.5")], "a.cls holds no whole number: '2.5'"),
        ([member("a.png", png(1)), member("a.cls", b"4294967296")], "does not fit into 32 bits"),
        ([member("a.png", png(1)), member("a.cls", b"9" * 5000)], "a.cls holds a number of 5000 characters"),
        ([member("a.png", png(1)), member("a.json", b"{")], "a.json is no JSON"),
        ([member("a.png", png(1)), member("a.json", b"[" * 200_000)], "a.json is no JSON"),
        ([member("a.png", png(1)), member("a.json", b'{"class": 1}')], "has no key 'label' .--label-key., but: class"),
        ([member("a.png", png(1)), member("a.json", b'{"label": true}')], "the label is not a whole number: True"),
        (
            [member("a.png", png(1)), member("a.jpg", png(1)), member("a.cls", b"1")],
            "several images .png, jpg.*--image",
        ),
        ([member("a.png", png(1)), member("a.png", png(2)), member("a.cls", b"1")], "a.png is there twice"),
        ([member("a.png", png(1)), member("b.cls", b"1")], "a has no label"),
        ([member("a.png", b"nothing"), member("a.cls", b"1")], "a.png: no image file"),
    ],
)
@pytest.mark.parametrize("shuffle", ["off", "1"])
def test_samples_that_cannot_be_used(tmp_path: Path, members: list[Any], told: str, shuffle: str) -> None:
    file = shard(tmp_path / "s.tar", [*members, *good(3, 1)])
    with pytest.raises(StallscopeError, match=told):
        run("tar", file, tmp_path / "out", "--shuffle", shuffle)
    assert not (tmp_path / "out").exists()
    # An index is kept, since reading a large source again takes long; it holds the images, and is told to be there.
    kept = [".out.convert"] if shuffle != "off" and "no image file" in told else []
    assert sorted(path.name for path in tmp_path.iterdir()) == [*kept, "s.tar"]
    assert run("tar", file, tmp_path / "out", "--shuffle", shuffle, "--on-error", "skip") == 1
    assert samples(tmp_path / "out") == [("_d/0003.png", 3, 3)]


def test_one_of_several_images_and_another_key_can_be_chosen(tmp_path: Path) -> None:
    members = [
        member("a.left.png", png(1)), member("a.right.png", png(2)), member("a.json", b'{"class": 8}'),
        member("b.json", b"9"), member("b.left.png", png(3)), member("b.right.png", png(4)),
    ]  # fmt: skip
    file = shard(tmp_path / "s.tar", members)
    run("tar", file, tmp_path / "out", "--image", ".Right.png", "--label-key", "class", "--shuffle", "off")
    assert found(tmp_path / "out") == [("00000000_a.right.png", 2, 8), ("00000001_b.right.png", 4, 9)]


@pytest.mark.parametrize("packed", [False, True], ids=["tar", "gz"])
@pytest.mark.parametrize("shuffle", ["off", "1"])
def test_a_cut_or_damaged_archive_is_told_and_never_taken_for_a_short_one(
    tmp_path: Path, packed: bool, shuffle: str
) -> None:
    whole = shard(tmp_path / "s.tar", good(0, 6)).read_bytes()
    end = max(index for index in range(0, len(whole), 512) if whole[index : index + 512].strip(b"\0")) + 512
    cuts = [whole[: end - 1600], whole[: end - 1024], whole[:end], whole[:5000]]
    broken = bytearray(whole)
    broken[6 * 512 : 6 * 512 + 100] = b"\xff" * 100  # the header of a later member
    for content in [*cuts, bytes(broken), b"\0" * 100, b"no archive at all" * 100]:
        (tmp_path / "s.tar").write_bytes(gzip.compress(content, mtime=0) if packed else content)
        with pytest.raises(StallscopeError, match=r"s\.tar.* (is damaged or cut|was cut)"):
            run("tar", tmp_path / "s.tar", tmp_path / "out", "--shuffle", shuffle)
        assert not (tmp_path / "out").exists()
        # In source order, what comes before the damage is stored already, and kept for a run that skips the rest.
        kept = convert_work.folder_of(tmp_path / "out")
        assert not kept.exists() or (shuffle == "off" and (kept / "db" / "data.mdb").exists())
    if packed:
        (tmp_path / "s.tar").write_bytes(gzip.compress(whole, mtime=0)[:-400])
        with pytest.raises(StallscopeError, match="is damaged or cut"):
            run("tar", tmp_path / "s.tar", tmp_path / "out", "--shuffle", shuffle)


def test_a_label_of_many_zeros_is_the_number_it_says(tmp_path: Path) -> None:
    file = shard(tmp_path / "s.tar", [member("a.png", png(1)), member("a.cls", b"0" * 22 + b"7")])
    assert run("tar", file, tmp_path / "out") == 0
    assert samples(tmp_path / "out") == [("_a.png", 1, 7)]


@pytest.mark.parametrize("packed", [False, True], ids=["tar", "gz"])
@pytest.mark.parametrize("shuffle", ["off", "1"])
def test_a_sample_that_is_whole_before_the_damage_is_kept(tmp_path: Path, packed: bool, shuffle: str, capsys) -> None:
    whole = shard(tmp_path / "s.tar", good(0, 3)).read_bytes()
    end = max(index for index in range(0, len(whole), 512) if whole[index : index + 512].strip(b"\0")) + 512
    kept, lost = "cut after the sample d/0002: ", "cut in or after the sample d/0002, which is left out: "
    cases = {"mark": (whole[:end], 3), "header": (whole[:end] + b"\xff" * 512, 3), "image": (whole[: end - 512], 2)}
    for name, (content, count) in cases.items():
        file = tmp_path / f"{name}.tar"
        file.write_bytes(gzip.compress(content, mtime=0) if packed else content)
        assert run("tar", file, tmp_path / name, "--shuffle", shuffle, "--on-error", "skip") == 1
        told = capsys.readouterr().out
        assert (kept if count == 3 else lost) in told
        assert samples(tmp_path / name) == [(f"_d/{number:04d}.png", number, number) for number in range(count)]


def test_one_reason_for_many_samples_is_told_once(tmp_path: Path) -> None:
    file = shard(tmp_path / "s.tar", [*good(0, 30, "json"), member("x.json", b"{"), member("x.png", png(1))])
    with pytest.raises(StallscopeError) as caught:
        run("tar", file, tmp_path / "out", "--label-key", "zzz")
    assert str(caught.value).splitlines()[:4] == [
        f"{file}: 31 problems; nothing was written",
        "  30 times: .json has no key 'zzz' (--label-key), but: label, caption",
        f"    at {', '.join(f'{file}: d/{number:04d}' for number in range(5))} and 25 more",
        f"  {file}: x.json is no JSON",
    ]


def test_of_samples_torn_apart_it_is_said_that_files_must_follow_one_another(tmp_path: Path) -> None:
    images = [member(f"{number}.png", png(number)) for number in range(8)]
    file = shard(tmp_path / "s.tar", [*images, *[member(f"{number}.cls", b"1") for number in range(8)]])
    with pytest.raises(StallscopeError) as caught:
        run("tar", file, tmp_path / "out")
    told = str(caught.value)
    assert told.count("the files of one sample must follow one another") == 2
    assert "8 times: has no label" in told
    assert "8 times: has no image" in told


def test_an_index_alone_is_not_told_to_be_records(tmp_path: Path) -> None:
    file = shard(tmp_path / "s.tar", [member("a.png", b"nothing"), member("a.cls", b"1")])
    with pytest.raises(
        StallscopeError, match="no record is stored yet, only the index of the samples is kept"
    ) as caught:
        run("tar", file, tmp_path / "out")
    assert "records are kept" not in str(caught.value)


def test_headers_that_claim_a_great_size_read_little(tmp_path: Path, monkeypatch) -> None:
    """An extended header and an image of 40 MB in a few kB of gzip: refused before they are read."""
    monkeypatch.setattr(convert_tar, "MAX_FILE_BYTES", 1 << 20)
    bombs = {"is damaged or cut": "x", "is larger than": "0"}
    for told, kind in bombs.items():
        about = tarfile.TarInfo("a.png")
        about.size, about.type = 40 << 20, kind.encode()
        content = about.tobuf(tarfile.USTAR_FORMAT) + bytes(about.size) + bytes(1024)
        with gzip.open(tmp_path / "s.tar.gz", "wb", compresslevel=1) as file:
            file.write(content)
        with pytest.raises(StallscopeError, match=told):
            run("tar", tmp_path / "s.tar.gz", tmp_path / "out")


@pytest.mark.parametrize("shuffle", ["off", "1"])
def test_a_stream_goes_on_after_a_kill(tmp_path: Path, shuffle: str) -> None:
    """Killed while the index is made, after it, and while records are written; with an ignored and a broken member."""
    members = [
        *good(0, 20),
        member("../x.png", png(1)),
        member("c.png", b"broken"),
        member("c.cls", b"1"),
        *good(20, 20),
    ]
    file = shard(tmp_path / "s.tar.gz", members, packed=True)
    arguments = ["tar", file, tmp_path / "out", "--shuffle", shuffle, "--on-error", "skip"]
    assert run(*arguments[:2], tmp_path / "whole", *arguments[3:]) == 1

    def dies(module: Any, name: str, call: int) -> None:
        original, calls = getattr(module, name), 0

        def die(*about: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                os._exit(77)
            return original(*about, **options)

        setattr(module, name, die)
        from datasets import writer

        writer.COMMIT_RECORDS = 4
        run(*arguments)

    steps: list[tuple[Any, str, int]] = [(convert_stream, "image_datum", 1), (convert_stream, "image_datum", 15)]
    if shuffle != "off":
        steps = [(convert_stream, "_append", 10), (convert_stream.os, "replace", 1), *steps]
    for module, name, call in steps:
        assert golden.in_child(lambda about=(module, name, call): dies(*about)) == 77, (name, call)
    assert (convert_work.folder_of(tmp_path / "out") / "samples" / "index").exists() == (shuffle != "off")
    assert run(*arguments) == 1
    assert pairs(tmp_path / "out") == pairs(tmp_path / "whole")
    assert read_manifest(tmp_path / "out") == read_manifest(tmp_path / "whole")
    assert len(pairs(tmp_path / "out")) == 40


def test_patterns() -> None:
    assert convert_stream._braces("a-{08..11}.{tar,tgz}") == [
        f"a-{number}.{end}" for number in ("08", "09", "10", "11") for end in ("tar", "tgz")
    ]
    assert convert_stream._braces("{9..10}") == ["9", "10"]
    assert convert_stream._braces("no{braces") == ["no{braces"]
    with pytest.raises(convert_inputs.InputError, match="too many"):
        convert_stream._braces("{0..9999999999}")


def test_memory_does_not_grow_with_the_number_of_samples(tmp_path: Path) -> None:
    """tarfile remembers every member unless told not to."""
    file = shard(tmp_path / "s.tar", good(0, 200))
    seen = []
    for archive, _, _ in convert_tar._members(file):
        seen.append(len(archive.members))  # type: ignore[attr-defined]
    assert len(seen) == 600
    assert max(seen) <= 1
