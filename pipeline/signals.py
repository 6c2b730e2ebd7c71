"""SIGINT and SIGTERM as a request: the job finishes its step, then stops in good order."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType, TracebackType
from typing import Any

HANDLED = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """A context manager: inside it the first signal only sets :attr:`signal`, the second one aborts the job.

    The second signal raises ``KeyboardInterrupt``, so that the job still closes what it opened; a third one ends the
    process at once. Outside of the main thread, where Python allows no handlers, it never reports a signal.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._count = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        try:
            for number in HANDLED:
                self._before[number] = signal.signal(number, self._receive)
        except ValueError:  # not the main thread
            self._before.clear()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None stands for a handler that was not set from Python; the default is the nearest thing to it.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """130 after SIGINT, 143 after SIGTERM, 0 without a signal."""
        return 128 + self.signal if self.signal is not None else 0

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count == 1:
            self.signal = signal.Signals(number)
            # os.write and not print: the handler may run in the middle of another write to the same stream.
            text = f"\n{self.signal.name}: stopping after this step; once more to abort without a snapshot\n"
            with contextlib.suppress(OSError, ValueError):  # nobody listens, say a `tee` that the same signal ended
                os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())
        elif self._count == 2:
            raise KeyboardInterrupt
        else:
            os._exit(self.exit_code)
