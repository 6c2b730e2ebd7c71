"""What a person sees while a job runs: a bar on a terminal, lines elsewhere, and where the files are at the end."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_WINDOW = 20  # steps that the shown rate is the mean of: the slow first one is soon forgotten
_LINES_PER_RUN = 10  # where the solver asks for no display interval


class _Output:
    """A text stream that falls silent when nobody reads it any more or its disk is full: a job outlives its audience.

    Everything but writing is the stream's own, so a terminal is still known to be one.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._or_silent():
            try:
                self._stream.write(text)
            except UnicodeEncodeError as error:
                self._stream.write(text.encode(error.encoding, "replace").decode(error.encoding))
        return len(text)

    def flush(self) -> None:
        with self._or_silent():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _or_silent(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError):  # ValueError: the stream was closed in this process
            # What the stream still has in its buffer must go somewhere, or the interpreter's exit fails over it.
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            self._stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # for the rest of the process


class Display:
    """Shows progress of steps ``first`` to ``last``. ``interval``: steps between two lines, by default ten in all.

    Nothing here raises because of where it writes: a closed pipe or a full disk makes it quiet.
    """

    def __init__(self, first: int, last: int, *, quiet: bool = False) -> None:
        # sys.stdout is None in a process that was started with its stdout closed.
        output = cast("IO[str]", _Output(sys.stdout)) if sys.stdout is not None else None
        self.console = Console(file=output, quiet=quiet, highlight=False, soft_wrap=True)
        self.interval = max(1, (last - first) // _LINES_PER_RUN)
        self._last = last
        self._took_s: deque[float] = deque(maxlen=_WINDOW)
        self._before = time.monotonic()
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self.console,
            disable=quiet or not self.console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("training", total=last, completed=first, figures="")
        self._accuracy = ""

    def start(self) -> None:
        """Begin to draw; time before this does not count."""
        self._before = time.monotonic()
        self._progress.start()

    def say(self, text: str) -> None:
        """One line of its own above the bar."""
        self.console.print(text, markup=False)

    def step(self, step: int, loss: float | None, rate: float | None, samples: int) -> None:
        """Show that step number ``step`` (from 0) is done. ``rate``: learning rate; ``samples``: in this batch."""
        now = time.monotonic()
        self._took_s.append(now - self._before)
        self._before = now
        figures = [] if loss is None else [f"loss {loss:.4f}"]
        if rate is not None:
            figures.append(f"lr {rate:.3g}")
        figures.append(f"{samples * len(self._took_s) / max(sum(self._took_s), 1e-9):,.0f} samples/s")
        line = "  ".join(figures)
        self._progress.update(self._task, completed=step + 1, figures=line + self._accuracy)
        done = step + 1
        if self._progress.disable and (done % self.interval == 0 or done == self._last):
            self.say(f"step {done:>6}  {line}")

    def test(self, step: int, outputs: Mapping[str, float]) -> None:
        """Show the mean outputs of the test net after ``step`` updates."""
        text = "  ".join(f"{name} {value:.4f}" for name, value in outputs.items())
        self._accuracy = f"  accuracy {outputs['accuracy']:.4f}" if "accuracy" in outputs else ""
        self.say(f"test after {step} steps  {text}")
        self._before = time.monotonic()  # a test is no part of the rate

    def stop(self) -> None:
        """End the bar. May be called twice."""
        self._progress.stop()

    def files(self, files: Mapping[str, Path]) -> None:
        """The last lines of a run: where everything lies."""
        width = max(map(len, files), default=0)
        for name, path in files.items():
            self.say(f"{name:<{width}}  {path}")
