"""DALI on the CPU: its own reader of Caffe's LMDB, operators in two threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from nvidia.dali import fn, pipeline_def, types

from benchmarks.feeds.cases import MEAN, Case

PACKAGES = ("nvidia-dali-cuda130",)
VARIANTS = ("2 threads",)


@pipeline_def
def work(case: Case, path: str) -> Any:
    stored, labels = fn.readers.caffe(
        path=path, random_shuffle=True, initial_fill=1024, prefetch_queue_depth=2, dont_use_mmap=False, name="reader"
    )
    mirror = fn.random.coin_flip()
    if case.data.encoded:
        picture = fn.decoders.image_random_crop(
            stored, device="cpu", output_type=types.BGR, random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3]
        )
        picture = fn.resize(picture, size=[case.crop, case.crop], interp_type=types.INTERP_LINEAR, antialias=False)
        samples = fn.crop_mirror_normalize(
            picture, dtype=types.UINT8, output_layout="CHW", mirror=mirror, mean=[0.0], std=[1.0]
        )
        return samples, labels
    picture = fn.reshape(stored, shape=[3, case.data.height, case.data.width], layout="CHW")
    floats = case.dtype == "float32"
    samples = fn.crop_mirror_normalize(
        picture,
        dtype=types.FLOAT if floats else types.UINT8,
        output_layout="CHW",
        crop=(case.crop, case.crop),
        crop_pos_x=fn.random.uniform(range=[0.0, 1.0]),
        crop_pos_y=fn.random.uniform(range=[0.0, 1.0]),
        mirror=mirror,
        mean=list(MEAN) if floats else [0.0],
        std=[1.0],
    )
    return samples, labels


@contextlib.contextmanager
def open_feed(case: Case, folder: Path, variant: str) -> Iterator[Iterator[tuple[Any, Any]]]:
    made = work(case, str(folder / "lmdb"), batch_size=case.batch, num_threads=2, device_id=None, seed=1,
                prefetch_queue_depth=2)  # fmt: skip
    made.build()

    def batches() -> Iterator[tuple[Any, Any]]:
        while True:
            samples, labels = made.run()
            yield np.asarray(samples.as_tensor()), np.asarray(labels.as_tensor()).reshape(-1)

    yield batches()
