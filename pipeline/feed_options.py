"""What a person gives to :class:`pipeline.Feed`, as the one frozen :class:`FeedSpec` that a feed is made from.

A configuration, a spec, or the path of a data set and keywords: ``Feed("data/train_lmdb", batch=64, shuffle=True)``.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from pipeline.spec import FeedSpec, Phase, TransformSpec, feed_spec
from profiler.errors import UsageError
from profiler.recorder import Recorder

if TYPE_CHECKING:
    from pipeline.config import Config

Wanted: TypeAlias = "Config | FeedSpec | str | os.PathLike[str] | Sequence[str]"

_TRANSFORM = [field.name for field in fields(TransformSpec)]
_OWN = {"source", "phase", "start_step", "stop_step", "cycle", "origin", "transform"}  # parameters of Feed itself
_FEED = [field.name for field in fields(FeedSpec) if field.name not in _OWN]
_ALLOWED = [*_FEED, *_TRANSFORM, "drop_last"]
_ELSEWHERE = {"batch_size": "batch", "num_workers": "workers", "prefetch_factor": "depth", "transform": "python"}


def spec_of(
    config: Wanted,
    phase: Phase,
    start_step: int,
    stop_step: int | None,
    recorder: Recorder,
    cycle: int | None,
    origin: int,
    options: Mapping[str, Any],
) -> FeedSpec:
    """The spec of a feed. Raises :class:`UsageError` that names what is wrong and what is allowed there."""
    position: dict[str, Any] = {
        "phase": phase, "start_step": start_step, "stop_step": stop_step, "cycle": cycle, "origin": origin,
    }  # fmt: skip
    if isinstance(config, (str, os.PathLike, Sequence)):
        return _from_path(config, {**position, **options})
    if not isinstance(config, FeedSpec) and not hasattr(config, "order_seed"):
        raise UsageError(
            "a feed cannot be made from this",
            expected="the path of a data set, a configuration (pipeline.load) or a FeedSpec",
            found=f"{type(config).__name__}: {str(config)[:80]}",
            hint="pipeline.load(None, {'data.train.source': ..., ...}) makes a configuration of a mapping",
        )
    if options:
        raise UsageError(
            f"{next(iter(options))} is no argument of a feed that is made from a {type(config).__name__}",
            expected="such keywords beside the path of a data set only",
            hint="set it in the configuration (data.*, feed.*), or dataclasses.replace(spec, ...)",
        )
    if isinstance(config, FeedSpec):
        default = {"phase": "TRAIN", "start_step": 0, "stop_step": None, "cycle": None, "origin": 0}
        return replace(config, **{name: value for name, value in position.items() if value != default[name]})
    return feed_spec(config, phase, start_step, stop_step, recorder, cycle, origin)


def _from_path(path: str | os.PathLike[str] | Sequence[str], options: dict[str, Any]) -> FeedSpec:
    source = os.fspath(path) if isinstance(path, (str, os.PathLike)) else tuple(map(os.fspath, path))
    if isinstance(source, str) and source.endswith((".yaml", ".yml")):
        raise UsageError(
            f"{source} is a configuration and no data set",
            expected="the path of a data set",
            hint=f"Feed(pipeline.load({source!r}))",
        )
    for name in options:
        if name not in _ALLOWED and name not in _OWN - {"source", "transform"}:
            near = _ELSEWHERE.get(name) or next(iter(difflib.get_close_matches(name, _ALLOWED, 1)), None)
            raise UsageError(
                f"a feed has no option {name}",
                expected="one of " + ", ".join(sorted(_ALLOWED)),
                hint=f"did you mean {near}?" if near else None,
            )
    if options.get("batch") is None:
        raise UsageError("batch is not set: how many records make a batch?", hint=f"Feed({source!r}, batch=64)")
    if isinstance(options.get("shuffle"), bool):
        options["shuffle"] = "full" if options["shuffle"] else "none"
    if "drop_last" in options:
        drop = options.pop("drop_last")
        if "tail" in options:
            raise UsageError("drop_last and tail exclude each other", expected="one of the two")
        options["tail"] = "drop" if drop else "partial"
    if options.get("workers") is not None:
        options.setdefault("engine", "ray")  # else the number would mean nothing
    shape = {name: options.pop(name) for name in _TRANSFORM if name in options}
    if callable(shape.get("python")):
        shape["python"] = _name_of(shape["python"], options.get("engine", "inline"))
    for name in ("mean_value", "resize"):
        if isinstance(shape.get(name), list):
            shape[name] = tuple(shape[name])
    if isinstance(shape.get("mean_value"), (int, float)):
        shape["mean_value"] = (float(shape["mean_value"]),)
    return FeedSpec(source, transform=TransformSpec(**shape), **options)


def _name_of(function: Callable[..., Any], engine: str) -> str:
    """``module:function``, by which worker processes find a function."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<no name>")
    if not module or not name.isidentifier() or (module == "__main__" and engine != "inline"):
        raise UsageError(
            f"worker processes cannot import {name} of {module}",
            expected="a function at the top level of a module that can be imported",
            hint="put it into a file of its own, or engine='inline' for one that stands in the script itself",
        )
    return f"{module}:{name}"
