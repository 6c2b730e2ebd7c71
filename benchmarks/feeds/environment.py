"""An environment of the peers' own: what they need must not meet what the product needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

BASE = ("numpy", "lmdb", "simplejpeg", "opencv-python-headless")
"""What the shared readers of :mod:`benchmarks.feeds.reading` use."""
TORCH = "torch==2.13.0"

REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "torch": (TORCH,),
    "ray_actors": ("ray[data]",),
    "ray_data": ("ray[data]",),
    "spdl": ("spdl",),
    "dali": ("nvidia-dali-cuda130",),
    "tensorpack": ("tensorpack",),
    "grain": ("grain",),
    "tf": ("tensorflow",),
    "webdataset": (TORCH, "webdataset"),
    "mosaic": (TORCH, "mosaicml-streaming"),
}
"""Peers in the order in which they are installed: the later ones bring the most and change what is there."""
TIMEOUT_S = 900


class Peers:
    """The environment in ``folder``. What happened at each installation is kept in ``installed.json`` there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self._kept = folder / "installed.json"
        self.outcome: dict[str, dict[str, Any]] = {}
        if self._kept.exists():
            self.outcome = json.loads(self._kept.read_text(encoding="utf-8"))

    def install(self, peers: Iterable[str], say: Callable[[str], None] = lambda text: None) -> None:
        """Install those that are missing. One that does not install gets its reason and is not tried again."""
        wanted = [peer for peer in REQUIREMENTS if peer in set(peers) and peer not in self.outcome]
        if not wanted:
            return
        if not self.python.exists():
            say(f"making {self.folder}")
            subprocess.run([sys.executable, "-m", "venv", str(self.folder)], check=True)
        if failed := self._pip(BASE):
            raise SystemExit(f"the peers' environment cannot be made: {failed}")
        for peer in wanted:
            say(f"installing {peer}: {' '.join(REQUIREMENTS[peer])}")
            began = time.perf_counter()
            failed = self._pip(REQUIREMENTS[peer])
            self.outcome[peer] = {
                "installed": failed is None,
                "seconds": round(time.perf_counter() - began, 1),
                **({"reason": failed} if failed else {"versions": self._versions(REQUIREMENTS[peer])}),
            }
            self._kept.write_text(json.dumps(self.outcome, indent=1) + "\n", encoding="utf-8")

    def _pip(self, requirements: Iterable[str]) -> str | None:
        """Install; the reason where that failed. PyTorch stays as it is, whatever others would rather have."""
        rules = self.folder / "constraints.txt"
        rules.write_text(f"{TORCH}\nray=={metadata.version('ray')}\n", encoding="utf-8")
        command = [str(self.python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "-c", str(rules)]
        try:
            done = subprocess.run([*command, *requirements], capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"not installed after {TIMEOUT_S} s"
        if done.returncode == 0:
            return None
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line.strip() for line in lines if "error" in line.lower()]
        return (errors or lines or [f"pip ended with {done.returncode}"])[0][:300]

    def _versions(self, requirements: Iterable[str]) -> dict[str, str]:
        names = [requirement.partition("==")[0].partition("[")[0] for requirement in requirements]
        code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
        done = subprocess.run([str(self.python), "-c", code, *names], capture_output=True, text=True, check=True)
        return json.loads(done.stdout)


def variables(root: Path) -> dict[str, str]:
    """The environment of a measured process: one thread for each library that would take all cores, no chatter."""
    return os.environ | {
        "PYTHONPATH": str(root),
        **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
