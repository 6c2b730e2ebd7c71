"""tf.data from TFRecord files: shuffle buffer, map and batch in two threads."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from benchmarks.feeds import reading
from benchmarks.feeds.cases import MEAN, Case

PACKAGES = ("tensorflow",)
VARIANTS = ("2 threads",)
_FIELDS = {"data": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}


def prepare(case: Case, folder: Path) -> None:
    """The same records as TFRecord."""
    if (folder / "records.tfrecord").exists():
        return
    records = reading.Records(case, folder)
    with tf.io.TFRecordWriter(str(folder / "records.part")) as writer:
        for number in range(len(records)):
            stored, label = records.sample(number)
            feature = {
                "data": tf.train.Feature(bytes_list=tf.train.BytesList(value=[bytes(stored)])),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    (folder / "records.part").rename(folder / "records.tfrecord")


def _cropped(case: Case, stored: Any) -> Any:
    size, data = case.crop, case.data
    if not data.encoded:
        picture = tf.reshape(tf.io.decode_raw(stored, tf.uint8), (3, data.height, data.width))
        picture = tf.image.random_crop(picture, (3, size, size))
    else:
        area = tf.random.uniform([], 0.08, 1.0) * (data.height * data.width)
        ratio = tf.exp(tf.random.uniform([], math.log(3 / 4), math.log(4 / 3)))
        height = tf.minimum(tf.cast(tf.sqrt(area / ratio), tf.int32), data.height)
        width = tf.minimum(tf.cast(tf.sqrt(area * ratio), tf.int32), data.width)
        row = tf.random.uniform([], 0, data.height - height + 1, tf.int32)
        column = tf.random.uniform([], 0, data.width - width + 1, tf.int32)
        picture = tf.io.decode_and_crop_jpeg(stored, tf.stack([row, column, height, width]), channels=3)
        picture = tf.transpose(tf.cast(tf.image.resize(picture, (size, size)), tf.uint8), (2, 0, 1))
    return tf.cond(tf.random.uniform([]) < 0.5, lambda: tf.reverse(picture, [2]), lambda: picture)


@contextlib.contextmanager
def open_feed(case: Case, folder: Path, variant: str) -> Iterator[Iterator[tuple[Any, Any]]]:
    tf.config.threading.set_intra_op_parallelism_threads(2)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    mean = tf.reshape(tf.constant(MEAN), (3, 1, 1))

    def make(example: Any) -> tuple[Any, Any]:
        fields = tf.io.parse_single_example(example, _FIELDS)
        picture = tf.ensure_shape(_cropped(case, fields["data"]), case.shape[1:])
        if case.dtype == "float32":
            picture = tf.cast(picture, tf.float32) - mean
        return picture, fields["label"]

    flow = tf.data.TFRecordDataset(str(folder / "records.tfrecord"))
    flow = flow.repeat().shuffle(min(1024, case.data.records))
    flow = flow.map(make, num_parallel_calls=2, deterministic=True).batch(case.batch, drop_remainder=True).prefetch(2)
    yield flow.as_numpy_iterator()
