"""A solver: a net that is trained, nets that test it, and the update in between, with Caffe's meaning and files."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from datasets import caffe_pb2
from gpu import hdf5
from gpu.backend import Backend, select_backend
from gpu.caffemodel import CopyReport, copy_weights
from gpu.fields import check_solver
from gpu.loss_scale import LossScale, Scaler
from gpu.lr_policy import LrPolicy
from gpu.net import Net
from gpu.prototxt import is_text, read_message
from gpu.solverstate import SolverState, find_weights, read_state, write_state
from gpu.start import warn_of_start
from gpu.update import Rule, Updater
from profiler import recorder
from profiler.errors import StallscopeError, UsageError
from profiler.events import Stage

if TYPE_CHECKING:
    from gpu.debug_info import DebugInfo

Inputs = Mapping[str, Any]
Batches = Inputs | Sequence[Inputs] | Callable[[], Inputs]
Shapes = Mapping[str, Sequence[int]]


class Solver:
    """Trains one net.

    Parameters
    ----------
    prototxt: path or text of a ``SolverParameter``.
    net: a Net to train, or the path or text of one; it replaces whatever net the solver names.
    backend: name or Backend of the nets; ``auto`` by default.
    input_shapes, test_input_shapes: shapes of the tops of data layers, ``{top: shape}``.
    seed: overrides the solver's ``random_seed`` (initial values, dropout).
    reuse, beside: whether the blobs of its nets share memory, and what else must fit (see Net).
    precision, keep_fp32: how its nets store their blobs (see Net). A net that is given keeps its own.
    loss_scale: with fp16, ``dynamic``, a number, or ``LossScale.of(...)`` with more to say (:mod:`gpu.loss_scale`).
    net_root: folder that relative net paths start from; without it the working directory, then the solver's folder.

    ``net``: the net in phase TRAIN. ``test_nets``: nets in phase TEST that share its parameters' memory. ``iter``:
    number of updates done, and so the number of the step that comes next.

    Raises StallscopeError for a solver that cannot be read or followed.
    """

    def __init__(
        self,
        prototxt: str | Path,
        *,
        net: Net | str | Path | None = None,
        backend: Backend | str | None = None,
        input_shapes: Shapes | None = None,
        test_input_shapes: Shapes | None = None,
        seed: int | None = None,
        net_root: str | os.PathLike[str] | None = None,
        reuse: bool = False,
        beside: Mapping[str, int] | None = None,
        precision: str = "fp32",
        keep_fp32: Collection[str] = (),
        loss_scale: str | float | LossScale = "dynamic",
    ) -> None:
        self._reuse, self._beside = reuse, beside
        self._precision, self._keep_fp32 = precision, tuple(keep_fp32)
        self.param = caffe_pb2.SolverParameter()
        self.where = read_message(prototxt, self.param)
        self.backend = select_backend(backend or "auto")
        self._roots = _roots(self.where, net_root)
        check_solver(self.param, (net if isinstance(net, Net) else self).backend.name)
        self._recent: deque[float] = deque(maxlen=self.param.average_loss)
        self.policy = LrPolicy.from_proto(self.param)
        self.rule = Rule.from_proto(self.param)
        if seed is None and self.param.random_seed >= 0:
            seed = int(self.param.random_seed)
        self.seed = seed
        self.iter = 0
        self._begun = False
        if isinstance(net, Net):
            self.net = net
            self.backend = net.backend
            if net.precision is not None:
                self._precision, self._keep_fp32 = "fp16", net.precision.keep_fp32
        else:
            source = self._given(net) if net is not None else self._train_source()
            self.net = self._build(source, "TRAIN", self.param.train_state, input_shapes)
        if self.param.snapshot_format == self.param.HDF5:
            hdf5.check_names(layer.name for layer in self.net.layers)  # now, not after hours at the first snapshot
        self.updater = Updater(self.rule, self.net.learnable, self.backend.xp)
        self.scaler = Scaler(self.net, self.updater, loss_scale) if self.net.precision is not None else None
        """What scales the loss; None with fp32."""
        self.debug_info: DebugInfo | None = None
        """What ``debug_info`` found in the last step that was displayed; None before, and without it."""
        self.test_nets: list[Net] = []
        for index, source in enumerate(self._test_sources(net, test_input_shapes is not None)):
            state = self.param.test_state[index] if index < len(self.param.test_state) else None
            test_net = self._build(source, "TEST", state, test_input_shapes)
            test_net.share_params(self.net)
            self.test_nets.append(test_net)
        self.loaded: dict[str, CopyReport] = {}
        """What became of each file of the solver's ``weights``, by its path."""
        for weights in self.param.weights:
            for path in weights.split(","):
                found = self._path(path.strip())
                self.loaded[str(found)] = copy_weights(self.net, found)

    # -- training --------------------------------------------------------------------------------------------------

    @property
    def lr(self) -> float:
        """The rate of the next update."""
        return self.policy.rate(self.iter)

    @property
    def smoothed_loss(self) -> float:
        """Mean loss of the last ``average_loss`` steps (1 by default), for display; NaN before the first."""
        return sum(self._recent) / len(self._recent) if self._recent else float("nan")

    @property
    def history(self) -> list[Any]:
        """What the solver remembers of past gradients, on the device, in Caffe's order."""
        return self.updater.history

    def step_on(self, inputs: Batches = (), *, epoch: int = -1) -> float:
        """One step on one batch: forward, backward, update. Returns the loss before the update.

        With ``iter_size`` n a step sums the gradients of n sub-batches: give a sequence of n, or a callable that is
        asked n times. Batches are ``{input: array}``, on the host or the device; a net that feeds itself needs none.

        Raises UsageError where the number of sub-batches is another.
        """
        if not self._begun:  # before this, weights may still be loaded
            self._begun = True
            warn_of_start(self.net)
        now = recorder.current()
        # Random masks count forward passes; from here they follow from the step, so a resumed run draws the same.
        self.net.iteration = self.iter * self.rule.iter_size
        self.updater.clear_gradients()
        if self.scaler is not None:
            self.scaler.begin()
        loss = 0.0
        with self._watched() as debug:
            for batch in self._sub_batches(inputs):
                with now.span(Stage.FORWARD, step=self.iter, epoch=epoch), self._errors():
                    self.net.forward_only(**batch)
                    loss += float(self.net.loss)
                with now.span(Stage.BACKWARD, step=self.iter, epoch=epoch), self._errors():
                    self.net.backward_only()
                    if debug is not None:
                        debug.after_backward()
            with now.span(Stage.UPDATE, step=self.iter, epoch=epoch):
                if self.scaler is None or self.scaler.end(self.iter, loss):
                    with nullcontext() if debug is None else debug.update():
                        self.updater.apply(self.lr, self.iter)
        self.iter += 1
        self._recent.append(loss / self.rule.iter_size)
        return self._recent[-1]

    def _watched(self) -> AbstractContextManager[DebugInfo | None]:
        """``debug_info`` in the steps that are displayed, as in Caffe."""
        if not self.param.debug_info or not self.param.display or self.iter % self.param.display:
            return nullcontext()
        from gpu.debug_info import DebugInfo

        if self.debug_info is None:
            self.debug_info = DebugInfo(self.net)
        return self.debug_info.step(self.iter)

    def take(self, inputs: Inputs) -> None:
        """Copy one batch into the net's inputs for a ``step_on()`` without one; the arrays are free afterwards.

        Raises UsageError where a step needs several sub-batches.
        """
        (batch,) = self._sub_batches(inputs)
        self.net.set_inputs(batch)

    def _errors(self) -> Any:
        """With fp16 infinities are expected, counted and told by the scaler: NumPy need not warn of them."""
        return nullcontext() if self.scaler is None else np.errstate(over="ignore", invalid="ignore")

    def step(self, n: int = 1) -> float:
        """``n`` steps of a net that feeds itself, or whose inputs have been set. Returns the loss of the last one."""
        if n < 1:
            raise UsageError("a solver makes at least one step", expected=">= 1", found=n)
        for _ in range(n):
            loss = self.step_on()
        return loss

    def _sub_batches(self, inputs: Batches) -> Iterable[Inputs]:
        count = self.rule.iter_size
        if callable(inputs):
            return (inputs() for _ in range(count))
        if isinstance(inputs, Mapping):
            batches: Sequence[Inputs] = [inputs]
        else:
            batches = inputs or [{}] * count
        if len(batches) != count:
            raise UsageError(
                "a step needs as many sub-batches as iter_size says", expected=f"{count} batches", found=len(batches)
            )
        return batches

    def test(self, index: int, batches: Iterable[Inputs]) -> dict[str, Any]:
        """Run test net ``index`` over the batches. Returns the mean of each output over them: float, or array.

        Raises UsageError where there is no such net, or no batch.
        """
        if not 0 <= index < len(self.test_nets):
            raise UsageError(f"there is no test net {index}", expected=f"0 to {len(self.test_nets) - 1}", found=index)
        sums: dict[str, Any] = {}
        count = 0
        for batch in batches:
            for name, value in self.test_nets[index].forward(**batch).items():
                if count and np.shape(sums[name]) != value.shape:
                    raise UsageError(
                        f"output {name!r} has another size in batch {count}, so there is no mean over batches",
                        expected=np.shape(sums[name]),
                        found=value.shape,
                        hint="its size depends on values: put a Silence layer behind it, or a loss or Reduction",
                    )
                # float64: the mean over many batches must not depend on how many came before.
                sums[name] = sums.get(name, 0.0) + np.asarray(value, np.float64)
            count += 1
        if count == 0:
            raise UsageError("a test needs at least one batch")
        means = {name: total / count for name, total in sums.items()}
        return {name: float(mean.reshape(())) if mean.size == 1 else mean for name, mean in means.items()}

    # -- snapshots -------------------------------------------------------------------------------------------------

    def snapshot(self, prefix: str | os.PathLike[str] | None = None) -> tuple[Path, Path]:
        """Write weights and solver state, each atomically; returns their paths.

        Files are ``<prefix>_iter_N.caffemodel`` and ``.solverstate``, as Caffe names them (N updates done), and
        ``<folder>/iter_N.*`` where the prefix is a folder; with ``snapshot_format: HDF5`` ``.h5`` follows. The solver's
        ``snapshot_prefix`` is the default. With ``snapshot_diff`` the weights hold the last update (Caffe's ``diff``).
        """
        given = os.fspath(prefix) if prefix is not None else self.param.snapshot_prefix
        if not given:
            raise UsageError("a snapshot needs a prefix", hint="give one, or set snapshot_prefix in the solver")
        is_folder = given.endswith(os.sep) or Path(given).is_dir()
        base = Path(given) / f"iter_{self.iter}" if is_folder else Path(f"{given}_iter_{self.iter}")
        base.parent.mkdir(parents=True, exist_ok=True)
        ending = ".h5" if self.param.snapshot_format == self.param.HDF5 else ""
        weights, state = (base.with_name(base.name + part + ending) for part in (".caffemodel", ".solverstate"))
        self.net.save(weights, diff=self.param.snapshot_diff)
        arrays = [self.backend.to_numpy(array) for array in self.history]
        # In a folder the two files belong together wherever the folder goes, so the state names its neighbour; and the
        # states of equal runs are equal files. With a prefix the state says what Caffe's would.
        learned_net = weights.name if is_folder else str(weights)
        scale = self.scaler.loss_scale.state() if self.scaler is not None else {}
        step = self.policy.current_step(max(0, self.iter - 1))  # of the rate used last, which is what Caffe keeps
        write_state(state, SolverState(self.iter, learned_net, arrays, step, scale, self.rule.type))
        return weights, state

    def restore(self, path: str | os.PathLike[str], *, weights: str | os.PathLike[str] | None = None) -> None:
        """Continue from a .solverstate and the .caffemodel beside it (or ``weights``); changes all or nothing.

        A loss scale of fp16 goes on where it was; where the state has none, as Caffe's, it starts as at the beginning.

        Raises StallscopeError for another kind of file, and where solver type, parameters or shapes do not fit.
        """
        state = read_state(path)
        if state.solver_type not in ("", self.rule.type):  # Caffe's states do not say it
            raise StallscopeError(
                f"{path} does not belong to this solver: it is of another type",
                expected=self.rule.type,
                found=state.solver_type,
                hint="histories of one type mean nothing to another; to keep the weights alone: weights in the solver",
            )
        shapes = [tuple(array.shape) for array in self.history]
        found = [array.shape for array in state.history]
        if len(found) != len(shapes):
            count = len(self.net.learnable)
            raise StallscopeError(
                f"{path} does not belong to this solver: another number of histories",
                expected=f"{len(shapes)} ({self.rule.type} over {count} parameters)",
                found=len(found),
                hint="Adam and AdaDelta keep two for each parameter, the other types one; compare type and net",
            )
        fitted = []
        problems = []
        for param, want, array in zip(
            list(self.net.learnable) * self.rule.histories, shapes, state.history, strict=True
        ):
            if array.shape == want or array.shape == (1,) * (4 - len(want)) + want:
                fitted.append(array.reshape(want))
            else:
                problems.append(f"{param.name}: {want} in the net, {array.shape} in the file")
        if problems:
            raise StallscopeError(f"{path} does not fit this net:\n    " + "\n    ".join(problems))
        source = Path(weights) if weights is not None else find_weights(path, state)
        copy_weights(self.net, source, complete=True)
        for target, array in zip(self.history, fitted, strict=True):
            target[...] = self.backend.xp.asarray(array)
        self.iter = state.iteration
        if self.scaler is not None and state.loss_scale:
            self.scaler.loss_scale.load(state.loss_scale)

    # -- nets ------------------------------------------------------------------------------------------------------

    def _build(self, source: Any, phase: str, state: Any, input_shapes: Shapes | None) -> Net:
        return Net(
            source,
            phase,
            stages=tuple(state.stage) if state is not None else (),
            level=state.level if state is not None else 0,
            backend=self.backend,
            input_shapes=input_shapes,
            seed=self.seed,
            reuse=self._reuse,
            precision=self._precision,
            keep_fp32=self._keep_fp32,
            beside=self._beside,
        )

    def _train_source(self) -> Any:
        given = [name for name in ("train_net_param", "train_net", "net_param", "net") if self.param.HasField(name)]
        if len(given) != 1:
            raise StallscopeError(
                f"{self.where}: the solver must name one net to train",
                expected="one of net, net_param, train_net, train_net_param",
                found=", ".join(given) or "none",
            )
        return self._source(getattr(self.param, given[0]))

    def _test_sources(self, net: Net | str | Path | None, wanted: bool) -> list[Any]:
        """Nets to test with: those named, then the training net's file for each further ``test_iter``.

        A solver that never tests (no ``test_interval``) has none, unless shapes for them were given.
        """
        if not (self.param.test_interval or wanted):
            return []
        sources = [self._source(value) for value in (*self.param.test_net_param, *self.param.test_net)]
        generic: Any = None
        if isinstance(net, (str, Path)):
            generic = self._given(net)
        elif net is None:
            for name in ("net_param", "net"):
                if self.param.HasField(name):
                    generic = self._source(getattr(self.param, name))
        if generic is not None:
            count = max(len(self.param.test_iter), len(sources) + 1 if wanted and not sources else 0)
            sources += [generic] * (count - len(sources))
        return sources

    def _source(self, value: Any) -> Any:
        return self._path(value) if isinstance(value, str) else str(value) + "\n"

    def _given(self, net: str | Path) -> str | Path:
        return self._path(net) if str(net).strip() and not is_text(net) else net

    def _path(self, value: str | Path) -> Path:
        for root in self._roots:
            if os.path.isfile(root / value):  # Path.is_file raises for a name that is too long
                return root / value
        return self._roots[0] / value


def _roots(where: str, net_root: str | os.PathLike[str] | None) -> list[Path]:
    if net_root is not None:
        return [Path(net_root)]
    solver = Path(where)
    return [Path(), solver.parent] if solver.is_file() else [Path()]
