"""Run a training job: ``python -m pipeline.train CONFIG.yaml [--key value ...] [--address ADDRESS]``.

Exit codes: 0 done; 2 wrong use or unreadable input, with one message; 130 or 143 stopped by SIGINT or SIGTERM after
the step in progress, with a snapshot and a report.
"""

from __future__ import annotations

import argparse
import logging
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any

from pipeline.config import keys
from pipeline.settings import load, parse_flags
from profiler import cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job that the command line describes; returns the exit code."""
    parser = cli.Parser(
        prog="python -m pipeline.train",
        description="Train a Caffe-style net from LMDB or LevelDB and record why it waited.",
        epilog="Any key of the configuration is also a flag, --feed.workers 4 or --feed.workers=4; --keys lists them.",
        allow_abbrev=False,
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG.yaml", help="the job; flags alone describe one as well")
    parser.add_argument(
        "--address", help="join this Ray cluster ('auto': the one of this machine); default: own local Ray"
    )
    parser.add_argument("--keys", action="store_true", help="list every key with its allowed values and exit")
    parser.add_argument(
        "--log-level",
        dest="run.log_level",
        action="append",
        default=[],
        metavar="LEVEL",
        help="short for --run.log_level: debug lists each layer's shape, memory, filler and initial values",
    )
    for key, _description in keys():
        # known to the parser only so that it does not take a flag's value for the configuration file
        parser.add_argument(f"--{key}", action="append", default=[], help=argparse.SUPPRESS)
    arguments, unknown = parser.parse_known_args(argv)
    parse_flags(unknown)  # first: the value of a misspelt flag may have been taken for the configuration file
    given = vars(arguments)
    flags = [f"--{key}={value}" for key, _description in keys() for value in given[key]]
    if arguments.keys:
        _list_keys()
        return cli.EXIT_OK
    if arguments.config is None and not flags:
        parser.error("no configuration given")
    cli.warn_if_shadowed()
    config = load(arguments.config, flags)
    logging.basicConfig(level=config.run.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    for name in ("h5py", "numba", "matplotlib", "PIL"):  # their debugging is not that of a job
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.showwarning = _log_warning

    # What a job needs takes a second to import: only after its configuration is known to be fine.
    from pipeline.run import run

    return run(config, address=arguments.address)


def _log_warning(message: Warning | str, category: type[Warning], *_where: Any, **_more: Any) -> None:
    """A warning is for the person at the terminal: what it says, and not the line of our code that said it."""
    logging.getLogger(category.__module__).warning("%s", message)


def _list_keys() -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for key, description in keys():
        console.print(f"--{key}", markup=False)
        console.print(textwrap.indent(textwrap.fill(description, 100), "      "), markup=False)


if __name__ == "__main__":
    cli.run(main)
