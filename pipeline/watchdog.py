"""Ends what is left of a Ray of our own after the process that started it was killed.

Ray's servers die with the process that started them, but its agents look for the servers for another minute. Run as
``python -m pipeline.watchdog PID ...`` with a pipe as standard input: when the other end of the pipe is gone, whatever
still lives of the processes named is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.process import Process

GRACE_S = 3.0
"""Time for the processes to end by themselves."""


@contextlib.contextmanager
def watching(pids: Sequence[int]) -> Iterator[None]:
    """A context that ``pids`` do not outlive by more than a few seconds, even if this process is killed."""
    handles = [Process(pid) for pid in pids]
    # In the folder that our packages lie in, so that it finds itself; in a session of its own, since Ctrl-C in the
    # terminal is for the job and not for its watchdog.
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline.watchdog", *map(str, pids)],
        stdin=subprocess.PIPE,
        start_new_session=True,
        cwd=Path(__file__).parents[1],
    )
    try:
        yield
    finally:
        process.kill()
        process.communicate()
        deadline = time.monotonic() + GRACE_S
        for handle in handles:
            # Those whose own servers were killed would look for them for a minute more.
            if not handle.wait(deadline - time.monotonic()):
                handle.kill()
            handle.close()


def main(pids: Sequence[int]) -> None:
    """Wait for the end of standard input, then end the processes."""
    handles = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            # A handle and not the number: by the time it is used the number may belong to somebody else.
            handles.append(os.pidfd_open(pid))
    sys.stdin.buffer.read()
    time.sleep(GRACE_S)
    for handle in handles:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
