"""What a person sees while a job runs: a bar on a terminal, lines elsewhere, and where the files are at the end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_WINDOW = 20  # steps that the shown rate is the mean of: the slow first one is soon forgotten
_LINES_PER_RUN = 10  # where the solver asks for no display interval


class Display:
    """Shows progress of steps ``first`` to ``last``. ``interval``: steps between two lines, by default ten in all."""

    def __init__(self, first: int, last: int, *, quiet: bool = False) -> None:
        self.console = Console(quiet=quiet, highlight=False, soft_wrap=True)
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
