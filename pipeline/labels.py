"""A loss that refuses a label knows its position in the batch; the feed knows which record that is."""

from __future__ import annotations

import numpy as np

from pipeline.config import Config, Phase
from pipeline.spec import feed_spec
from pipeline.worker import open_data
from profiler.errors import StallscopeError


def name_record(error: BaseException, phase: Phase, ids: np.ndarray, labels: np.ndarray, config: Config) -> None:
    """Add data set, key and record to an error about a label out of range; any other error is left as it is.

    ids int64[B] and labels int32[B] or float32[B, K] are those of the batch that the net has just seen.
    """
    from gpu.layers.loss import LabelOutOfRange

    if not isinstance(error, LabelOutOfRange):
        return
    at = error.position[0] if error.position else -1
    # The label blob may be one that the net made itself: then its positions say nothing about records.
    if not 0 <= at < len(ids) or not (np.atleast_1d(labels[at]) == error.value).any():
        return
    try:
        with open_data(feed_spec(config, phase)) as source:
            where = source.describe(int(ids[at]))
    except StallscopeError:
        where = f"record {ids[at]} of {config.source(phase).source}"
    error.what += f": the label of {where}"
