"""What a solver's prototxt says to a job: which net in which phase, how long, and what of it a job cannot follow."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config import Phase
from profiler.errors import UsageError

if TYPE_CHECKING:
    from gpu.data_layers import DataLayer


@dataclass(frozen=True)
class PhaseNet:
    """The net of a phase: its file, and the stages and the level that choose layers in it."""

    path: str
    phase: Phase
    stages: tuple[str, ...] = ()
    level: int = 0

    def data_layers(self) -> list[DataLayer]:
        """The layers that load data. Raises PrototxtError, LayerError."""
        from gpu.data_layers import data_layers

        return data_layers(Path(self.path), self.phase, self.stages, self.level)

    def inputs(self) -> list[Any]:
        """The layers (messages) whose tops somebody has to fill: Input and MemoryData, in the order of the text."""
        from gpu.prototxt import filter_net, load_net

        layers = filter_net(load_net(Path(self.path)), self.phase, self.stages, self.level).net.layer
        return [layer for layer in layers if layer.type in ("Input", "MemoryData")]


def read_solver(path: str) -> Any:
    """The message in a solver's file. Raises PrototxtError, and :class:`UsageError` for what no job can follow."""
    from datasets import caffe_pb2
    from gpu.prototxt import read_message

    solver = caffe_pb2.SolverParameter()
    read_message(Path(path), solver)
    _refuse(solver, path)
    return solver


def tests(solver: Any | None) -> bool:
    """Whether a job with this solver ever tests."""
    return solver is not None and len(solver.test_iter) > 0 and solver.test_interval > 0


def phase_net(net: str, solver: Any | None, path: str | None, phase: Phase) -> PhaseNet:
    """The net of a phase as :class:`gpu.solver.Solver` builds it; ``net``: the job's, ``path``: the solver's file.

    Raises :class:`UsageError` where the solver's ``test_net`` does not exist.
    """
    if solver is None:
        return PhaseNet(net, phase)
    state = solver.train_state
    if phase == "TEST":
        state = solver.test_state[0] if solver.test_state else type(state)()
        if solver.test_net:
            net = existing(f"{path}: test_net", solver.test_net[0], Path(path or ".").parent)
    return PhaseNet(net, phase, tuple(state.stage), int(state.level))


def existing(key: str, path: str, base: Path) -> str:
    """``path`` where it exists: relative to the current directory, else to ``base``. Raises :class:`UsageError`."""
    given = Path(path).expanduser()
    # os.path.exists: of a path that no system can have (too long a name), Path.exists raises OSError
    if os.path.exists(given):
        return str(given)
    if not given.is_absolute() and os.path.exists(base / given):
        return str(base / given)
    looked = [str(given.absolute())] + ([] if given.is_absolute() else [str((base / given).absolute())])
    raise UsageError(
        f"{key}: {path} does not exist",
        expected="an existing path",
        found="nothing at " + " or ".join(dict.fromkeys(looked)),
    )


def notes(solver: Any, path: str) -> list[str]:
    """What of a solver has no effect in a job."""
    told = [
        f"{field} of {path} has no effect: run.checkpoint_every and run.folder say when and where"
        for field in ("snapshot", "snapshot_prefix")
        if solver.HasField(field)
    ]
    if not solver.snapshot_after_train:
        told.append(f"snapshot_after_train of {path} has no effect: a run ends with a snapshot")
    if not tests(solver):
        told += [
            f"{field} of {path} has no effect: it never tests without test_iter and test_interval"
            for field in ("test_net", "test_state", "test_iter", "test_interval")
            if getattr(solver, field)
        ]
    return told


def _refuse(solver: Any, path: str) -> None:
    several = {
        "test_iter": list(solver.test_iter),
        "test_net": list(solver.test_net),
        "test_state": [" ".join(str(state).split()) for state in solver.test_state],
    }
    problems = [f"{field}: {found}" for field, found in several.items() if len(found) > 1]
    problems += [
        f"{field} (a net inside the solver)"
        for field in ("net_param", "train_net_param", "test_net_param")
        if field in {known.name for known, _ in solver.ListFields()}
    ]
    if problems:
        raise UsageError(
            f"not supported in this version: {', '.join(problems)} in {path}",
            expected="nets in files of their own, one of them to train and one to test",
            hint="keep one test_iter, test_net and test_state; more nets can be tested in Python: Solver.test(index)",
        )
    if solver.net and solver.train_net:
        raise UsageError(
            f"{path} names two nets to train",
            expected="net or train_net",
            found=f"net: {solver.net}, train_net: {solver.train_net}",
        )
    if solver.iter_size < 1:
        raise UsageError(f"iter_size of {path} is out of range", expected="1 or more", found=solver.iter_size)
