"""What the solver's and the net's prototxt add to a configuration: net, iterations, and the data layers' settings.

The configuration wins over the prototxt, key by key, and every such decision becomes one of ``Config.notes``.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.config import Config, Phase, validate
from pipeline.solverdata import PhaseNet, existing, phase_net, read_solver, tests
from pipeline.solverdata import notes as solver_notes
from profiler.errors import StallscopeError, UsageError

if TYPE_CHECKING:
    from gpu.data_layers import DataLayer

_NO_PATHS = ("memory:", "python:")


def complete(document: dict[str, Any], base: Path) -> Config:
    """The configuration with everything that the prototxts supply, and every path resolved.

    ``base`` is the folder of the YAML file. Raises :class:`UsageError` for a path that does not exist, a job without
    data or without a length, and a net without a solver.
    """
    document = copy.deepcopy(document)
    notes: list[str] = []
    run = document.setdefault("run", {})
    solver = _solver(document, run, base, notes)
    if document.get("net") is not None:
        document["net"] = existing("net", document["net"], base)
    if run.get("start_from") is not None:
        with contextlib.suppress(UsageError) if run.get("if_exists") == "resume" else contextlib.nullcontext():
            # (A run that is resumed has its own snapshots: the file it began with may be gone.)
            run["start_from"] = existing("run.start_from", run["start_from"], base)
    _check_shape_of_job(document, run)
    data = document.setdefault("data", {})
    shared = data.get("transform") or {}
    train: PhaseNet | None = None
    phases: tuple[Phase, ...] = ("TRAIN", "TEST")
    for phase in phases:
        section = data.setdefault(phase.lower(), {})
        used = _used(phase, solver)
        if section.get("source") is not None and not used:
            notes.append(f"data.test has no effect: {document['solver']} never tests")
        _fill_given(section, shared, phase, base)
        # What is never read need not exist: Caffe does not open it either.
        with contextlib.nullcontext() if used else contextlib.suppress(StallscopeError):
            if document.get("net") is not None:
                net = phase_net(document["net"], solver, document.get("solver"), phase)
                train = train or net
                layer = _data_layer(net)
                _fill(section, layer, net, notes)
                if layer is not None and layer.shuffle is not None and used:
                    _shuffle(data, phase, layer, notes)
            _python_batch(section, phase)
    _check_data(document, data, solver, train)
    config = validate(document)
    given, grows = config.device.model_fields_set, {"loss_scale_start", "loss_scale_growth"}
    if config.device.precision == "fp32":
        idle = sorted(given & {"keep_fp32", "loss_scale", *grows})
        notes += [f"device.{key} has no effect: device.precision is fp32" for key in idle]
    elif config.device.loss_scale != "dynamic":
        notes += [f"device.{key} has no effect: device.loss_scale is a number" for key in sorted(given & grows)]
    if solver is not None:
        config = config.with_solver(int(solver.iter_size), tests(solver))
    return config.with_notes(*dict.fromkeys(notes))  # one layer may serve both phases


def _solver(document: dict[str, Any], run: dict[str, Any], base: Path, notes: list[str]) -> Any | None:
    """The solver's message, with its net and max_iter taken over where the configuration has none."""
    if document.get("solver") is None:
        return None
    path = document["solver"] = existing("solver", document["solver"], base)
    solver = read_solver(path)
    notes += solver_notes(solver, path)
    named = solver.net or solver.train_net
    if named and document.get("net") is None:
        document["net"] = existing(f"{path}: net", named, Path(path).parent)
    elif named and Path(named).name != Path(document["net"]).name:
        notes.append(f"net: {document['net']} of the configuration is used, not {named} of {path}")
    if run.get("iterations") is None and solver.max_iter > 0:
        run["iterations"] = int(solver.max_iter)
    elif solver.max_iter > 0 and run["iterations"] != solver.max_iter:
        ours, theirs = run["iterations"], solver.max_iter
        notes.append(f"run.iterations: {ours} of the configuration is used, not max_iter {theirs} of {path}")
    return solver


def _used(phase: str, solver: Any | None) -> bool:
    """Whether the data of a phase are read; without a solver it is the caller who says so."""
    return phase == "TRAIN" or solver is None or tests(solver)


