"""What the solver's and the net's prototxt add to a configuration: net, iterations, and the data layers' settings.

The configuration wins over the prototxt, key by key, and every such decision becomes one of ``Config.notes``.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from pipeline.config import Config, Phase, validate
from profiler.errors import UsageError

_FOREIGN_DATA_LAYERS = ("ImageData", "HDF5Data", "WindowData", "DummyData")


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
    _check_shape_of_job(document, run)
    data = document.setdefault("data", {})
    shared = data.get("transform") or {}
    for phase in ("TRAIN", "TEST"):
        section = data.setdefault(phase.lower(), {})
        layer = _data_layer(document["net"], phase) if document.get("net") else None
        _fill(section, shared, phase, layer, document.get("net"), base, notes)
    _check_data(document, data, solver)
    config = validate(document)
    return config.with_notes(*notes)


def existing(key: str, path: str, base: Path) -> str:
    """``path`` where it exists: relative to the current directory, else to ``base``. Raises :class:`UsageError`."""
    given = Path(path).expanduser()
    if given.exists():
        return str(given)
    if not given.is_absolute() and (base / given).exists():
        return str(base / given)
    looked = [str(given.absolute())] + ([] if given.is_absolute() else [str((base / given).absolute())])
    raise UsageError(
        f"{key}: {path} does not exist",
        expected="an existing path",
        found="nothing at " + " or ".join(dict.fromkeys(looked)),
    )


def _solver(document: dict[str, Any], run: dict[str, Any], base: Path, notes: list[str]) -> Any | None:
    """The solver's message, with its net and max_iter taken over where the configuration has none."""
    if document.get("solver") is None:
        return None
    from gpu.prototxt import read_solver

    path = document["solver"] = existing("solver", document["solver"], base)
    solver = read_solver(path)
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


def _data_layer(net: str, phase: Phase) -> Any | None:
    """The layer of the net that loads data in a phase; None where the net has none."""
    from gpu.prototxt import DATA_LAYERS, filter_net, read_net

    layers = [layer for layer in filter_net(read_net(net), phase).layer if layer.type in DATA_LAYERS]
    if len(layers) > 1:
        raise UsageError(
            f"{net}: {len(layers)} data layers in {phase}",
            expected="one data layer in each phase",
            found=", ".join(layer.name for layer in layers),
        )
    return layers[0] if layers else None


def _fill(
    section: dict[str, Any],
    shared: dict[str, Any],
    phase: Phase,
    layer: Any | None,
    net: str | None,
    base: Path,
    notes: list[str],
) -> None:
    """Fill one of data.train and data.test from the data layer of its phase."""
    name = f"data.{phase.lower()}"
    where = f"layer {layer.name!r} of {net}" if layer is not None else ""
    own = section.get("transform")
    transform = dict(own if own is not None else shared)
    if own is None and phase == "TEST":
        transform.pop("mirror", None)  # inherited: it acts in TRAIN only
    _path(f"{name}.transform.mean_file", transform, "mean_file", base)
    _path(f"{name}.source", section, "source", base)
    if layer is not None:
        given_source = section.get("source")
        _merge(name, section, _source_settings(layer, given_source, net), where, notes)
        _merge(f"{name}.transform", transform, _transform_settings(layer), where, notes)
        folder = Path(net or ".").parent
        _path(f"{where}: source", section, "source", folder)
        _path(f"{where}: mean_file", transform, "mean_file", folder)
    section["transform"] = transform


def _path(key: str, section: dict[str, Any], name: str, base: Path) -> None:
    value = section.get(name)
    if value is not None and not value.startswith("memory:"):
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


def _source_settings(layer: Any, given_source: str | None, net: str | None) -> dict[str, Any]:
    if layer.type != "Data":
        if layer.type in _FOREIGN_DATA_LAYERS and given_source is None:
            raise UsageError(
                f"{net}: the data layer {layer.name!r} has the type {layer.type}, which this version cannot read",
                expected="a layer of type Data, or data.train.source and data.test.source in the configuration",
                found=layer.type,
            )
        return {}
    settings: dict[str, Any] = {}
    param = layer.data_param
    if param.source:
        settings["source"] = param.source
    if param.batch_size:
        settings["batch"] = int(param.batch_size)
    # Caffe's default is LEVELDB; where the field is left out the folder decides.
    if param.HasField("backend") and (given_source is None or given_source == param.source):
        settings["backend"] = "lmdb" if param.backend == param.LMDB else "leveldb"
    return settings


def _transform_settings(layer: Any) -> dict[str, Any]:
    param = layer.transform_param
    settings: dict[str, Any] = {}
    if param.crop_size:
        settings["crop"] = int(param.crop_size)
    if param.HasField("mirror"):
        settings["mirror"] = bool(param.mirror)
    if param.HasField("scale"):
        # shortest decimal that gives the same float32: 0.00390625 reads as it was written
        settings["scale"] = float(str(_float32(param.scale)))
    if param.mean_file:
        settings["mean_file"] = param.mean_file
    if len(param.mean_value):
        settings["mean_value"] = [float(str(_float32(value))) for value in param.mean_value]
    for key in ("force_color", "force_gray"):
        if param.HasField(key):
            settings[key] = bool(getattr(param, key))
    return settings


def _float32(value: float) -> Any:
    import numpy as np

    return np.float32(value)


def _check_data(document: dict[str, Any], data: dict[str, Any], solver: Any | None) -> None:
    train, test = data["train"], data["test"]
    if train.get("source") is None:
        net = document.get("net")
        raise UsageError(
            f"{net}: the net has no data layer and the configuration has no data.train.source"
            if net
            else "the configuration has no data.train.source",
            expected="a Data layer in the net or data.train.source in the configuration",
            hint="add 'data: {train: {source: FOLDER, batch: 64}}'",
        )
    tests = solver is not None and (len(solver.test_iter) > 0 and solver.test_interval > 0)
    if tests and test.get("source") is None:
        raise UsageError(
            f"{document['solver']} asks for tests but there is no test set",
            expected="a Data layer for TEST in the net or data.test.source in the configuration",
            hint="add 'data: {test: {source: FOLDER, batch: 100}}'",
        )
    for phase, section in (("train", train), ("test", test)):
        if section.get("source") is not None and section.get("batch") is None:
            raise UsageError(
                f"data.{phase} has no batch",
                expected="records in a batch: data." + phase + ".batch, or batch_size in the data layer",
                hint=f"add --data.{phase}.batch 64",
            )
