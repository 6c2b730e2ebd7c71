"""How much faster ``datasets.convert`` is with one more decoding thread, as a ratio of runs made in turns.

    python benchmarks/convert_workers.py                       2,000 JPEGs of 500 x 375, five rounds, about two minutes

Whole commands are timed, start-up and the final sync included; beside them a decoder's loop over the same files, in one
thread, for what no number of workers can undercut per core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import machine

MODES = {"raw 256 x 256": ["--resize", "256,256"], "encoded 256 x 256": ["--resize", "256,256", "--encoded"]}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default=str(Path(__file__).with_suffix(".json")), help="file for the results")
    given = parser.parse_args(arguments)
    results: dict[str, Any] = {"machine": machine("numpy", "simplejpeg", "pillow", "lmdb"), "images": given.images}
    results["rounds"] = given.rounds
    with tempfile.TemporaryDirectory(prefix="stallscope-convert-") as folder:
        images = make_images(Path(folder) / "images", given.images)
        for name, flags in MODES.items():
            results[name] = compare(images, Path(folder) / "out", flags, given.rounds)
    Path(given.out).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(results, indent=1) + "\n")
    return 0


def make_images(folder: Path, count: int) -> Path:
    """Smooth colours with some noise, in ten classes: compressible as photographs are (about 50 KB each)."""
    import numpy as np
    from PIL import Image

    for number in range(count):
        rng = np.random.default_rng(number)
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((500, 375))
        noisy = np.clip(np.asarray(coarse, dtype=np.int16) + rng.integers(-12, 13, (375, 500, 3)), 0, 255)
        place = folder / f"class{number % 10}" / f"{number:05d}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noisy.astype(np.uint8)).save(place, quality=90)
    return folder


def compare(images: Path, out: Path, flags: list[str], rounds: int) -> dict[str, Any]:
    """Seconds of whole commands with 1 and 2 workers, in turns; the records must be the same bytes."""
    seconds: dict[int, list[float]] = {1: [], 2: []}
    digests = set()
    for _ in range(rounds):
        for workers in seconds:
            command = [sys.executable, "-m", "datasets.convert", "images", str(images), str(out), "--force"]
            started = time.perf_counter()
            subprocess.run([*command, "--workers", str(workers), *flags], check=True, capture_output=True)
            seconds[workers].append(time.perf_counter() - started)
            # Not of data.mdb: LMDB leaves what was in memory in the unused part of its pages.
            manifest = json.loads(out.with_name(out.name + ".manifest.json").read_text(encoding="utf-8"))
            digests.add(manifest["content_sha256"])
    if len(digests) != 1:
        raise SystemExit(f"the records depend on the number of workers: {len(digests)} different databases")
    pairs = [one / two for one, two in zip(seconds[1], seconds[2], strict=True)]
    return {
        "seconds": {f"{workers} workers": [round(value, 3) for value in taken] for workers, taken in seconds.items()},
        "speed_up_median": round(statistics.median(pairs), 3),
        "speed_up_range": [round(min(pairs), 3), round(max(pairs), 3)],
    }


if __name__ == "__main__":
    raise SystemExit(main())
