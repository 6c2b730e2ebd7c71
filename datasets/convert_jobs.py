"""Items made by several threads, handed on in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from datasets.convert_inputs import Converted, Job
from profiler.errors import StallscopeError


def outcomes(jobs: Iterator[Job], workers: int) -> Iterator[tuple[Job, Converted | StallscopeError]]:
    """Each job with what it made, or the error that kept it from it; in the order of the jobs, whoever is first.

    Threads are enough: decoders, the resizing kernel and compression run without the interpreter's lock. No more than
    four jobs a thread are under way, so memory does not grow with the input.
    """
    if workers == 1:
        for job in jobs:
            yield job, _attempt(job)
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix="convert")
    try:
        under_way: deque[tuple[Job, Future[Converted | StallscopeError]]] = deque()
        for job in jobs:
            under_way.append((job, pool.submit(_attempt, job)))
            if len(under_way) >= 4 * workers:
                first, future = under_way.popleft()
                yield first, future.result()
        while under_way:
            first, future = under_way.popleft()
            yield first, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _attempt(job: Job) -> Converted | StallscopeError:
    try:
        return job.make()
    except StallscopeError as error:
        return error