def _check_shape_of_job(document: dict[str, Any], run: dict[str, Any]) -> None:
    net, solver = document.get("net"), document.get("solver")
    backend = (document.get("device") or {}).get("backend", "auto")
    if net is None and solver is not None:
        raise UsageError(
            "there is a solver but no net", expected="net in the configuration or in the solver", hint="add 'net: FILE'"
        )
    if net is not None and solver is None:
        raise UsageError(
            "there is a net but no solver", expected="solver in the configuration", hint="add 'solver: FILE'"
        )
    if net is None and backend != "emulated":
        raise UsageError(
            "there is no net",
            expected="net, or device.backend: emulated for a job that only feeds",
            found=f"device.backend: {backend}",
            hint="add 'net: FILE' and 'solver: FILE'",
        )
    if run.get("iterations") is None:
        raise UsageError(
            "the job has no length",
            expected="run.iterations or max_iter in the solver",
            hint="add --run.iterations 1000",
        )


def _data_layer(net: PhaseNet) -> DataLayer | None:
    """The layer of the net that loads data in its phase; None where the net has none."""
    layers = net.data_layers()
    if len(layers) > 1:
        raise UsageError(
            f"{net.path}: {len(layers)} data layers in {net.phase}",
            expected="one data layer in each phase",
            found=", ".join(layer.name for layer in layers),
        )
    return layers[0] if layers else None


def _fill_given(section: dict[str, Any], shared: dict[str, Any], phase: str, base: Path) -> None:
    """What the configuration itself says of one of data.train and data.test: paths that exist, one transform."""
    name = f"data.{phase.lower()}"
    own = section.get("transform")
    transform = dict(own if own is not None else shared)
    if own is None and phase == "TEST":
        transform.pop("mirror", None)  # inherited: it acts in TRAIN only
    _path(f"{name}.transform.mean_file", transform, "mean_file", base)
    _path(f"{name}.source", section, "source", base)
    _path(f"{name}.labels", section, "labels", base)
    _path(f"{name}.root", section, "root", base)
    section["transform"] = transform


def _fill(section: dict[str, Any], layer: DataLayer | None, net: PhaseNet, notes: list[str]) -> None:
    """Fill one of data.train and data.test from the data layer of its phase, or from the inputs of the net."""
    name, folder = f"data.{net.phase.lower()}", Path(net.path).parent
    transform = section["transform"]
    if layer is not None:
        where = f"layer {layer.name!r} of {net.path}"
        same = section.get("source") in (None, layer.source)
        _merge(name, section, _source_settings(layer, same), where, notes)
        _merge(f"{name}.transform", transform, _transform_settings(layer, transform, same), where, notes)
        notes.extend(f"{field} of {where} has no effect here" for field in layer.unused)
        _path(f"{where}: source", section, "source", folder)
        _path(f"{where}: root_folder", section, "root", folder)
        _path(f"{where}: mean_file", transform, "mean_file", folder)
    elif section.get("source") is not None and (batch := _input_batch(net)) is not None:
        _merge(name, section, {"batch": batch[1]}, f"layer {batch[0]!r} of {net.path}", notes)


def _input_batch(net: PhaseNet) -> tuple[str, int] | None:
    """Name of the first input of a net without data layers, and its samples in a batch; None where it is silent."""
    for layer in net.inputs()[:1]:
        dims = layer.input_param.shape[0].dim if layer.input_param.shape else ()
        count = layer.memory_data_param.batch_size if layer.type == "MemoryData" else dims[0] if dims else 0
        return (layer.name, int(count)) if count else None
    return None


def _python_batch(section: dict[str, Any], phase: str) -> None:
    """A Python data layer may say how many samples make a batch."""
    if str(section.get("source") or "").startswith("python:") and section.get("batch") is None:
        from pipeline.python_source import PythonSource

        with PythonSource(section["source"], section.get("param"), phase) as source:
            batch = section["batch"] = source.batch
        if batch is not None and (not isinstance(batch, int) or batch < 1):
            raise UsageError(f"{source.name} has a batch that is none", expected="an integer from 1", found=repr(batch))


def _path(key: str, section: dict[str, Any], name: str, base: Path) -> None:
    value = section.get(name)
    if isinstance(value, (list, tuple)):
        section[name] = [existing(key, part, base) if not part.startswith(_NO_PATHS) else part for part in value]
    elif value is not None and not value.startswith(_NO_PATHS):
        section[name] = existing(key, value, base)


