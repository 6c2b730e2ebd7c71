"""What has to hold of a cluster's other nodes before batches are made there, and what is watched while they are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from pipeline import actors, placement, spill
from pipeline.crew import FeedError
from pipeline.maker import Probe
from pipeline.placement import Node
from pipeline.spec import FeedSpec
from pipeline.worker import open_data
from profiler.errors import StallscopeError
from profiler.recorder import Recorder


def prepare(spec: FeedSpec, probed: Probe, recorder: Recorder, stack: ExitStack) -> None:
    """Refuse a feed whose remote workers could not work, and watch the object stores that records or batches go
    through until ``stack`` ends. Costs nothing where none do. Ray must be up."""
    if not spec.remote_workers and spec.topology == "fused":
        return
    mine, others = actors.this_node(), actors.other_nodes()
    stores = [int(node["Resources"].get("object_store_memory", 0)) for node in (mine, *others)]
    nodes = [
        Node(name(node), float(node["Resources"].get("CPU", 0)), store)
        for node, store in zip(others, stores[1:], strict=True)
    ]
    placement.check_remote(spec, nodes, probed.layout.nbytes, stores[0])
    if spec.remote_workers:
        check_data(spec, others)
    stack.enter_context(spill.watching(recorder, [mine, *(others if spec.remote_workers else ())]))


def name(node: Mapping[str, Any]) -> str:
    """A node of ``ray.nodes()`` as people know it."""
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, node {node['NodeID'][:8]})"


Look = Callable[[FeedSpec, Sequence[Mapping[str, Any]]], list[str | None]]


def check_data(spec: FeedSpec, nodes: Sequence[Mapping[str, Any]], look: Look | None = None) -> None:
    """Refuse a cluster in which a node cannot read the data set under the path it has here, or finds another one.

    All nodes are looked at, since a worker whose node is lost is started anew on another.
    look: gives for each node what is wrong there, None for nothing.
    """
    found = (look or _look_everywhere)(spec, nodes)
    wrong = [f"{name(node)}: {text}" for node, text in zip(nodes, found, strict=True) if text is not None]
    if wrong:
        source = spec.source if isinstance(spec.source, str) else ", ".join(spec.source)
        raise FeedError(
            f"{len(wrong)} of the {len(nodes)} other nodes of the cluster cannot read the data set {source}",
            expected="the same data set under the same path on every node",
            found="; ".join(wrong),
            hint="copy it there or use storage that all nodes share: data sets are read by their path and never sent",
        )


def _look_everywhere(spec: FeedSpec, nodes: Sequence[Mapping[str, Any]]) -> list[str | None]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task: Any = ray.remote(look_at_data)
    calls = [
        task.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(spec)
        for node in nodes
    ]
    ready, _ = ray.wait(calls, num_returns=len(calls), timeout=spec.start_timeout_s)
    found: list[str | None] = []
    for call in calls:
        if call not in ready:
            ray.cancel(call, force=True)
            found.append(f"no answer within {spec.start_timeout_s:g} s")
            continue
        try:
            found.append(ray.get(call))
        except ray.exceptions.RayError as error:
            found.append(str(error).strip().splitlines()[-1])
    return found


def look_at_data(spec: FeedSpec) -> str | None:
    """On the node that is asked: what is wrong with the data set there."""
    from datasets.errors import DatasetChanged

    try:
        with contextlib.closing(open_data(replace(spec, lock=False))):
            return None
    except DatasetChanged as error:
        return f"another data set lies there: {error.found} and not {error.expected}"
    except (StallscopeError, OSError) as error:
        return error.what if isinstance(error, StallscopeError) else str(error)
