import base64
import io
import re
import shutil
import subprocess
from html.parser import HTMLParser

import lmdb
import numpy as np
import pytest
from PIL import Image

from datasets import contact_sheet, datum, inspect, open_source
from datasets.survey import survey
from tests.datasets import golden
from tests.fuzz.seeds import file, images, picture

EVIL = "</title><script>alert(1)</script><img src=http://x onerror=alert(2)>"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Outline(HTMLParser):
    """Tags with their attributes, and all text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    @property
    def images(self):
        return [attributes for tag, attributes in self.tags if tag == "img"]


def make(folder, values, keys=None):
    with lmdb.open(str(folder), map_size=32 << 20) as env, env.begin(write=True) as txn:
        for index, value in enumerate(values):
            txn.put(keys[index] if keys else b"%08d" % index, value)
    return folder


def page_of(path, **options):
    with open_source(path) as source:
        found = survey(source, **options)
        return contact_sheet.page(source, found, inspect.describe(source, found))


def odd_set(folder):
    """Every kind of file, raw and float records, bad ones, and keys that are code."""
    values = [datum.serialize(data=data, label=index % 5, encoded=True) for index, data in enumerate(images().values())]
    values += [
        datum.serialize(channels=5, height=4, width=4, data=bytes(80), label=-3),
        datum.serialize(channels=20, height=1, width=1, float_data=np.linspace(-1, 2, 20)),
        datum.serialize(channels=1, height=2, width=2, float_data=[np.nan, np.inf, 1, 2], label=1),
        datum.serialize(channels=1, height=0, width=9, label=1, data=b""),
        datum.serialize(channels=3, height=4, width=5, data=bytes(10), label=1),
        b"\xff\xfe no datum",
    ]
    return make(folder, values, [b"%04d" % i + EVIL.encode() for i in range(len(values))])


def pixels(uri):
    head, _, data = uri.partition(";base64,")
    assert head in ("data:image/png", "data:image/jpeg")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


def test_mnist_shows_one_of_each_label():
    outline = Outline(page_of(golden.DB / "mnist_test_lmdb"))
    first = outline.images[:10]
    assert [image["alt"].rsplit(" ", 1)[1] for image in first] == list("0123456789")
    with open_source(golden.DB / "mnist_test_lmdb") as source:
        for image in first:
            index = int(re.search(r"record (\d+)", image["alt"]).group(1))
            stored = datum.parse(source.read(index).value)
            np.testing.assert_array_equal(pixels(image["src"]).ravel(), np.frombuffer(stored.data, np.uint8))
    assert "1,000 records, 1x28x28 raw, 10 labels: nothing to warn of" in outline.text
    assert "Nothing to warn of." in outline.text
    assert len(outline.images) == 46


def test_the_page_asks_for_nothing_and_runs_nothing(tmp_path):
    page = page_of(odd_set(tmp_path / "db"))
    outline = Outline(page)
    assert not {tag for tag, _ in outline.tags} & {"script", "link", "iframe", "object", "form", "base", "video"}
    for tag, attributes in outline.tags:
        assert not [name for name in attributes if name.startswith("on")], tag
        assert attributes.get("src", "data:image/").startswith("data:image/")
        assert attributes.get("href", "#").startswith("#")
    assert "url(" not in page
    assert "@import" not in page
    policy = next(a["content"] for _, a in outline.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert EVIL in outline.text
    assert "<script" not in page


def test_what_is_odd_is_shown_with_its_reason(tmp_path):
    outline = Outline(page_of(odd_set(tmp_path / "db")))
    for part in (
        "cannot be understood", "the largest value", "the smallest value", "no label", "the least label", "mode CMYK",
        "shown as force_color makes it", "channel 0 of 5", "vector drawn as a line", "-1 is black, 2 is white",
        "not an 8-bit image", "not a Datum", "found 10 bytes", "1 is black, 2 is white",
    ):  # fmt: skip
        assert part in outline.text, part


def test_the_page_is_the_same_every_time(tmp_path):
    folder = odd_set(tmp_path / "db")
    strip = re.compile(r"<p>[^<]* in memory before this look</p>|in the page cache[^<]*|[\d.]+ .B \(\d+ %\)")
    assert strip.sub("", page_of(folder)) == strip.sub("", page_of(folder))


def test_colours_are_those_of_the_picture(tmp_path):
    red = Image.new("RGB", (400, 300), (255, 0, 0))
    bgr = np.ascontiguousarray(np.asarray(red)[..., ::-1].transpose(2, 0, 1))
    values = [
        datum.serialize(data=file(red), label=0, encoded=True),
        datum.serialize(channels=3, height=300, width=400, data=bgr.tobytes(), label=1),
    ]
    outline = Outline(page_of(make(tmp_path / "db", values)))
    for image in outline.images:
        shown = pixels(image["src"])
        assert shown.shape == (120, 160, 3)
        np.testing.assert_allclose(shown[60, 80], (255, 0, 0), atol=2)


def test_many_labels_are_thinned_out(tmp_path):
    value = [datum.serialize(channels=1, height=1, width=1, data=b"x", label=i % 500) for i in range(600)]
    outline = Outline(page_of(make(tmp_path / "db", value)))
    assert "60 of 500 labels" in outline.text
    assert "The 20 most frequent and the 20 least frequent of 500 labels" in outline.text
    assert len(outline.images) <= 60 + 36 + 24


def test_a_part_says_so(tmp_path):
    values = [datum.serialize(channels=1, height=1, width=1, data=b"x", label=i % 3) for i in range(500)]
    text = Outline(page_of(make(tmp_path / "db", values), limit=128)).text
    assert "128 of them looked at, in 2 stretches spread evenly" in text


def test_an_empty_set_has_a_page(tmp_path):
    outline = Outline(page_of(make(tmp_path / "db", [])))
    assert "0 records: 1 warning" in outline.text
    assert outline.images == []


def test_the_command_writes_it_and_leaves_the_folder_alone(tmp_path, capsys):
    folder = golden.copy("crops96_raw_40x48_leveldb", tmp_path / "set")
    before = golden.snapshot(folder)
    assert inspect.main([str(folder), "--html", str(tmp_path / "page.html")]) == 0
    assert golden.snapshot(folder) == before
    assert "crops96_raw_40x48_leveldb" in (tmp_path / "page.html").read_text(encoding="utf-8")
    with pytest.raises(inspect.UsageError, match="cannot be written"):
        inspect.main([str(folder), "--html", str(tmp_path / "no" / "page.html")])
    capsys.readouterr()


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_draws_it_on_a_narrow_screen(tmp_path):
    """Nothing needs scrolling sideways and every thumbnail is drawn, in a frame of 400 pixels."""
    values = [datum.serialize(data=file(picture(size=(200, 150))), label=i % 3, encoded=True) for i in range(40)]
    folder = make(tmp_path / "db", values, [b"%08d_%s.jpg" % (i, b"long" * 30) for i in range(40)])
    # Without its policy, which would forbid the measuring script.
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page_of(folder))
    measure = (
        "<script>addEventListener('load', () => { const d = document, all = [...d.images];"
        "parent.postMessage([d.documentElement.scrollWidth, all.length, all.filter(i => i.naturalWidth).length], '*');"
        "});</script></body>"
    )
    (tmp_path / "page.html").write_text(page.replace("</body>", measure), encoding="utf-8")
    (tmp_path / "frame.html").write_text(
        "<script>onmessage = (e) => document.body.dataset.told = e.data.join();</script>"
        "<body><iframe src='page.html' width=400 height=800 style='border:0'></iframe></body>"
    )
    done = subprocess.run(
        [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=3000", "--dump-dom", (tmp_path / "frame.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    width, shown, drawn = map(int, re.search(r'data-told="(\d+),(\d+),(\d+)"', done.stdout).groups())
    assert width <= 400
    assert shown == drawn >= 39


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([299.0, 299.0], "299 everywhere"),
        ([299.0, float("nan")], "299 everywhere where it is finite"),
        ([float("nan"), float("inf")], "no value is finite"),
        ([1.0, 3.0], "1 is black, 3 is white"),
    ],
)
def test_floats_say_how_they_were_made_visible(values: list[float], told: str) -> None:
    visible, how = contact_sheet._visible(np.array(values, np.float32).reshape(1, 1, 2))
    assert how == told
    assert visible.shape == (1, 2)
