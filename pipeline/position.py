"""Whether a saved position (``Feed.state_dict``) is one, and of the stream that it shall be gone on with in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.emission import Ranges, checked
from profiler.errors import UsageError

_MAY_DIFFER = ("next_step", "given", "bad_records")


def read(state: Any, own: Callable[[], dict[str, Any]], source: str | Sequence[str]) -> tuple[int, Ranges]:
    """The step to go on at, and which of those after it were given out.

    own: gives the ``state_dict`` of the feed that shall go on, source its data set for errors. Raises
    :class:`UsageError` for what is no position, and for one of another stream.
    """
    step = state.get("next_step") if isinstance(state, Mapping) else None
    if not isinstance(step, int) or step < 0:
        raise UsageError(
            "this is no position of a feed", expected="what state_dict() gave: next_step and the rest", found=state
        )
    given = checked(step, state.get("given", ()))
    mine = own()
    if None in (state.get("content"), mine["content"]):  # of an older feed, say
        mine.pop("content")
    for key in {**mine, "origin": None}:
        if key not in _MAY_DIFFER and state.get(key) != mine.get(key):
            if key == "content":
                raise UsageError(
                    f"the saved position belongs to another data set of {mine['records']} records",
                    expected=f"the records of {source}",
                    found="others under the same positions (16 were compared)",
                    hint="name the data set that it was saved with; where that lies now, and in which database, "
                    "does not matter",
                )
            raise UsageError(
                f"the saved position belongs to another stream: {key} differs",
                expected=mine.get(key),
                found=state.get(key),
                hint="resume with the same data set and data.* settings, or start anew",
            )
    return step, given
