"""``python -m benchmarks.gpu_acceptance --json F``: whether this GPU gives the CPU's numbers, the same bits, and speed.

Runs unattended. Each part is a process of its own, so that an error of the device in one leaves the others standing;
this one never touches the device, which may be set to serve one process at a time. F is written after every part.
Exit status: 0 all parts are fine, 1 one is not, 2 there is no GPU to use.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_nets import QUICK, Amount
from benchmarks.gpu_parts import PARTS
from benchmarks.machine import accelerator, machine
from gpu.backend import Backend, blas_threads, select_backend
from profiler import cli
from profiler.errors import UsageError

ROOT = Path(__file__).parents[1]
TIMEOUT_S, LOOK_S = 3600, 600
_LOOK = "look"


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.Parser(prog="python -m benchmarks.gpu_acceptance", description="Accept a GPU, or say what is wrong.")
    parser.add_argument("--json", metavar="F", default="gpu_acceptance.json", help="results (gpu_acceptance.json)")
    parser.add_argument("--backend", default="cupy", help="cupy; numpy tries the program itself out")
    parser.add_argument("--quick", action="store_true", help="a little of everything")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="S", help=f"of a part ({TIMEOUT_S} s)")
    parser.add_argument("--only", choices=[_LOOK, *PARTS], help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    names = arguments.parts.split(",")
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        raise UsageError("--parts names parts that there are not", expected=", ".join(PARTS), found=", ".join(unknown))
    amount = QUICK if arguments.quick else Amount()
    if arguments.only:
        blas_threads(1)
        backend = select_backend(arguments.backend)  # raises in words, exit status 2, where there is no GPU
        found = look(backend) if arguments.only == _LOOK else PARTS[arguments.only](backend, amount)
        Path(arguments.json).write_text(json.dumps(found, default=str))
        return 0
    seen = run_part(_LOOK, arguments)
    if not seen["ok"]:
        sys.stderr.write(seen.get("said") or f"error: the device cannot be looked at: {seen['error']}\n")
        return cli.EXIT_USAGE
    document: dict[str, Any] = {
        "kind": "gpu_acceptance",
        "backend": seen["backend"],
        "quick": arguments.quick,
        "machine": seen["machine"],
        "parts": {},
    }
    for name in names:
        print(f"{name:13} ", end="", flush=True)  # noqa: T201
        began = time.monotonic()
        result = run_part(name, arguments)
        result["seconds"] = round(time.monotonic() - began, 1)
        document["parts"][name] = result
        document["ok"] = all(part["ok"] for part in document["parts"].values())
        Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(f"{verdict(result)}  ({result['seconds']} s)", flush=True)  # noqa: T201
    print(f"{'fine' if document['ok'] else 'NOT FINE'}: {arguments.json}")  # noqa: T201
    return 0 if document["ok"] else 1


def look(backend: Backend) -> dict[str, Any]:
    """What is to be accepted."""
    described = {**machine("numpy", "numba"), "accelerator": accelerator(backend.xp)}
    return {"ok": True, "backend": backend.name, "machine": described}


def run_part(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One part in a process of its own; its results, or how it failed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "part.json")
        command = [sys.executable, "-m", "benchmarks.gpu_acceptance", "--only", name, "--json", str(file)]
        command += ["--backend", arguments.backend, *(["--quick"] if arguments.quick else [])]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=False,
                timeout=LOOK_S if name == _LOOK else arguments.timeout,
                cwd=ROOT,
            )
        except subprocess.TimeoutExpired:
            return {"ok": False, "error": f"not done after {arguments.timeout:g} s"}
        if done.returncode or not file.exists():
            told = {"said": done.stderr} if done.returncode == cli.EXIT_USAGE else {}
            return {"ok": False, "error": f"exit status {done.returncode}: {done.stderr.strip()[-2000:]}", **told}
        result: dict[str, Any] = json.loads(file.read_text())
        return result


def verdict(result: dict[str, Any]) -> str:
    """A part in one line."""
    if result["ok"]:
        return f"skipped: {result['skipped']}" if "skipped" in result else "ok"
    if "error" in result:
        return f"FAILED: {result['error'].splitlines()[-1]}"
    rows = next((value for value in result.values() if isinstance(value, dict)), {})
    wrong = [name for name, row in rows.items() if isinstance(row, dict) and not row.get("ok", True)]
    return f"NOT FINE: {', '.join(wrong[:5])}{' ...' if len(wrong) > 5 else ''}" if wrong else "NOT FINE"


if __name__ == "__main__":
    cli.run(main)
