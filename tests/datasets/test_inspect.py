import json
import subprocess
import sys

import lmdb
import numpy as np
import pytest

from datasets import datum, inspect, open_source, verify
from profiler.errors import UsageError
from tests.datasets import golden
from tests.fuzz.seeds import file, picture

KEYS = {"schema", "path", "backend", "records", "shapes", "encodings", "labels", "key_order", "warnings"}


def make(folder, items):
    with lmdb.open(str(folder), map_size=16 << 20) as env, env.begin(write=True) as txn:
        for key, value in items:
            txn.put(key, value)
    return folder


def raw(label, shape=(1, 2, 2)):
    channels, height, width = shape
    return datum.serialize(channels=channels, height=height, width=width, data=bytes(np.prod(shape)), label=label)


def examine(folder):
    with open_source(folder) as source:
        document = inspect.examine(source)
    json.dumps(document, allow_nan=False)
    assert set(document) >= KEYS
    return document


@pytest.mark.parametrize("name", golden.LMDBS + golden.LEVELDBS)
def test_golden_databases_are_described_as_they_are(name):
    document = examine(golden.DB / name)
    assert document["schema"] == 1
    assert document["records"] == golden.manifest()[name]["n"]
    assert document["backend"] == name.rsplit("_", 1)[1]
    assert document["bad"] == []
    assert sum(document["shapes"].values()) == sum(document["encodings"].values()) == document["records"]
    if len(golden.records(name)) == document["records"]:
        labels = [record["label"] for record in golden.records(name).values()]
        if document["labels"]["present"]:
            assert document["labels"]["counts"] == {str(label): labels.count(label) for label in sorted(set(labels))}
        else:
            assert set(labels) == {0}


def test_mnist():
    document = examine(golden.DB / "mnist_test_lmdb")
    assert document["shapes"] == {"1x28x28": 1000}
    assert document["encodings"] == {"raw": 1000}
    assert (document["labels"]["min"], document["labels"]["max"], document["labels"]["classes"]) == (0, 9, 10)
    order = {"order": "bytes", "first": "00000000", "last": "00000999", "numeric": True, "padded": True, "dense": True}
    assert document["key_order"] == order
    assert document["warnings"] == []
    assert 20 < document["channel_mean"][0] < 50


def test_encodings_and_modes_are_counted():
    document = examine(golden.DB / "crops24_encoded_native_lmdb")
    assert document["encodings"] == {"jpeg": 12, "png": 12}
    assert document["modes"] == {"RGB": 21, "L": 3}
    assert any("number of channels differs" in warning for warning in document["warnings"])
    assert document["key_order"]["numeric"] is False


def test_unpadded_numbers_are_warned_of(tmp_path):
    document = examine(make(tmp_path / "db", [(b"%d" % i, raw(i)) for i in range(12)]))
    assert any("un-padded integers" in warning for warning in document["warnings"])
    assert document["key_order"]["padded"] is False
    padded = examine(make(tmp_path / "padded", [(b"%08d" % i, raw(i)) for i in range(12)]))
    assert padded["warnings"] == []


