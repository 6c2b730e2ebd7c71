"""WebDataset: tar files, a shuffle buffer, two workers of PyTorch's loader."""

from __future__ import annotations

import contextlib
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset as wds

from benchmarks.feeds import reading
from benchmarks.feeds.cases import Case

PACKAGES = ("webdataset",)
VARIANTS = ("2 workers",)
_SHARDS = 8


def prepare(case: Case, folder: Path) -> None:
    """The same records as tar files."""
    if (folder / "tar").exists():
        return
    records, part = reading.Records(case, folder), folder / "tar.part"
    part.mkdir(exist_ok=True)
    for shard in range(_SHARDS):
        with tarfile.open(part / f"{shard:02d}.tar", "w") as archive:
            for number in range(shard, len(records), _SHARDS):
                stored, label = records.sample(number)
                for ending, content in (("bin", bytes(stored)), ("cls", str(label).encode())):
                    entry = tarfile.TarInfo(f"{number:08d}.{ending}")
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
    part.rename(folder / "tar")


class Sample:
    def __init__(self, case: Case) -> None:
        self.case, self.rng = case, None

    def __call__(self, point: tuple[bytes, bytes]) -> tuple[Any, int]:
        if self.rng is None:
            info = torch.utils.data.get_worker_info()
            self.rng = np.random.default_rng(info.id if info else 0)
        return torch.from_numpy(reading.one(self.case, point[0], self.rng)), int(point[1])


@contextlib.contextmanager
def open_feed(case: Case, folder: Path, variant: str) -> Iterator[Iterator[tuple[Any, Any]]]:
    torch.set_num_threads(1)
    shards = [str(shard) for shard in sorted((folder / "tar").glob("*.tar"))]
    flow = wds.WebDataset(shards, resampled=True, shardshuffle=False, nodesplitter=wds.split_by_node)
    flow = flow.shuffle(1000).to_tuple("bin", "cls").map(Sample(case))
    flow = flow.batched(case.batch, partial=False, collation_fn=torch.utils.data.default_collate)
    loader = wds.WebLoader(flow, batch_size=None, num_workers=2)
    yield ((samples.numpy(), labels.numpy()) for samples, labels in loader)