def _merge(name: str, section: dict[str, Any], supplied: dict[str, Any], where: str, notes: list[str]) -> None:
    for key, value in supplied.items():
        if section.get(key) is None:
            section[key] = value
        elif _differs(section[key], value):
            notes.append(f"{name}.{key}: {section[key]} of the configuration is used, not {value} of {where}")


def _differs(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, str) and isinstance(theirs, str):
        return Path(ours).name != Path(theirs).name
    return (list(ours) if isinstance(ours, (list, tuple)) else ours) != theirs


def _source_settings(layer: DataLayer, same: bool) -> dict[str, Any]:
    """``same``: the layer's own source is read. What describes another one than is read says nothing."""
    settings: dict[str, Any] = {"source": layer.source, "batch": layer.batch}
    if same:
        # Where the text is silent about the backend, the folder decides.
        settings["backend"] = layer.backend.lower() if layer.backend else None
        settings |= {"root": layer.root, "param": layer.param}
        if layer.backend == "HDF5":
            settings["tops"] = list(layer.tops)
    return {key: value for key, value in settings.items() if value}


def _transform_settings(layer: DataLayer, own: dict[str, Any], same: bool) -> dict[str, Any]:
    settings = {key: value for key, value in asdict(layer.transform).items() if value is not None}
    if "scale" in settings:
        settings["scale"] = _as_written(settings["scale"])
    if "mean_value" in settings:
        settings["mean_value"] = [_as_written(value) for value in settings["mean_value"]]
    if "resize" in settings:
        settings["resize"] = list(settings["resize"])
    files = layer.backend == "LIST"  # its colour and size are those of files, and no settings of a transform
    if (files and not same) or own.get("force_color") or own.get("force_gray"):
        settings = {key: value for key, value in settings.items() if key not in ("force_color", "force_gray")}
    if files and not same:
        settings.pop("resize", None)
    return settings


def _shuffle(data: dict[str, Any], phase: Phase, layer: DataLayer, notes: list[str]) -> None:
    """Take over ``shuffle`` of a layer that has it, where the configuration is silent."""
    if phase == "TEST":
        if layer.shuffle:
            notes.append(f"shuffle of layer {layer.name!r} has no effect: tests read from record 0 in order")
        return
    order = data["order"] = dict(data.get("order") or {})
    theirs = "full" if layer.shuffle else "none"
    ours = order.setdefault("shuffle", theirs)
    if (ours == "none") != (theirs == "none"):
        notes.append(f"data.order.shuffle: {ours} of the configuration is used, not {theirs} of layer {layer.name!r}")


def _as_written(value: float) -> float:
    """The shortest decimal that gives the same float32: 33.3 and not 33.29999923706055."""
    return float(str(np.float32(value)))


def _check_data(document: dict[str, Any], data: dict[str, Any], solver: Any | None, net: PhaseNet | None) -> None:
    train, test = data["train"], data["test"]
    if train.get("source") is None:
        hint = "add 'data: {train: {source: FOLDER, batch: 64}}'"
        memory = [layer.name for layer in net.inputs() if layer.type == "MemoryData"] if net is not None else []
        if net is not None and memory:
            what = f"{net.path}: layer {memory[0]!r} (MemoryData) is filled by a program, which a job has not"
            hint = "add 'data: {train: {source: FOLDER}}', which fills its tops; or train in Python: "
            hint += "Net.set_input_arrays and Solver.step"
        elif net is not None:
            what = f"{net.path}: the net has no data layer and the configuration has no data.train.source"
        else:
            what = "the configuration has no data.train.source"
        raise UsageError(what, expected="a Data layer in the net or data.train.source in the configuration", hint=hint)
    if tests(solver) and test.get("source") is None:
        raise UsageError(
            f"{document['solver']} asks for tests but there is no test set",
            expected="a Data layer for TEST in the net or data.test.source in the configuration",
            hint="add 'data: {test: {source: FOLDER, batch: 100}}'",
        )
    for phase, section in (("TRAIN", train), ("TEST", test)):
        if _used(phase, solver) and section.get("source") is not None and section.get("batch") is None:
            raise UsageError(
                f"data.{phase.lower()} has no batch",
                expected=f"records in a batch: data.{phase.lower()}.batch, or batch_size in the data layer",
                hint=f"add --data.{phase.lower()}.batch 64",
            )
