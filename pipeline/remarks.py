"""What is to be said of data sets beside their records: in the log of the process that met it, and in the report."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from profiler.recorder import Recorder


@contextlib.contextmanager
def noted(recorder: Recorder) -> Iterator[None]:
    """Note this process's warnings about data sets and page-locking as well: the log of a worker is nobody's screen."""
    from datasets.errors import DatasetWarning
    from gpu.pinned import PinningWarning

    notes = {DatasetWarning: "data_warning", PinningWarning: "pinning_warning"}
    shown = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        for kind, note in notes.items():
            if issubclass(category, kind):
                recorder.note(note, text=str(message))
        shown(message, category, *where, **more)

    warnings.showwarning = show
    try:
        yield
    finally:
        if warnings.showwarning is show:
            warnings.showwarning = shown


def reader_slots(recorder: Recorder) -> list[str]:
    """A line for each reader slot that this process holds (``lock: true``), with the limit in force."""
    from datasets import lmdb_slot

    lines = []
    for slot in lmdb_slot.held():
        recorder.note("reader_slot", data_set=slot.path, slots=slot.max_readers, freed=slot.freed)
        freed = f", {slot.freed} of them given back by dead processes" if slot.freed else ""
        asked = f" (another process fixed it; {lmdb_slot.MAX_READERS} were asked for)"
        fixed = asked if slot.max_readers != lmdb_slot.MAX_READERS else ""
        lines.append(f"{slot.name}: read with locking; its table has {slot.max_readers} reader slots{fixed}{freed}")
    return lines
