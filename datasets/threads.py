"""Work on records in a few threads, results in order. Of use where the work gives up the interpreter's lock, as the
decoders and encoders of images do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from profiler.osread import usable_cpus

Item = TypeVar("Item")
Result = TypeVar("Result")

_BATCH = 32
_MOST = 4


def in_order(function: Callable[[Item], Result], items: Iterable[Item], batch: int = _BATCH) -> Iterator[Result]:
    """``map(function, items)`` by at most 4 threads; at most 9 batches of items are held at a time.

    Items are taken in the caller's thread. The first exception of ``function`` comes where its result would.
    """
    workers = min(_MOST, usable_cpus())
    pending: deque[Future[list[Result]]] = deque()
    iterator = iter(items)

    def work(taken: list[Item]) -> list[Result]:
        return [function(item) for item in taken]

    with ThreadPoolExecutor(workers, thread_name_prefix="records") as pool:
        try:
            while taken := list(islice(iterator, batch)):
                pending.append(pool.submit(work, taken))
                if len(pending) > 2 * workers:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
