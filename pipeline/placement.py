"""Who gets which share of the CPUs, decided before anything is started: Ray would let actors wait for ever."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.crew import FeedError
from pipeline.spec import FeedSpec

TRAINER_CPUS = 0.25
"""The trainer is no actor and reserves nothing with Ray; this share is kept free for it."""
OWNER_CPUS = CARRIER_CPUS = 0.1
_PARCELS = 2
"""Batches of each remote worker that the object stores at both ends have to have room for: one that travels, and one
that has arrived and is not forgotten yet."""
STORE_SHARE = 0.8
"""Of an object store: Ray begins to write objects to disk when it is fuller (its object_spilling_threshold)."""


@dataclass(frozen=True)
class Plan:
    """Workers and reserved CPUs of one feed. ``owner`` is the process that reads for all (``topology: split``);
    ``most``: how many workers it may come to have, 0: those. ``carriers`` bring batches from other nodes."""

    workers: int
    worker_cpus: float
    owner: bool
    most: int = 0
    carriers: int = 0

    @property
    def cpus(self) -> float:
        others = (OWNER_CPUS if self.owner else 0.0) + self.carriers * CARRIER_CPUS + TRAINER_CPUS
        return self.workers * self.worker_cpus + others


def plan(spec: FeedSpec, node_cpus: float, *, owner: bool) -> Plan:
    """The processes of a feed on a node with ``node_cpus`` CPUs.

    ``workers: auto`` begins with two, or one where there are fewer than three CPUs, and may come to as many as there
    are CPUs, fewer where the sum does not fit (:mod:`pipeline.adaptive` decides).
    Raises :class:`FeedError` with the sum where it does not fit.
    """
    carriers = spec.remote_workers
    others = Plan(0, spec.worker_cpus, owner, carriers=carriers).cpus
    fits = int((node_cpus - others) / spec.worker_cpus + 1e-9)
    if spec.workers == "auto":
        most = max(1, min(fits, int(node_cpus)))
        workers = max(1, min(most, 2, int(node_cpus) - 1))
    else:
        workers = most = spec.workers
    result = Plan(workers, spec.worker_cpus, owner, most, carriers)
    if result.cpus > node_cpus + 1e-9:
        terms = [f"{workers} workers x {spec.worker_cpus:g}"]
        if owner:
            terms.append(f"reader {OWNER_CPUS:g}")
        if carriers:
            terms.append(f"{carriers} carriers x {CARRIER_CPUS:g}")
        terms.append(f"trainer {TRAINER_CPUS:g}")
        raise FeedError(
            "the feed needs more CPUs than this node has",
            expected=" + ".join(terms) + f" = {result.cpus:g} CPUs",
            found=f"{node_cpus:g} CPUs",
            hint=f"feed.workers: auto, or at most {fits}" if fits >= 1 else "feed.engine: inline needs no extra CPU",
        )
    return result


@dataclass(frozen=True)
class Node:
    """Another node of the cluster: its name for messages, CPUs, and bytes of its object store."""

    name: str
    cpus: float
    store_bytes: int


def check_remote(spec: FeedSpec, nodes: list[Node], slot_bytes: int, store_bytes: int) -> None:
    """Refuse remote workers that would wait for ever: for a node, for CPUs, or for room in the object store.

    nodes: the others. slot_bytes: of a batch. store_bytes: of the object store of the trainer's node.
    """
    wanted = spec.remote_workers
    if not wanted:
        return
    cpus = [node.cpus for node in nodes]
    room = sum(int(count / spec.worker_cpus + 1e-9) for count in cpus)
    if room < wanted:
        raise FeedError(
            "the other nodes of the cluster cannot hold the feed's remote workers",
            expected=f"{wanted} x {spec.worker_cpus:g} CPUs on nodes other than the trainer's",
            found=f"{len(cpus)} other nodes"
            + (f" with {', '.join(f'{count:g}' for count in cpus)} CPUs" if cpus else ""),
            hint=f"feed.remote_workers: {room}" if room else "join a cluster of several nodes with --address auto",
        )
    _check_store("the trainer's node", wanted, slot_bytes, store_bytes)
    for row, node in enumerate(nodes):  # workers go to the nodes in turn
        _check_store(node.name, len(range(row, wanted, len(nodes))), slot_bytes, node.store_bytes)


def _check_store(where: str, workers: int, slot_bytes: int, store_bytes: int) -> None:
    need = workers * _PARCELS * slot_bytes
    if need > STORE_SHARE * store_bytes:
        raise FeedError(
            f"batches of remote workers do not fit into Ray's object store of {where}: it would write them to disk",
            expected=f"{workers} workers x {_PARCELS} batches x {slot_bytes} bytes = {need} bytes, "
            f"at most {100 * STORE_SHARE:.0f} % of the store",
            found=f"{store_bytes} bytes",
            hint="fewer feed.remote_workers, a smaller batch, or ray start --object-store-memory",
        )
