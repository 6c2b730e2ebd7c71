"""A file system that hangs is told, not waited for: the first calls on a path are made where they can be given up."""

from __future__ import annotations

import os
import stat
import threading

from datasets.errors import SourceError

OPEN_TIMEOUT_S = 60.0


def check_that_it_answers(path: str, timeout_s: float | None = None) -> None:
    """Make the first calls on ``path`` (stat, list, open, read a byte) in a thread of their own.

    Raises :class:`SourceError` naming the call that has not returned after ``timeout_s`` (60 s if left out); a call
    stuck in the kernel cannot be ended, so the thread is left behind. What the calls raise is not of interest here.
    """
    doing = ["start"]
    thread = threading.Thread(target=_touch, args=(path, doing), name="first-look", daemon=True)
    thread.start()
    thread.join(OPEN_TIMEOUT_S if timeout_s is None else timeout_s)
    if thread.is_alive():
        raise SourceError(
            f"the file system of {path} does not answer",
            expected=f"an answer within {OPEN_TIMEOUT_S if timeout_s is None else timeout_s:g} s",
            found=f"stuck in: {doing[0]}",
            hint="a network file system whose server is away, most likely: look at it with mount and df",
        )


def _touch(path: str, doing: list[str]) -> None:
    try:
        doing[0] = f"stat {path}"
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            doing[0] = f"list {path}"
            names = os.listdir(path)
            path = next((os.path.join(path, name) for name in ("data.mdb", "CURRENT") if name in names), "")
            doing[0] = f"stat {path}"
            mode = os.stat(path).st_mode if path else 0
        if not stat.S_ISREG(mode):
            return
        doing[0] = f"open {path}"
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            doing[0] = f"read {path}"
            os.pread(descriptor, 1, 0)
        finally:
            os.close(descriptor)
    except OSError:
        return  # whoever reads next says so
