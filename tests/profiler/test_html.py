"""The page: one file, no request, text escaped, both themes, and drawn by a real browser without an error."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from profiler import html, report, store
from profiler.terminal import COLOURS
from tests.profiler.synthetic import Job, Log, simulate, write_run

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def page_of(tmp_path: Path, job: Job, log: Log | None = None, **manifest: Any) -> str:
    whole = {"outcome": {"state": "finished"}, **manifest}
    folder = write_run(tmp_path / "run", log or simulate(job), manifest=whole)
    return html.page(report.analyse(store.load_run(folder)))


class Outline(HTMLParser):
    """Tags with their attributes, and the text of each script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._in: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        while self._in and self._in.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._in and self._in[-1] == "script":
            self.scripts[-1] += data
        elif "style" not in self._in:
            self.text += data


def test_the_answer_comes_before_everything_else(tmp_path: Path) -> None:
    page = Outline(page_of(tmp_path, Job(read=40, steps=60)))
    visible = " ".join(page.text.split())
    answer = visible.index("Steps waited 21.3 ms of 41.4 ms for data: read 9", 80)
    assert answer < visible.index("Try first") < visible.index("Every step") < visible.index("How far to trust this")
    assert "raise feed.workers to 3" in visible


def test_it_asks_nothing_of_the_network(tmp_path: Path) -> None:
    page = page_of(tmp_path, Job(read=40, steps=60))
    outline = Outline(page)
    for _tag, attributes in outline.tags:
        assert not set(attributes) & {"src", "srcset", "data", "background"}
        assert (attributes.get("href") or "#").startswith("#")
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)[1]
    assert "url(" not in style
    assert "@import" not in style
    assert not re.search(r"fetch\(|XMLHttpRequest|WebSocket|import\(", "".join(outline.scripts))
    addresses = set(re.findall(r"https?://[^\s\"']+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a namespace, not an address that is asked
    assert "default-src 'none'" in page
    assert len(page.encode()) < 6_000_000


def test_text_of_the_run_is_escaped_everywhere(tmp_path: Path) -> None:
    log = simulate(Job(steps=20))
    log.notes += [
        {"note": "bad_record", "key": EVIL, "wall_ns": 1},
        {"note": EVIL, "wall_ns": 1},
        {"note": "worker_lost", "worker": EVIL, "step": 3, "exit": EVIL, "wall_ns": 1},
    ]
    page = page_of(
        tmp_path, Job(), log, config={"net": EVIL, EVIL: {"x": [EVIL]}}, environment={"host": EVIL},
        outcome={"state": "failed", "error": EVIL},
    )  # fmt: skip
    outline = Outline(page)
    assert len(outline.scripts) == 2
    assert not [tag for tag, _ in outline.tags if tag == "img"]
    assert outline.text.count("alert(1)") >= 6  # it is there, as text
    assert "<script>alert" not in page


def test_lane_names_cannot_end_the_script(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", simulate(Job(steps=20)))
    analysis = report.analyse(store.load_run(folder))
    analysis.lanes[1] = EVIL
    outline = Outline(html.page(analysis))
    data = json.loads(outline.scripts[0])
    assert EVIL in data["windows"][0]["lanes"]
    assert len(outline.scripts) == 2


def test_every_part_has_one_colour_in_every_drawing() -> None:
    assert set(COLOURS) == set(html.PART_TEXT)
    for part, colour in COLOURS.items():
        assert html.STAGE_COLOURS.get(part, colour) == colour
        assert html.CAUSE_COLOURS.get(part, colour) == colour
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_long_runs_are_drawn_in_groups_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "MAX_GROUPS", 50)
    page = page_of(tmp_path, Job(steps=120, read=40))
    steps = json.loads(Outline(page).scripts[0])["steps"]
    assert steps["count"] == [3] * 40
    assert "the mean of 3 steps" in page
    total = sum(sum(part) for part in steps["parts"]) * 3 / 1e3
    assert total == pytest.approx(steps["t1"][-1], rel=1e-3)


def test_themes_narrow_screens_and_keyboard_are_provided_for(tmp_path: Path) -> None:
    page = page_of(tmp_path, Job(steps=20))
    assert "prefers-color-scheme: dark" in page
    assert "max-width:520px" in page
    assert "width=device-width" in page
    outline = Outline(page)
    scrolling = [attributes for tag, attributes in outline.tags if tag == "div" and attributes.get("class") == "table"]
    assert scrolling
    assert all(attributes.get("tabindex") == "0" and attributes.get("aria-label") for attributes in scrolling)
    assert outline.tags[0] == ("html", {"lang": "en"})


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("job", [Job(read=40, steps=60, test_every=20), Job(steps=3), Job(read=40, stop_at=900)])
def test_a_browser_draws_it(tmp_path: Path, job: Job, width: int) -> None:
    """The drawn page holds charts, needs no sideways scrolling, and no script failed."""
    path = tmp_path / "page.html"
    note = "document.body.dataset.failed = e.message"
    probe = f"<script>window.addEventListener('error', (e) => {{ {note}; }});</script></head>"
    measure = (
        "<script>document.body.dataset.overflow = document.documentElement.scrollWidth - window.innerWidth;"
        "document.body.dataset.drawn = document.querySelectorAll('.chart svg path[d], .chart svg rect').length;"
        "const rows = [...document.querySelectorAll('[data-name=causes] tbody tr')];"
        "document.body.dataset.tallest = Math.max(0, ...rows.map((row) => row.offsetHeight));"
        "const name = rows[0]?.cells[0], frame = name?.closest('.table');"
        "if (frame) frame.scrollLeft = 9999;"
        "const left = (box) => box.getBoundingClientRect().left;"
        "document.body.dataset.away = frame ? left(frame) - left(name) : 0;"
        "const inner = [...document.querySelectorAll('.table')].filter((box) => box.scrollWidth > box.clientWidth);"
        "document.body.dataset.cut = inner.filter((box) => getComputedStyle(box).overflowX != 'auto').length;"
        "document.body.dataset.copies = document.querySelectorAll('button.copy').length;</script></body>"
    )
    page = page_of(tmp_path, job).replace("</head>", probe).replace("</body>", measure)
    path.write_text(page)
    done = subprocess.run(
        [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
            f"--window-size={width},1200", "--virtual-time-budget=2000", "--dump-dom", path.as_uri(),
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    body = next(attributes for tag, attributes in Outline(done.stdout).tags if tag == "body")
    assert "data-failed" not in body
    assert int(body["data-overflow"] or 0) <= 0
    assert int(body["data-drawn"] or 0) > 20
    assert int(body["data-tallest"] or 0) <= 60  # at most two lines
    assert float(body["data-away"] or 0) <= 1  # a row's name stays in sight when the table is moved
    assert int(body["data-cut"] or 0) == 0
    assert int(body["data-copies"] or 0) >= 4
