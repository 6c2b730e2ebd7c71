"""Python data layers as users write them, sound and not."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np

import gpu


class Noise(gpu.PythonDataLayer):
    """uint8[3, 8, 8] and one of four labels, as param_str says: records, sleep (seconds), batch, floats."""

    def setup(self) -> None:
        options = json.loads(self.param_str or "{}")
        self.records = options.get("records", 40)
        self.sleep_s = options.get("sleep", 0)
        self.batch = options.get("batch")
        self.floats = options.get("floats", False)

    def __len__(self) -> int:
        return self.records

    def read(self, index: int) -> tuple[np.ndarray, Any]:
        time.sleep(self.sleep_s)
        rng = np.random.default_rng(index)
        image = rng.integers(0, 256, (3, 8, 8), dtype=np.uint8)
        return (image / np.float32(255) if self.floats else image), index % 4


class Rows(gpu.PythonDataLayer):
    """A vector and two numbers."""

    def __len__(self) -> int:
        return 10

    def read(self, index: int) -> tuple[np.ndarray, Any]:
        return np.arange(5.0) + index, [index / 2, -index]

    def key(self, index: int) -> str:
        return f"row {index}"


class Process(Noise):
    """Samples that tell which process made them, but for the first one."""

    def read(self, index: int) -> tuple[np.ndarray, Any]:
        return np.full((1, 2, 2), os.getpid() if index else 0, np.float32), 0


class Chance(Noise):
    def read(self, index: int) -> tuple[np.ndarray, Any]:
        return np.random.default_rng().random((1, 2, 2)), 0


class Fails(Noise):
    def setup(self) -> None:
        super().setup()
        self.wrong = self.param_str and json.loads(self.param_str)["wrong"]
        if self.wrong == "setup":
            raise KeyError("no such option")

    def read(self, index: int) -> Any:
        if index < 3:
            return super().read(index)
        return {
            "raises": lambda: [][index],
            "exits": lambda: sys.exit(5),
            "nothing": lambda: None,
            "ints": lambda: (np.zeros((3, 8, 8), np.int64), 1),
            "label": lambda: (np.zeros((3, 8, 8), np.uint8), "cat"),
            "no label": lambda: (np.zeros((3, 8, 8), np.uint8), None),
            "shape": lambda: (np.zeros((3, 9, 9), np.uint8), 1),
            "nan": lambda: (np.full((3, 8, 8), np.nan), 1),
        }[self.wrong]()


class NextBatch(gpu.PythonDataLayer):
    """As pycaffe's data layers are."""

    def forward(self, bottom: Any, top: Any) -> None:
        top[0].data[...] = 1


class Plain(gpu.PythonLayer):
    def forward(self, bottom: Any, top: Any) -> None:
        top[0].data[...] = 1


class Somewhere(Noise):
    """Data that are there on some nodes of a cluster only."""

    def setup(self) -> None:
        super().setup()
        if os.environ.get("STALLSCOPE_TEST_NO_DATA"):
            raise FileNotFoundError("no data on this node")
