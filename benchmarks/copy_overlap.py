"""What copying ahead of the step gains, as ratios of runs made in turns on the emulated accelerator.

    python benchmarks/copy_overlap.py                  copies of 4 to 30 ms under steps of 20 ms, about three minutes

Whole jobs run (workers, ring, feed, loop), with ``device.staging`` 1 (each batch is copied when its step comes) and 2
(while the step before computes). Read from their reports: median step, what was exposed of the copies, and its limit,
the larger of compute and copy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import machine

ROOT = Path(__file__).resolve().parents[1]
STEP_MS = 20.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--copies", type=float, nargs="+", default=[4.0, 16.0, 30.0], help="ms of a copy")
    parser.add_argument("--engine", choices=["ray", "inline"], default="ray")
    parser.add_argument("--out", default=str(Path(__file__).with_suffix(".json")), help="file for the results")
    given = parser.parse_args(arguments)
    results: dict[str, Any] = {"machine": machine("numpy", "ray"), "engine": given.engine, "step_ms": STEP_MS}
    results.update(steps=given.steps, rounds=given.rounds, copies={})
    with tempfile.TemporaryDirectory(prefix="stallscope-copies-") as folder:
        for copy_ms in given.copies:
            results["copies"][f"{copy_ms:g} ms"] = compare(Path(folder), copy_ms, given)
    Path(given.out).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(results, indent=1) + "\n")
    return 0


def compare(folder: Path, copy_ms: float, given: argparse.Namespace) -> dict[str, Any]:
    """Both ways in turns; the ratio of each round, and medians."""
    measured: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    for _ in range(given.rounds):
        for staging, taken in measured.items():
            taken.append(run(folder / "run", copy_ms, staging, given))
    ratios = [one["step_ms"] / two["step_ms"] for one, two in zip(measured[1], measured[2], strict=True)]
    limit = (STEP_MS + copy_ms) / max(STEP_MS, copy_ms)
    return {
        "speed_up": round(statistics.median(ratios), 3),
        "speed_up_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "speed_up_limit": round(limit, 3),
        **{
            f"staging {staging}": {
                key: round(statistics.median(each[key] for each in taken), 3) for key in ("step_ms", "exposed_ms")
            }
            for staging, taken in measured.items()
        },
    }


def run(folder: Path, copy_ms: float, staging: int, given: argparse.Namespace) -> dict[str, float]:
    """One job of small batches whose copy takes ``copy_ms`` by its delay; its median step and exposed copy in ms."""
    command = [
        sys.executable, "-m", "pipeline.train", "--data.train.source=memory:records=512,shape=1x28x28",
        "--data.train.batch=16", f"--feed.engine={given.engine}", "--feed.workers=1", "--device.backend=emulated",
        f"--device.step_ms={STEP_MS}", f"--device.h2d_delay_ms={copy_ms}", f"--device.staging={staging}",
        f"--run.iterations={given.steps}", f"--run.folder={folder}", "--run.if_exists=replace",
        "--run.log_level=warning", "--profile.fingerprints=off", "--profile.samplers_hz=0",
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return {"step_ms": report["step_ms"]["p50"], "exposed_ms": 1e3 * report["partition"]["h2d"] / report["steps"]}


if __name__ == "__main__":
    sys.exit(main())
