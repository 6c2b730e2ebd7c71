"""Who gets which share of the CPUs, decided before anything is started: Ray would let actors wait for ever."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.crew import FeedError
from pipeline.spec import FeedSpec

TRAINER_CPUS = 0.25
"""The trainer is no actor and reserves nothing with Ray; this share is kept free for it."""
OWNER_CPUS = 0.1


@dataclass(frozen=True)
class Plan:
    """Workers and reserved CPUs of one feed. ``owner`` is the process that reads for all (``topology: split``);
    ``most``: how many workers it may come to have, 0: those."""

    workers: int
    worker_cpus: float
    owner: bool
    most: int = 0

    @property
    def cpus(self) -> float:
        return self.workers * self.worker_cpus + (OWNER_CPUS if self.owner else 0.0) + TRAINER_CPUS


def plan(spec: FeedSpec, node_cpus: float, *, owner: bool) -> Plan:
    """The processes of a feed on a node with ``node_cpus`` CPUs.

    ``workers: auto`` begins with two, or one where there are fewer than three CPUs, and may come to as many as there
    are CPUs, fewer where the sum does not fit (:mod:`pipeline.adaptive` decides).
    Raises :class:`FeedError` with the sum where it does not fit.
    """
    fits = int((node_cpus - TRAINER_CPUS - (OWNER_CPUS if owner else 0)) / spec.worker_cpus + 1e-9)
    if spec.workers == "auto":
        most = max(1, min(fits, int(node_cpus)))
        workers = max(1, min(most, 2, int(node_cpus) - 1))
    else:
        workers = most = spec.workers
    result = Plan(workers, spec.worker_cpus, owner, most)
    if result.cpus > node_cpus + 1e-9:
        terms = [f"{workers} workers x {spec.worker_cpus:g}"]
        if owner:
            terms.append(f"reader {OWNER_CPUS:g}")
        terms.append(f"trainer {TRAINER_CPUS:g}")
        raise FeedError(
            "the feed needs more CPUs than this node has",
            expected=" + ".join(terms) + f" = {result.cpus:g} CPUs",
            found=f"{node_cpus:g} CPUs",
            hint=f"feed.workers: auto, or at most {fits}" if fits >= 1 else "feed.engine: inline needs no extra CPU",
        )
    return result
