"""Rules about a solver, alone and together with its net."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.fields import FieldWarning, check_solver
from gpu.lint.finding import Hit, Rule
from gpu.lint.view import View
from gpu.lr_policy import LrPolicy
from gpu.update import Rule as UpdateRule
from profiler.errors import StallscopeError

_LARGE_ADAM_RATE = 0.005
_ADAPTIVE = ("Adam", "AdaDelta", "RMSProp", "AdaGrad")


@dataclass(frozen=True)
class SolverView:
    """``param``: the SolverParameter. ``path``: its file. ``net``: the net's file, None where it was given as text.
    ``views``: the net, by phase."""

    param: Any
    path: Path
    net: Path | None
    views: dict[str, View]

    @property
    def type(self) -> str:
        """The type, also where the old enum names it."""
        try:
            return UpdateRule.from_proto(self.param).type
        except StallscopeError:
            return str(self.param.type)


def _refused(view: SolverView) -> Iterator[Hit]:
    checks: tuple[Callable[[], Any], ...] = (
        lambda: LrPolicy.from_proto(view.param),
        lambda: UpdateRule.from_proto(view.param),
        lambda: check_solver(view.param, "numpy"),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FieldWarning)
        for check in checks:
            try:
                check()
            except StallscopeError as error:
                found = f" (found: {error.found})" if error.found is not None else ""
                yield None, error.what + found


def _no_effect(view: SolverView) -> Iterator[Hit]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_solver(view.param, "cupy" if view.param.solver_mode else "numpy")
        except StallscopeError:
            return
    for warning in caught:
        if isinstance(warning.message, FieldWarning):
            yield None, str(warning.message)


def _no_net(view: SolverView) -> Iterator[Hit]:
    names = ("train_net_param", "train_net", "net_param", "net")
    given = [name for name in names if view.param.HasField(name)]
    if len(given) != 1:
        yield None, f"names {'no net' if not given else 'several nets: ' + ', '.join(given)}"


def _other_net(view: SolverView) -> Iterator[Hit]:
    named = view.param.net or view.param.train_net
    if named and view.net is not None:
        places = [Path(named), view.path.parent / named]
        if not any(place.exists() and view.net.exists() and place.samefile(view.net) for place in places):
            yield None, f"names the net {named}, and {view.net} is looked at"


def _seed(view: SolverView) -> Iterator[Hit]:
    if view.param.random_seed < 0:
        yield None, "random_seed is missing"


def _iterations(view: SolverView) -> Iterator[Hit]:
    if not view.param.max_iter:
        yield None, "max_iter is missing, so it is 0"


def _rate(view: SolverView) -> Iterator[Hit]:
    if not view.param.base_lr:
        yield None, "base_lr is missing or 0"
    elif view.param.base_lr < 0:
        yield None, f"base_lr is {view.param.base_lr:g}"


def _policy(view: SolverView) -> Iterator[Hit]:
    if not view.param.lr_policy:
        yield None, "lr_policy is missing"


def _power(view: SolverView) -> Iterator[Hit]:
    p = view.param
    if p.lr_policy in ("poly", "inv") and not p.power:
        yield None, f"lr_policy {p.lr_policy!r} with power 0 is a constant rate"
    if p.lr_policy in ("step", "multistep", "exp") and p.gamma == 1:
        yield None, f"lr_policy {p.lr_policy!r} with gamma 1 is a constant rate"
    if p.lr_policy in ("step", "multistep", "exp") and p.gamma > 1:
        yield None, f"gamma {p.gamma:g} lets the rate grow"


def _late_steps(view: SolverView) -> Iterator[Hit]:
    p = view.param
    if p.lr_policy == "step" and 0 < p.max_iter <= p.stepsize:
        yield None, f"stepsize {p.stepsize} is not reached in {p.max_iter} iterations"
    late = [value for value in p.stepvalue if p.max_iter and value >= p.max_iter]
    if p.lr_policy == "multistep" and late:
        yield None, f"stepvalue {', '.join(map(str, late))} is not reached in {p.max_iter} iterations"


def _test_iter(view: SolverView) -> Iterator[Hit]:
    p = view.param
    named = len(p.test_net) + len(p.test_net_param)
    generic = bool(p.net or p.HasField("net_param"))
    if p.test_interval and not p.test_iter:
        yield None, f"test_interval is {p.test_interval} and test_iter is missing"
    elif p.test_iter and (len(p.test_iter) < named or (not generic and len(p.test_iter) != named)):
        yield None, f"test_iter is given {len(p.test_iter)} times, for {named} test nets"
    if any(value < 1 for value in p.test_iter):
        yield None, f"test_iter holds {min(p.test_iter)}"


def _never_tests(view: SolverView) -> Iterator[Hit]:
    if view.param.test_iter and not view.param.test_interval:
        yield None, "test_iter is given and test_interval is missing"


def _test_data(view: SolverView) -> Iterator[Hit]:
    p = view.param
    if not p.test_iter or p.test_net or p.test_net_param:
        return
    if "TEST" not in view.views:
        yield None, "it is to test, and the net has no data layer in TEST"


def _momentum(view: SolverView) -> Iterator[Hit]:
    if not view.param.momentum and view.type in ("Adam", "Nesterov", "AdaDelta"):
        means = {"Adam": "beta1 is 0", "Nesterov": "it is plain SGD", "AdaDelta": "its decay is 0"}
        yield None, f"type {view.type} without momentum: {means[view.type]}"


def _ignored(view: SolverView) -> Iterator[Hit]:
    if view.param.HasField("momentum2") and view.type != "Adam":
        yield None, f"momentum2 has no effect on type {view.type}"
    if view.param.HasField("rms_decay") and view.type != "RMSProp":
        yield None, f"rms_decay has no effect on type {view.type}"
    if view.param.HasField("delta") and view.type not in _ADAPTIVE:
        yield None, f"delta has no effect on type {view.type}"


def _adam_rate(view: SolverView) -> Iterator[Hit]:
    if view.type == "Adam" and view.param.base_lr > _LARGE_ADAM_RATE:
        yield None, f"base_lr {view.param.base_lr:g} with type Adam"


def _snapshots(view: SolverView) -> Iterator[Hit]:
    p = view.param
    if p.snapshot and not p.snapshot_prefix:
        yield None, "snapshot is given and snapshot_prefix is missing"


def _sub_batches(view: SolverView) -> Iterator[Hit]:
    train = view.views.get("TRAIN")
    if view.param.iter_size > 1 and train is not None and any(train.of_type("BatchNorm")):
        yield None, f"iter_size {view.param.iter_size} with BatchNorm: statistics are those of each sub-batch"


RULES = (
    Rule("solver-refused", "error", "No solver can follow it.", "See docs on solvers of BVLC Caffe 1.0.", _refused),
    Rule("solver-no-effect", "note", "The field changes nothing here.", "Leave it out.", _no_effect),
    Rule("solver-net", "error", "It must be clear what is trained.", "Name one net.", _no_net),
    Rule(
        "solver-other-net",
        "warning",
        "What is said here holds for another net.",
        "Give the solver's own net.",
        _other_net,
    ),
    Rule(
        "missing-seed",
        "warning",
        "Caffe then seeds from the clock, and no two runs begin alike; a job here takes run.seed instead.",
        "Set random_seed.",
        _seed,
    ),
    Rule("no-iterations", "warning", "Caffe ends at once.", "Set max_iter.", _iterations),
    Rule("learning-rate", "warning", "Nothing is learned, or it is unlearned.", "Set base_lr above 0.", _rate),
    Rule("no-lr-policy", "error", "Caffe refuses it; here it counts as fixed.", 'Set lr_policy: "fixed".', _policy),
    Rule("constant-rate", "warning", "The policy does not do what its name says.", "Set gamma and power.", _power),
    Rule("late-steps", "note", "These drops of the rate never happen.", "Compare with max_iter.", _late_steps),
    Rule(
        "test-iter",
        "error",
        "Caffe refuses it: it must know how long each test is.",
        "One test_iter a test net.",
        _test_iter,
    ),
    Rule("never-tests", "warning", "The net is never tested.", "Set test_interval.", _never_tests),
    Rule(
        "no-test-data",
        "error",
        "Tests have nothing to read.",
        "Add a data layer with include { phase: TEST }.",
        _test_data,
    ),
    Rule(
        "no-momentum",
        "warning",
        "That is hardly what the type was chosen for.",
        "Set momentum: 0.9 (AdaDelta: 0.95).",
        _momentum,
    ),
    Rule("solver-unused", "note", "The field changes nothing.", "Leave it out.", _ignored),
    Rule(
        "adam-rate", "warning", "Adam's steps are about as large as the rate itself.", "Try 0.001 or less.", _adam_rate
    ),
    Rule("snapshot-prefix", "warning", "Caffe refuses it.", "Set snapshot_prefix.", _snapshots),
    Rule(
        "iter-size-norm",
        "note",
        "A batch in parts is not the whole batch here.",
        "Use a larger batch, if it fits.",
        _sub_batches,
    ),
)
