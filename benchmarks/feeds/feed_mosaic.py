"""Mosaic Streaming: MDS shards, its shuffle, two workers of PyTorch's loader."""

from __future__ import annotations

import contextlib
import importlib.machinery
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch


def _without_torchvision() -> None:
    """Mosaic imports two names of it for data sets of pictures; a build for another PyTorch refuses to be imported."""
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        module = sys.modules[name] = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules["torchvision.datasets"].VisionDataset = object
    sys.modules["torchvision.transforms.functional"].to_tensor = None


try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError):
    _without_torchvision()

from streaming import MDSWriter, StreamingDataset  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402
from torch.utils.data import DataLoader, get_worker_info  # noqa: E402

from benchmarks.feeds import reading  # noqa: E402
from benchmarks.feeds.cases import Case  # noqa: E402

PACKAGES = ("mosaicml-streaming",)
VARIANTS = ("2 workers",)


def prepare(case: Case, folder: Path) -> None:
    """The same records as MDS."""
    if (folder / "mds").exists():
        return
    records, part = reading.Records(case, folder), folder / "mds.part"
    shutil.rmtree(part, ignore_errors=True)
    with MDSWriter(out=str(part), columns={"data": "bytes", "label": "int"}, size_limit=1 << 26) as writer:
        for number in range(len(records)):
            stored, label = records.sample(number)
            writer.write({"data": bytes(stored), "label": label})
    part.rename(folder / "mds")


class Samples(StreamingDataset):
    def __init__(self, case: Case, **options: Any) -> None:
        super().__init__(**options)
        self.case, self.rng = case, None

    def __getitem__(self, at: Any) -> tuple[Any, int]:
        if self.rng is None:
            info = get_worker_info()
            self.rng = np.random.default_rng(info.id if info else 0)
        point = super().__getitem__(at)
        return torch.from_numpy(reading.one(self.case, point["data"], self.rng)), point["label"]


@contextlib.contextmanager
def open_feed(case: Case, folder: Path, variant: str) -> Iterator[Iterator[tuple[Any, Any]]]:
    torch.set_num_threads(1)
    clean_stale_shared_memory()  # of a process of its own that was killed
    samples = Samples(case, local=str(folder / "mds"), shuffle=True, batch_size=case.batch)
    loader = DataLoader(samples, batch_size=case.batch, num_workers=2, drop_last=True, persistent_workers=True)

    def batches() -> Iterator[tuple[Any, Any]]:
        while True:
            for made, labels in loader:
                yield made.numpy(), labels.numpy()

    yield batches()
