"""An inspection in words, for the terminal and for the page."""

from __future__ import annotations

from typing import Any

from datasets.source import show_text

_KEY = 120  # characters of a key that are shown
_PLACES = 5  # records named where several have the same problem


def rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    """An inspection as pairs of a name and a text, for a table."""
    db = f" (database '{show_text(document['db'])}')" if document["db"] is not None else ""
    out = [("data set", document["path"] + db), ("backend", document["backend"])]
    looked, records = document["looked_at"], document["records"]
    part = "" if looked["records"] == records else f"; looked at {_part(looked)}"
    out.append(("records", f"{records:,}{part}"))
    if document["data_sets"]:
        told = (
            f"{show_text(top)} {'x'.join(map(str, shape)) or 'one number'}"
            for top, shape in document["data_sets"].items()
        )
        out.append(("data sets", ", ".join(told)))
    out += [(name, histogram(document[name])) for name in ("shapes", "encodings", "modes") if document[name]]
    out += _label_rows(document["labels"])
    keys = document["key_order"]
    if keys["first"] is not None:
        kind = "padded numbers" if keys["padded"] else "numbers without padding" if keys["numeric"] else "names"
        first, last = (show_text(keys[end][:_KEY]) + ("…" if keys[end][_KEY:] else "") for end in ("first", "last"))
        out.append(("keys", f"{first} to {last}, {kind}, in byte order"))
    sizes = document["record_bytes"]
    if sizes:
        shown = (bytes_text(sizes[name]) for name in ("p50", "min", "p5", "p95", "max"))
        out.append(("record size", "{} (median); least {}, 5 % {}, 95 % {}, most {}".format(*shown)))
    if document["channel_mean"] is not None:
        names = " (B, G, R)" if len(document["channel_mean"]) == 3 else ""
        if document["channel_mean_of"] < document["records"]:
            names += f", of {document['channel_mean_of']} records spread over the set; datasets.mean takes all"
        out.append(
            (
                "channel mean",
                ", ".join("n/a" if value is None else f"{value:.2f}" for value in document["channel_mean"]) + names,
            )
        )
    storage = document["storage"]
    if storage:
        out.append(("on disk", disk_text(storage)))
        out.append(("in memory", resident_text(storage)))
    return out


def bad_lines(document: dict[str, Any]) -> list[str]:
    """What is wrong with the bad records that the document lists: each problem once, and the records that have it."""
    problems: dict[str, list[dict[str, Any]]] = {}
    for entry in document["bad"]:
        problems.setdefault(entry["problem"], []).append(entry)
    lines = []
    for problem, entries in problems.items():
        if len(entries) == 1:
            lines.append(entries[0]["reason"])
            continue
        shown = ", ".join(f"{entry['index']} ('{entry['key']}')" for entry in entries[:_PLACES])
        more = f" and {len(entries) - _PLACES} more" if entries[_PLACES:] else ""
        lines.append(f"{len(entries)} records: {problem}\n  records:  {shown}{more}")
    unlisted = document["bad_records"] - len(document["bad"])
    if unlisted:
        lines.append(f"and {unlisted:,} more records, not looked at closely here; datasets.verify --json lists all")
    return lines


def _part(looked: dict[str, int]) -> str:
    many = looked["stretches"]
    return f"{looked['records']:,} of them, in {many} stretch{'es' if many != 1 else ''} spread evenly"


def _label_rows(labels: dict[str, Any]) -> list[tuple[str, str]]:
    if not labels["present"]:
        return [("labels", f"vectors of floats ({labels['vectors']:,})" if labels["vectors"] else "none")]
    counts = f": {histogram(labels['counts'])}" if labels["counts"] and len(labels["counts"]) <= 20 else ""
    shuffled = labels["shuffled_longest_run"]
    expected = f"{labels['expected_runs']:,.0f} runs" + (f", longest {shuffled['typical']:,}" if shuffled else "")
    return [
        ("labels", f"{labels['min']} to {labels['max']}, {labels['classes']} different{counts}"),
        ("label runs", f"{labels['runs']:,}, longest {labels['longest_run']:,} (shuffled: about {expected})"),
    ]


def disk_text(storage: dict[str, Any]) -> str:
    """What the files take, in words."""
    text = f"{bytes_text(storage['nbytes'])} in {storage['files']} file" + ("s" if storage["files"] != 1 else "")
    if storage["allocated"] < 0.95 * storage["nbytes"]:
        text += f", of which {bytes_text(storage['allocated'])} are allocated (the rest is a hole)"
    if storage["unused_pages"]:
        text += f"; {storage['unused_pages']:,} of {storage['pages']:,} pages hold no records"
    return text


def resident_text(storage: dict[str, Any]) -> str:
    """How much of the files is in the page cache, in words."""
    if storage["resident"] is None:
        return f"n/a: {storage['resident_missing']}"
    share = storage["resident"] / storage["nbytes"] if storage["nbytes"] else 0.0
    return f"{bytes_text(storage['resident'])} ({100 * share:.0f} %) in the page cache before the records were read"


def bytes_text(nbytes: float) -> str:
    """A number of bytes with a unit that suits it: 1 kB is 1000 bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.3g} TB"


def histogram(counts: dict[str, int], most: int = 12) -> str:
    """The first ``most`` names with their counts, on one line."""
    shown = [f"{name} ({count:,})" for name, count in list(counts.items())[:most]]
    if len(counts) > most:
        shown.append(f"and {len(counts) - most} more")
    return ", ".join(shown)
