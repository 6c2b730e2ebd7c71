"""Run a script with the profiler round it: ``python -m profiler.run [--folder RUN] SCRIPT.py [ARGUMENT ...]``.

The script sees its own arguments and is ``__main__``. Loops that it passes through ``profiler.watch`` become steps.
"""

from __future__ import annotations

import argparse
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from profiler import cli
from profiler.errors import StallscopeError, UsageError
from profiler.loops import default_folder, record
from profiler.store import load_run

UNWATCHED = """\
stallscope: the script never called profiler.watch, so it has no steps.
  seen:      CPU, memory and pressure of its processes, garbage collections, spans it recorded itself
  not seen:  what a step is, how long it waited for data, and why
  try:       for batch in profiler.watch(loader): ...
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the script's exit code."""
    parser = cli.Parser(
        prog="python -m profiler.run", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="run folder to write (default: runs/SCRIPT-DATE-TIME)")
    parser.add_argument("--force", action="store_true", help="replace the run that lies in the folder")
    parser.add_argument("--detail", choices=("steps", "full"), default="full", help="how much each event tells")
    parser.add_argument("--hz", type=float, default=10.0, help="samples per second, 0 for none (default: 10)")
    parser.add_argument("--no-report", action="store_true", help="do not print the report at the end")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module name, as with python -m")
    parser.add_argument("script", metavar="SCRIPT", help="the script to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="its arguments")
    options = parser.parse_args(argv)
    script = options.script
    if not options.module and not Path(script).is_file():
        raise StallscopeError(f"no script at {script}", hint="python -m profiler.run SCRIPT.py ...")
    if not 0 <= options.hz <= 100:
        raise UsageError("--hz out of range", expected="0 to 100", found=options.hz)
    # Before sys.argv is the script's, so that the folder is named after it all the same.
    sys.argv = [script, *options.arguments]
    folder = options.folder or default_folder()
    code, started = 0, False
    previous = signal.signal(signal.SIGTERM, _leave) if _untouched(signal.SIGTERM) else None
    try:
        with record(folder, name="script", detail=options.detail, hz=options.hz, overwrite=options.force):
            started = True
            _execute(script, module=options.module)
    except SystemExit as stop:
        if isinstance(stop.code, int | None):
            code = stop.code or 0
        else:
            sys.stderr.write(f"{stop.code}\n")
            code = 1
    except KeyboardInterrupt:
        code = 130
    except BaseException as error:
        if not started:
            raise
        _show(error)
        code = 1
    finally:
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)
    _tell(folder, report=not options.no_report)
    return code


def _execute(script: str, *, module: bool) -> None:
    before = sys.path[0]
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(script).resolve().parent)
            runpy.run_path(script, run_name="__main__")
    finally:
        sys.path[0] = before


def _tell(folder: Path, *, report: bool) -> None:
    from profiler.events import Stage

    if not (folder / "manifest.json").exists():
        return
    stages = load_run(folder).events["stage"].to_numpy()
    watched = bool((stages == Stage.STEP).any())
    if not watched:
        sys.stderr.write(UNWATCHED)
    elif report:
        from profiler.report import summarise

        sys.stderr.write(summarise(folder).rstrip("\n") + "\n")
    sys.stderr.write(f"stallscope: recorded in {folder}; see it with: python -m profiler.report {folder}\n")


def _untouched(number: int) -> bool:
    return signal.getsignal(number) is signal.SIG_DFL


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _show(error: BaseException) -> None:
    """The script's traceback as it would look without the profiler: frames of the machinery are left out."""
    trace: Any = error.__traceback__
    inner = trace
    while inner is not None and _is_machinery(inner.tb_frame.f_code.co_filename):
        inner = inner.tb_next
    traceback.print_exception(type(error), error, inner or trace)


def _is_machinery(filename: str) -> bool:
    return (
        filename == __file__ or filename.startswith("<frozen") or Path(filename).name in ("runpy.py", "contextlib.py")
    )


if __name__ == "__main__":
    cli.run(main)
