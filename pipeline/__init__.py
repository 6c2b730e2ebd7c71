"""Records in motion: the feed and its workers, the training loop, and the job round it.

``pipeline.Feed(config)``, or ``Feed("data/train_lmdb", batch=64)``, iterates over batches; ``pipeline.load(path,
flags)`` reads a configuration; ``pipeline.per_batch`` marks a transform function. They load when they are first used:
importing this package imports neither Ray nor a database library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.batch import Batch
    from pipeline.config import Config
    from pipeline.feed import Feed
    from pipeline.functions import per_batch
    from pipeline.settings import load

__all__ = ["Batch", "Config", "Feed", "load", "per_batch"]

_HOME = {
    "Batch": "pipeline.batch", "Config": "pipeline.config", "Feed": "pipeline.feed", "load": "pipeline.settings",
    "per_batch": "pipeline.functions",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
