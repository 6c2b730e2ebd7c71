"""What all command-line tools share: exit codes, and errors shown without a traceback."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from profiler.errors import StallscopeError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

EXIT_OK = 0
EXIT_NOT_FINE = 1
EXIT_USAGE = 2


class Parser(argparse.ArgumentParser):
    """An argument parser whose usage errors read like every other error of the project."""

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"error: {message}\n  try:      {self.prog} --help\n")
        raise SystemExit(EXIT_USAGE)


def run(main: Callable[[Sequence[str] | None], int | None], argv: Sequence[str] | None = None) -> NoReturn:
    """Call ``main(argv)`` and leave the process with its exit code.

    A :class:`StallscopeError` becomes one readable message on stderr and exit code 2; ``STALLSCOPE_TRACEBACK=1``
    shows the traceback as well. A closed pipe (``| head``) is no error.
    """
    warnings.showwarning = functools.partial(_show_warning, warnings.showwarning)
    try:
        code = main(argv) or EXIT_OK
        if sys.stdout is not None:  # None: the process was started without one
            sys.stdout.flush()
    except StallscopeError as error:
        if os.environ.get("STALLSCOPE_TRACEBACK"):
            raise
        _say(f"error: {error}")
        code = EXIT_USAGE
    except KeyboardInterrupt:
        _say("interrupted")
        code = 130
    except BrokenPipeError:
        # stdout is gone: point it at nothing so that the interpreter's own flush at exit stays quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_OK
    raise SystemExit(code)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the exit code says it too
        if sys.stderr is not None:
            sys.stderr.write(f"{text}\n")


def _show_warning(other: Callable[..., None], message: Warning | str, category: type[Warning], *about: Any) -> None:
    """Our own warnings are words for a person: without the place in the code. ``other`` shows those of others."""
    if category.__module__.split(".")[0] in ("datasets", "gpu", "pipeline", "profiler"):
        sys.stderr.write(f"warning: {message}\n")
    else:
        other(message, category, *about)


def console() -> Console:
    """What tables are shown on. A file or a pipe has no width that they would have to be folded into."""
    from rich.console import Console

    limited = "COLUMNS" in os.environ or (sys.stdout is not None and sys.stdout.isatty())
    return Console(width=None if limited else 140)


def dumps(document: Any) -> str:
    """JSON text with no NaN or Infinity in it: such values become null."""
    return json.dumps(finite(document), indent=2, allow_nan=False, default=_plain)


def write_json(path: str, document: Any) -> None:
    """Write :func:`dumps` of a document to a file. Raises UsageError where that is not possible."""
    try:
        Path(path).write_text(dumps(document) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the results cannot be written to {path}: {error.strerror}") from error


def finite(value: Any) -> Any:
    """The same document with every non-finite float replaced by None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _plain(value: Any) -> Any:
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return finite(value.item())
    if hasattr(value, "tolist"):
        return finite(value.tolist())
    return str(value)


def warn_if_shadowed() -> None:
    """Say so when Hugging Face's package ``datasets`` is installed beside ours: one of the two hides the other."""
    try:
        metadata.distribution("datasets")
    except metadata.PackageNotFoundError:
        return
    sys.stderr.write(
        "warning: the distribution 'datasets' (Hugging Face) is installed in this environment and has the same "
        "import name as a package of Stallscope; use an environment of its own\n"
    )
