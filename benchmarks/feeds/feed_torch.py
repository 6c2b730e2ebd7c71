"""PyTorch's DataLoader: samples or whole batches, in two workers or in the consumer's process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from benchmarks.feeds import reading
from benchmarks.feeds.cases import Case

PACKAGES = ("torch",)
VARIANTS = ("2 workers, samples", "2 workers, whole batches", "2 workers, batches in shared memory", "no workers")


class Samples(Dataset):
    """One record an item; the loader collates, in its workers, into shared memory."""

    def __init__(self, records: reading.Records) -> None:
        self.records, self.rng = records, None

    def __len__(self) -> int:
        return 1 << 31

    def __getitem__(self, number: int) -> tuple[Any, int]:
        if self.rng is None:
            info = get_worker_info()
            self.rng = np.random.default_rng(info.id if info else 0)
        stored, label = self.records.sample(number)
        return torch.from_numpy(reading.one(self.records.case, stored, self.rng)), label


class Batches(IterableDataset):
    """Whole batches, made by each worker for every second one."""

    def __init__(self, records: reading.Records, memory: str) -> None:
        self.records, self.memory = records, memory

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        case, info = self.records.case, get_worker_info()
        rng, own = np.random.default_rng(info.id if info else 0), None
        for turn, numbers in enumerate(reading.shuffled(case)):
            if info is not None and turn % info.num_workers != info.id:
                continue
            if self.memory == "own":
                own = own or reading.empty(case)
                reading.fill(self.records, numbers, rng, *own)
                yield torch.from_numpy(own[0]), torch.from_numpy(own[1])
            elif self.memory == "shared":
                samples = torch.empty(case.shape, dtype=getattr(torch, case.dtype)).share_memory_()
                labels = torch.empty(case.batch, dtype=torch.int32)
                reading.fill(self.records, numbers, rng, samples.numpy(), labels.numpy())
                yield samples, labels
            else:
                samples, labels = reading.empty(case)
                reading.fill(self.records, numbers, rng, samples, labels)
                yield torch.from_numpy(samples), torch.from_numpy(labels)


@contextlib.contextmanager
def open_feed(case: Case, folder: Path, variant: str) -> Iterator[Iterator[tuple[Any, Any]]]:
    torch.set_num_threads(1)
    records = reading.Records(case, folder)
    if variant == "2 workers, samples":
        loader = DataLoader(Samples(records), batch_sampler=reading.shuffled(case), num_workers=2)
    elif variant == "no workers":
        loader = DataLoader(Batches(records, "own"), batch_size=None)
    else:
        memory = "shared" if "shared" in variant else "new"
        loader = DataLoader(Batches(records, memory), batch_size=None, num_workers=2)
    yield ((samples.numpy(), labels.numpy()) for samples, labels in loader)
