"""An inspection as one HTML page with thumbnails. It needs nothing else: no request to anywhere, no script.

Keys, paths and error texts come from the data set and are not trusted: the template escapes them, and the page carries
a policy that forbids it to load or run anything. Which records are shown depends on the survey alone.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from datasets import datum, words
from datasets.datum import DatumError
from datasets.decode import ImageModeError
from datasets.inspect import picture
from datasets.source import Record, Source, show_key
from datasets.survey import Survey

if TYPE_CHECKING:
    from numpy.typing import NDArray

TEMPLATES = Path(__file__).with_name("templates")
_SIDE = 160
"""Longest side of a thumbnail in pixels; smaller pictures stay as they are, and the page enlarges them unsmoothed."""
_CLASSES, _SPREAD, _ODD, _BARS = 60, 36, 24, 40


@dataclass(frozen=True)
class Tile:
    """One record on the page.

    Attributes
    ----------
    image: a data URI; empty where there is no picture to show.
    problem: why there is none.
    small: whether the picture is to be enlarged without smoothing.
    why: what makes the record worth showing; note: how it was made visible.
    """

    index: int
    key: str
    label: str
    shape: str
    image: str
    problem: str
    small: bool
    why: str
    note: str


def page(source: Source, found: Survey, document: dict[str, Any], max_pixels: int | None = None) -> str:
    """The page as text (UTF-8).

    Parameters
    ----------
    source: open; some records are read again.
    found, document: the survey of it, and what :func:`datasets.inspect.describe` made of that.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters["bytes"] = words.bytes_text
    sheets = [
        (title, note, [_tile(source, index, why, max_pixels) for index, why in chosen])
        for title, note, chosen in choose(found)
    ]
    return environment.get_template("inspect.html.j2").render(
        document=document,
        name=os.path.basename(source.path.rstrip("/")) or source.path,
        headline=headline(document),
        sheets=[sheet for sheet in sheets if sheet[2]],
        rows=words.rows(document),
        bars=_bars(found),
    )


def headline(document: dict[str, Any]) -> str:
    """The data set in one sentence."""
    shapes = list(document["shapes"])
    parts = [f"{document['records']:,} record{'s' if document['records'] != 1 else ''}"]
    if shapes:
        parts.append(f"{len(shapes)} shapes" if len(shapes) > 1 else f"{shapes[0]} {'/'.join(document['encodings'])}")
    if document["labels"]["classes"]:
        parts.append(f"{document['labels']['classes']:,} label" + ("s" if document["labels"]["classes"] != 1 else ""))
    many = len(document["warnings"])
    verdict = f"{many} warning{'s' if many != 1 else ''}" if many else "nothing to warn of"
    return ", ".join(parts) + ": " + verdict


def choose(found: Survey) -> list[tuple[str, str, list[tuple[int, str]]]]:
    """Titles, notes and records (number, what makes it worth showing) of the sheets."""
    labels = sorted(found.labels.first)
    shown = _spread(labels, _CLASSES)
    note = "" if len(shown) == len(labels) else f"{len(shown)} of {len(labels):,} labels, spread evenly."
    places = list(_spread(range(found.records), _SPREAD))
    return [
        (
            "One of each label",
            f"The first record of each. {note}".strip(),
            [(found.labels.first[k], "") for k in shown],
        ),
        ("Spread over the set", f"{len(places)} records in the order of their keys.", [(i, "") for i in places]),
        ("The oddest", "Extremes, rare kinds, and what cannot be understood.", _odd(found)),
    ]


