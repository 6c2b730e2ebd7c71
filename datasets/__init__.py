"""Records at rest: LMDB and LevelDB data sets, Datum, order, converters (see docs/design.md).

The names below load at first use, so that importing the package stays free of side effects and of database libraries.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets.datum import Datum as Datum
    from datasets.memory_source import cached as cached
    from datasets.order import Order as Order
    from datasets.order import Stream as Stream
    from datasets.source import Record as Record
    from datasets.source import Source as Source
    from datasets.source import open_source as open_source

_HOME = {
    "Datum": "datum",
    "Order": "order",
    "Record": "source",
    "Source": "source",
    "Stream": "order",
    "cached": "memory_source",
    "open_source": "source",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"datasets.{_HOME[name]}"), name)
    raise AttributeError(f"module 'datasets' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