def test_labels_in_long_blocks_are_warned_of(tmp_path):
    items = [(b"%s/%04d" % (b"B" if i >= 500 else b"A", i), raw(i // 500)) for i in range(1000)]
    blocks = examine(make(tmp_path / "blocks", items))
    (warning,) = blocks["warnings"]
    assert "grouped by label: 2 runs" in warning
    assert "the longest 500" in warning
    assert blocks["labels"]["expected_runs"] == pytest.approx(501)
    draw = np.random.default_rng(1).permutation(1000) // 500
    mixed = examine(make(tmp_path / "mixed", [(b"%04d" % i, raw(int(label))) for i, label in enumerate(draw)]))
    assert mixed["warnings"] == []
    assert mixed["labels"]["runs"] == 1 + int((np.diff(draw) != 0).sum())


def test_one_class_only_is_not_a_block(tmp_path):
    assert examine(make(tmp_path / "db", [(b"%04d" % i, raw(0)) for i in range(100)]))["warnings"] == []


def test_absent_labels_and_mixed_records_are_warned_of(tmp_path):
    png = file(picture("P"))
    items = [
        (b"0", raw(1)),
        (b"1", raw(2, (3, 2, 2))),
        (b"2", datum.serialize(data=png, encoded=True)),
        (b"3", datum.serialize(data=png, label=-5)),
    ]
    document = examine(make(tmp_path / "db", items))
    text = "\n".join(document["warnings"])
    for part in ("1 record without a label", "different shapes", "mixed: raw, png", "mode P", "without the flag"):
        assert part in text
    assert document["labels"]["absent"] == 1
    assert document["labels"]["min"] == -5
    assert document["modes"] == {"P": 2}


def test_bad_records_are_counted_and_named(tmp_path):
    items = [(b"%04d" % i, raw(1) if i % 2 else b"\x22\x7fshort") for i in range(60)]
    document = examine(make(tmp_path / "db", items))
    assert document["bad_records"] == 30
    assert len(document["bad"]) == 20
    assert document["bad"][1]["index"] == 2
    assert document["bad"][1]["key"] == "0002"
    assert "malformed at byte 0" in document["bad"][1]["reason"]
    assert sum(document["shapes"].values()) == 30


def test_an_empty_database(tmp_path):
    document = examine(make(tmp_path / "db", []))
    assert (document["records"], document["warnings"]) == (0, ["there are no records"])
    assert document["channel_mean"] is None


def test_channel_means_are_bgr(tmp_path):
    from PIL import Image

    red = datum.serialize(data=file(Image.new("RGB", (4, 4), (255, 0, 0))), encoded=True, label=0)
    assert examine(make(tmp_path / "db", [(b"%04d" % i, red) for i in range(100)]))["channel_mean"] == [0, 0, 255]


@pytest.mark.parametrize("name", ["mnist_test_lmdb", "crops96_raw_40x48_leveldb"])
def test_inspecting_leaves_the_folder_alone(tmp_path, name):
    folder = golden.copy(name, tmp_path)
    before = golden.snapshot(tmp_path)
    assert inspect.main([str(folder), "--json"]) == 0
    assert golden.snapshot(tmp_path) == before


def test_the_table_shows_what_a_person_asks_for(capsys):
    assert inspect.main([str(golden.DB / "mnist_test_lmdb")]) == 0
    shown = capsys.readouterr().out
    for part in ("1,000", "1x28x28", "raw", "0 to 9", "00000999", "lmdb"):
        assert part in shown


def test_markup_in_keys_is_shown_as_it_is(tmp_path, capsys):
    assert inspect.main([str(make(tmp_path / "db", [(b"[red]x[/red]", raw(1))]))]) == 0
    assert "[red]x[/red]" in capsys.readouterr().out


def test_json_of_bad_records_exits_with_one(tmp_path, capsys):
    folder = make(tmp_path / "db", [(b"a", b"\xff")])
    assert inspect.main([str(folder), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["bad_records"] == 1
    assert inspect.main([str(folder)]) == 1
    assert "bad" in capsys.readouterr().out


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "datasets.inspect", *map(str, arguments)],
        cwd=golden.DB.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_line(tmp_path):
    done = run("memory:records=10,shape=1x4x4", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["shapes"] == {"1x4x4": 10}
    for arguments, text in (
        (["/no/such/place"], "there is no data set at /no/such/place"),
        ([""], "is empty"),
        ([tmp_path], "is empty"),
        ([golden.DB / "mnist_test_lmdb", "--backend", "leveldb"], "the folder holds LMDB"),
        ([golden.DB / "mnist_test_lmdb", "--frob"], "unrecognized arguments"),
    ):
        done = run(*arguments)
        assert done.returncode == 2
        assert text in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""


def test_sizes_of_records(tmp_path):
    items = [(b"%04d" % i, raw(0, (1, 1, width))) for i, width in enumerate(range(1, 101))]
    document = examine(make(tmp_path / "db", items))
    lengths = sorted(len(value) for _, value in items)
    sizes = document["record_bytes"]
    assert (sizes["min"], sizes["max"], sizes["total"]) == (lengths[0], lengths[-1], sum(lengths))
    assert sizes["p5"] == pytest.approx(lengths[5], abs=1)
    assert sizes["p50"] == pytest.approx(lengths[50], abs=1)
    assert sizes["p95"] == pytest.approx(lengths[95], abs=1)


def test_a_part_of_the_records(tmp_path, capsys):
    folder = make(tmp_path / "db", [(b"%06d" % i, raw(i % 10)) for i in range(1000)])
    assert inspect.main([str(folder), "--json", "--limit", "200"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["records"] == 1000
    assert document["looked_at"] == {"records": 200, "stretches": 3}
    assert document["labels"]["present"] == sum(document["shapes"].values()) == 200
    assert inspect.main([str(folder), "--limit", "200"]) == 0
    assert "looked at 200 of them, in 3 stretches spread evenly" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(UsageError, match="--limit is out of range"):
        inspect.main([str(folder), "--limit", "0"])


def test_large_images_are_bad_records_where_a_limit_says_so(tmp_path, capsys):
    folder = make(tmp_path / "db", [(b"0", datum.serialize(data=file(picture("L")), label=0, encoded=True))])
    assert inspect.main([str(folder), "--json", "--max-pixels", "62"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert "9 x 7 = 63" in document["bad"][0]["reason"]
    assert document["channel_mean"] is None
    assert inspect.main([str(folder), "--json", "--max-pixels", "63"]) == 0


def test_numbers_that_json_has_not(tmp_path):
    value = datum.serialize(channels=1, height=1, width=2, float_data=[float("nan"), 1], label=0)
    assert examine(make(tmp_path / "db", [(b"0", value)]))["channel_mean"] == [None]


def test_what_shuffling_would_show():
    labels = examine(golden.DB / "mnist_test_lmdb")["labels"]
    assert labels["longest_run"] == 4
    assert labels["shuffled_longest_run"] == {"typical": 4, "at_most": 9}


def test_a_long_run_in_an_else_shuffled_set_is_warned_of(tmp_path):
    draw = np.random.default_rng(1).integers(0, 10, 2000)
    draw[700:730] = 7
    document = examine(make(tmp_path / "db", [(b"%04d" % i, raw(int(label))) for i, label in enumerate(draw)]))
    assert document["labels"]["runs"] > 0.9 * document["labels"]["expected_runs"]
    (warning,) = document["warnings"]
    assert "the longest" in warning
    assert document["labels"]["longest_run"] >= 30 > document["labels"]["shuffled_longest_run"]["at_most"]


def test_storage_is_told(tmp_path):
    document = examine(golden.DB / "mnist_test_lmdb")
    storage = document["storage"]
    assert storage["nbytes"] == sum(place.stat().st_size for place in (golden.DB / "mnist_test_lmdb").iterdir())
    assert (storage["resident"] is None) == (storage["resident_missing"] is not None)
    assert storage["page_bytes"] * storage["pages"] == (golden.DB / "mnist_test_lmdb" / "data.mdb").stat().st_size
    with open_source("memory:records=3") as source:
        assert inspect.examine(source)["storage"] is None


def test_what_does_not_print_in_a_key_is_shown_as_an_escape_wherever_keys_are_shown(tmp_path, capsys):
    odd = ["\u202eexe.gpj", "\x1b[2J", "a\nb", "tab\t", "\x7f", "\u2066x"]
    items = [(key.encode(), raw(i) if i % 2 else b"\xff") for i, key in enumerate(odd)]
    folder = make(tmp_path / "db", items)
    assert inspect.main([str(folder), "--html", str(tmp_path / "page.html")]) == 1
    shown = capsys.readouterr().out
    assert verify.main([str(folder)]) == 1
    shown += capsys.readouterr().out
    shown += (tmp_path / "page.html").read_text()
    assert not [one for one in shown if not one.isprintable() and one != "\n"]
    for escaped in (r"\u202eexe.gpj", r"\x1b[2J", r"a\nb"):
        assert escaped in shown
    with open_source(folder) as source:
        first = next(record for record in source.read_many(range(len(source))) if record.value == b"\xff")
    with pytest.raises(datum.DatumError) as caught:
        datum.parse(first.value, first)
    assert all(one.isprintable() or one == "\n" for one in str(caught.value))


def test_one_problem_of_many_records_is_told_once(tmp_path, capsys):
    items = [(b"%04d" % i, b"\x22\x7fshort") for i in range(30)] + [(b"9998", b"\xff"), (b"9999", raw(1))]
    assert inspect.main([str(make(tmp_path / "db", items))]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("malformed at byte 0") == 1
    assert "20 records: " in shown
    assert "0 ('0000'), 1 ('0001')" in shown
    assert "and 15 more" in shown
    assert "and 11 more records" in shown


def test_a_single_bad_record_is_told_in_full(tmp_path, capsys):
    inspect.main([str(make(tmp_path / "db", [(b"a", b"\xff"), (b"b", raw(1))]))])
    assert "record 0 (key 'a') of " in " ".join(capsys.readouterr().out.split())
