"""What an error keeps alive: the variables of the functions that it left."""

from __future__ import annotations

import contextlib
import traceback


def forget_arrays(error: BaseException | None) -> None:
    """Empty our own frames in an error's tracebacks: arrays in them would keep the ring mapped while the error lives.

    Those of a user's function stay as they are, for a debugger: it is never given a part of the ring.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if str(frame.f_globals.get("__name__")).partition(".")[0] in ("pipeline", "datasets", "profiler"):
                with contextlib.suppress(RuntimeError):  # it is still running
                    frame.clear()
        error = error.__cause__ or error.__context__
