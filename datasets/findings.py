"""What about a data set deserves a warning, each in words that say what to do."""

from __future__ import annotations

from datasets.footprint import Footprint
from datasets.image_file import CONVERTIBLE, NATIVE
from datasets.source import show_key
from datasets.survey import Keys, Labels, Survey

_DEAD_SHARE, _DEAD_BYTES = 0.25, 1 << 20


def warnings_of(found: Survey) -> list[str]:
    """The warnings of a survey, the gravest first."""
    if found.records == 0:
        return ["there are no records"]
    warned = []
    if found.bad_records:
        warned.append(f"{found.bad_records:,} of {found.looked_at:,} records cannot be understood as Caffe's Datum")
    warned += _of_labels(found.labels, found.complete)
    warned += _of_content(found)
    warned += _of_keys(found.keys)
    warned += _of_storage(found.on_disk)
    return warned


def _of_labels(labels: Labels, complete: bool) -> list[str]:
    warned = []
    if labels.grouped:
        warned.append(
            f"records are grouped by label: {labels.runs} runs of equal labels, the longest {labels.longest} records, "
            f"where a random order has about {labels.expected_runs:.0f} and hardly one above "
            f"{labels.shuffled_most} records; train with order.shuffle: full"
        )
    if labels.absent and (labels.present or labels.vectors):
        warned.append(f"{_many(labels.absent, 'record')} without a label; training needs one in each")
    elif labels.absent:
        warned.append("no record has a label, which is not the same as label 0; training needs one in each")
    if not labels.counts:
        return warned
    least, most, classes = min(labels.counts), max(labels.counts), len(labels.counts)
    negative = sum(count for label, count in labels.counts.items() if label < 0)
    if negative:
        warned.append(
            f"{_many(negative, 'record')} with a negative label (the least is {least}), "
            "which a loss takes only as ignore_label"
        )
    elif least == 1 and most == classes > 1:
        warned.append(
            f"labels run from 1 to {most}: a net needs {most + 1} outputs, or labels that begin at 0; "
            f"with {most} outputs, label {most} is out of range"
        )
    elif complete and most > 4 * classes + 16:
        warned.append(
            f"labels go up to {most}, but only {classes} different ones occur: a net needs {most + 1} outputs, "
            "unless labels are numbered anew"
        )
    return warned


def _of_content(found: Survey) -> list[str]:
    warned = []
    if found.not_finite:
        warned.append(
            f"{_many(found.not_finite, 'record')} with NaN or infinity, the first is record {found.first_not_finite}: "
            "a loss and a mean that meet one are lost"
        )
    shapes, encodings = found.shapes, found.encodings
    if len(shapes) > 1:
        (common, _), (rare, _) = shapes.most_common()[0], shapes.most_common()[-1]
        one, other = (f"record {found.first['shape', name]} is {name}" for name in (common, rare))
        warned.append(f"{len(shapes)} different shapes: a batch needs a crop or --resize; {one}, {other}")
    if len({name.split("x")[0] for name in shapes}) > 1:
        warned.append("the number of channels differs between records: set force_color or force_gray")
    if len(encodings) > 1 and ("raw" in encodings or "float" in encodings):
        warned.append(f"different kinds of records are mixed: {', '.join(encodings)}")
    for modes, remedy in (
        ([mode for mode in found.modes if mode in CONVERTIBLE], "not decoded without force_color or force_gray"),
        ([mode for mode in found.modes if mode not in NATIVE + CONVERTIBLE], "not 8-bit images, so never decoded"),
    ):
        if modes:
            firsts = ", ".join(f"{mode} (record {found.first['mode', mode]})" for mode in modes)
            warned.append(f"image files of mode {firsts}: {remedy}")
    if found.unflagged:
        warned.append(
            f"{_many(found.unflagged, 'record')} with image files but without the flag 'encoded'; decoded all the same"
        )
    return warned


def _of_keys(keys: Keys) -> list[str]:
    if not keys.misleading:
        return []
    return [
        "keys look like un-padded integers: iteration order ≠ numeric order "
        f"(from {show_key(keys.first)} to {show_key(keys.last)}); write them padded to 8 digits"
    ]


def _of_storage(on_disk: Footprint | None) -> list[str]:
    pages = on_disk.pages if on_disk else None
    if pages is None or pages.unused < _DEAD_SHARE * pages.total or pages.unused * pages.size < _DEAD_BYTES:
        return []
    share = pages.unused / pages.total
    return [
        f"{pages.unused:,} of {pages.total:,} pages ({100 * share:.0f} %) hold nothing: records were deleted or "
        "written anew; copy the database with mdb_copy -c to get the space back"
    ]


def _many(count: int, name: str) -> str:
    return f"{count:,} {name}" if count == 1 else f"{count:,} {name}s"