def _odd(found: Survey) -> list[tuple[int, str]]:
    why: dict[int, list[str]] = {}
    for entry in found.bad[: _ODD // 2]:
        why.setdefault(entry["index"], []).append("cannot be understood")
    if len(set(found.sizes)) > 1:
        for size, index in found.places.items():
            why.setdefault(index, []).append(f"the {size} value")
    if found.no_label is not None and found.labels.present:
        why.setdefault(found.no_label, []).append("no label")
    if found.labels.counts and min(found.labels.counts) < 0:
        why.setdefault(found.labels.first[min(found.labels.counts)], []).append("the least label")
    rare = [
        (count, kind, name)
        for kind, counts in (("encoding", found.encodings), ("mode", found.modes), ("shape", found.shapes))
        for name, count in counts.items()
        if count < counts.most_common(1)[0][1] or (kind == "mode" and name not in ("L", "RGB"))
    ]
    # The rarest first; of equally rare ones a mode says more than a shape.
    for count, kind, name in sorted(rare, key=lambda one: (one[1] == "shape", one[0])):
        why.setdefault(found.first[kind, name], []).append(f"{kind} {name}: {count:,} record{'s' if count > 1 else ''}")
    return [(index, ", ".join(reasons)) for index, reasons in list(why.items())[:_ODD]]


def _spread(items: Any, most: int) -> list[Any]:
    """At most ``most`` of the items, spread evenly, both ends included."""
    if len(items) <= most:
        return list(items)
    return [items[int(place)] for place in np.linspace(0, len(items) - 1, most).astype(np.int64)]


def _bars(found: Survey) -> tuple[list[tuple[int, int, float]], str]:
    """Label, count and share of the largest count; and what was left out."""
    counts = found.labels.counts
    if len(counts) <= _BARS:
        chosen: Iterable[int] = sorted(counts)
        note = ""
    else:
        ranked = [label for label, _ in counts.most_common()]
        chosen = ranked[: _BARS // 2] + ranked[-_BARS // 2 :]
        note = f"The {_BARS // 2} most frequent and the {_BARS // 2} least frequent of {len(counts):,} labels."
    largest = max(counts.values(), default=1)
    return [(label, counts[label], counts[label] / largest) for label in chosen], note


def _tile(source: Source, index: int, why: str, max_pixels: int | None) -> Tile:
    record = source.read(index)
    key = show_key(record.key)[1:-1]
    image = picture(record, max_pixels)
    note = ""
    if isinstance(image, ImageModeError):
        image, note = picture(record, max_pixels, "color"), "shown as force_color makes it"
    if isinstance(image, DatumError):
        return Tile(index, key, _label(record), "", "", _reason(image), False, why, "")
    shape = "x".join(map(str, image.shape))
    if not image.size:
        return Tile(index, key, _label(record), shape, "", "empty", False, why, "")
    visible, how = _visible(image)
    uri, small = _thumbnail(visible)
    return Tile(index, key, _label(record), shape, uri, "", small, why, ", ".join(filter(None, (note, how))))


def _reason(error: DatumError) -> str:
    """The problem without the name of the record, which stands beside it."""
    text = error.what.rsplit(": ", 1)[-1]
    return f"{text}; found {error.found}" if error.found is not None else text


def _label(record: Record) -> str:
    try:
        parsed = datum.parse(record.value, record)
    except DatumError:
        return "?"
    if len(parsed.data) and parsed.float_data is not None:
        return f"{len(parsed.float_data)} floats"
    return "no label" if parsed.label is None else str(parsed.label)


def _visible(image: NDArray[Any]) -> tuple[NDArray[np.uint8], str]:
    """uint8[H, W] or uint8[H, W, 3] in R, G, B to look at, and what was done for it."""
    how = []
    if image.shape[1] * image.shape[2] == 1 and len(image) > 4:
        image = image.reshape(1, 1, -1)
        how.append("vector drawn as a line")
    if image.dtype != np.uint8:
        finite = image[np.isfinite(image)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
        known = np.clip(np.nan_to_num(image.astype(np.float64), nan=low), low, high)
        scaled = (known - low) * (255 / (high - low) if high > low else 0.0)
        if not finite.size:
            how.append("no value is finite")
        elif low == high:
            how.append(f"{low:.4g} everywhere" + ("" if finite.size == image.size else " where it is finite"))
        else:
            how.append(f"{low:.4g} is black, {high:.4g} is white")
        image = scaled.astype(np.uint8)
    if len(image) == 3:
        return np.ascontiguousarray(image[::-1].transpose(1, 2, 0)), ", ".join(how)
    if len(image) > 1:
        how.append(f"channel 0 of {len(image)}")
    return image[0], ", ".join(how)


def _thumbnail(pixels: NDArray[np.uint8]) -> tuple[str, bool]:
    """A data URI, and whether the picture is smaller than its place on the page."""
    from PIL import Image

    image = Image.fromarray(pixels)
    small = max(image.size) <= _SIDE // 2
    if max(image.size) > _SIDE:
        image.thumbnail((_SIDE, _SIDE))
    stream = io.BytesIO()
    if small:
        image.save(stream, "PNG", optimize=True)
    else:
        image.save(stream, "JPEG", quality=82)
    kind = "png" if small else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode('ascii')}", small
