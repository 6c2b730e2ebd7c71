"""Events as a JSON trace that Perfetto (ui.perfetto.dev) opens; written as a stream, bounded in size."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from profiler.events import Flag, Kind, Stage
from profiler.timeline import resolve_open

MAX_BYTES = 100_000_000
"""Viewers give up on files of a few hundred MB."""
_DEVICE = 1_000_000  # thread numbers of the device's lanes
_RESERVE = 4_096  # room for the closing remark
_NAMES = {int(stage): stage.name.lower() for stage in Stage}


@dataclass(frozen=True)
class Written:
    """``events`` written, ``dropped`` left out for size, and a remark for people ("" when nothing was dropped)."""

    events: int
    dropped: int
    nbytes: int
    remark: str


def write(path: Path, events: np.ndarray, lanes: Mapping[int, str], max_bytes: int = MAX_BYTES) -> Written:
    """Write EVENT[n] as a trace of at most ``max_bytes``.

    A process of the run is a process of the trace. If all events do not fit, whole steps from the start are kept and
    the remark, also inside the file, says what is missing. Raises OSError.
    """
    events = resolve_open(events)
    origin = int(events["t0_ns"].min()) if len(events) else 0
    count = size = 0
    with path.open("w", encoding="utf-8") as out:
        size += out.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for line in _names(lanes):
            size += out.write(line + ",\n")
        for line in _lines(events, origin):
            if size + len(line) + 2 > max_bytes - _RESERVE:
                break
            size += out.write(line + ",\n")
            count += 1
        dropped = len(events) - count
        remark = ""
        if dropped:
            end_s = (int(events["t0_ns"][count]) - origin) / 1e9
            cap = f"{max_bytes / 1e6:.0f} MB"
            remark = f"{dropped} of {len(events)} events left out to stay under {cap}: all after {end_s:.1f} s"
        last = {"name": "stallscope", "ph": "M", "pid": 0, "tid": 0, "args": {"name": remark or "complete"}}
        other = json.dumps({"dropped": dropped, "remark": remark})
        size += out.write(f'{json.dumps(last)}\n],"otherData":{other}}}\n')
    return Written(count, dropped, size, remark)


def _names(lanes: Mapping[int, str]) -> Iterator[str]:
    for actor, name in sorted(lanes.items()):
        yield _meta("process_name", actor, 0, {"name": name})
        yield _meta("process_sort_index", actor, 0, {"sort_index": actor})
        yield _meta("thread_name", actor, actor, {"name": "main"})
    for stage in (Stage.COPY, Stage.DEVICE):
        yield _meta("thread_name", 0, _DEVICE + stage, {"name": f"device: {_NAMES[stage]}"})


def _meta(name: str, pid: int, tid: int, args: dict[str, object]) -> str:
    return json.dumps({"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args})


def _lines(events: np.ndarray, origin: int) -> Iterator[str]:
    # Formatted by hand: json.dumps of a dict per event is four times slower, and nothing here needs escaping.
    chunk = 50_000
    for lo in range(0, len(events), chunk):
        for row in events[lo : lo + chunk].tolist():
            kind, stage, flags, actor, epoch, slot, step, t0, t1, cpu, runq, inblock, items, nbytes, faults, _ = row
            tid = _DEVICE + stage if stage in (Stage.COPY, Stage.DEVICE) else actor
            name = _NAMES.get(stage, f"stage {stage}")
            args = f'"step":{step},"epoch":{epoch},"slot":{slot},"items":{items},"bytes":{nbytes}'
            for label, value in (("cpu_us", cpu), ("run_queue_us", runq)):
                if value >= 0:
                    args += f',"{label}":{value / 1000:.1f}'
            if inblock >= 0:
                args += f',"blocks_read":{inblock}'
            if faults > 0:
                args += f',"major_faults":{faults}'
            if kind == Kind.OPEN:
                args += ',"open":true'
            category = "test" if flags & Flag.TEST_PHASE else "train"
            head = f'"name":"{name}","cat":"{category}","pid":{actor},"tid":{tid},"ts":{(t0 - origin) / 1000:.3f}'
            if kind == Kind.MARK:
                yield f'{{{head},"ph":"i","s":"t","args":{{{args}}}}}'
            else:
                yield f'{{{head},"ph":"X","dur":{(t1 - t0) / 1000:.3f},"args":{{{args}}}}}'
