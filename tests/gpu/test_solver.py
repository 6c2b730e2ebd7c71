"""Solvers against Caffe's own trajectories, and what surrounds a step: sub-batches, tests, snapshots, resume."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datasets import caffe_pb2
from gpu.lr_policy import LrPolicy
from gpu.net import Net
from gpu.solver import Solver
from profiler import recorder
from profiler.errors import StallscopeError, UsageError
from profiler.events import Stage
from tests.gpu.recording import ListRecorder
from tests.gpu.training import lenet

DATA = Path(__file__).parents[1] / "data"
GOLDEN = sorted((DATA / "solver").glob("*.npz"))

MLP = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 8 dim: 6 } } }
layer { name: "label" type: "Input" top: "label" input_param { shape { dim: 8 } } }
layer { name: "ip1" type: "InnerProduct" bottom: "data" top: "ip1" param { lr_mult: 1 } param { lr_mult: 2 }
  inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "ip1" top: "ip1" }
layer { name: "ip2" type: "InnerProduct" bottom: "ip1" top: "ip2"
  inner_product_param { num_output: 4 weight_filler { type: "xavier" } } }
layer { name: "accuracy" type: "Accuracy" bottom: "ip2" bottom: "label" top: "accuracy" include { phase: TEST } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip2" bottom: "label" top: "loss" }
"""
SGD = 'base_lr: 0.1 lr_policy: "step" gamma: 0.5 stepsize: 3 momentum: 0.9 weight_decay: 0.01 random_seed: 5\n'
ADAM = 'base_lr: 0.01 lr_policy: "fixed" momentum: 0.9 type: "Adam" random_seed: 5\n'


def mlp_batch(step: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(step)
    return {"data": draw.standard_normal((8, 6), np.float32), "label": draw.integers(0, 4, 8).astype(np.int32)}


def mlp(text: str = SGD, **settings: Any) -> Solver:
    return Solver(text, net=MLP, backend="numpy", **settings)


def bits(solver: Solver) -> list[bytes]:
    """Every bit of the state: parameters, then histories."""
    return [blob.data.tobytes() for blobs in solver.net.params.values() for blob in blobs] + [
        array.tobytes() for array in solver.history
    ]


def close(actual: Any, expected: Any, rtol: float = 2e-5) -> None:
    """Equal up to float32 rounding, measured against the largest value of the array."""
    scale = float(np.abs(expected).max()) or 1.0
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=rtol * scale)


# -- against Caffe ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_trajectory_of_caffe_is_followed(path: Path, tmp_path: Path) -> None:
    golden = np.load(path)
    solver = Solver(str(golden["solver"]), net=str(golden["net"]), backend="numpy")
    names = [name[2:].rsplit(".", 1) for name in golden.files if name.startswith("w:")]
    for layer, index in names:
        solver.net.params[layer][int(index)].data = golden[f"w:{layer}.{index}"][0]
    for step in range(len(golden["loss"])):
        assert solver.iter == step
        assert solver.lr == pytest.approx(float(golden["lr"][step]), rel=3e-7)
        batch = {"data": golden["data"][step], "label": golden["label"][step]}
        loss = solver.step_on([batch] * solver.rule.iter_size)
        assert loss == pytest.approx(float(golden["loss"][step]), rel=2e-5)
        for layer, index in names:
            blob = solver.net.params[layer][int(index)]
            close(blob.diff, golden[f"u:{layer}.{index}"][step], rtol=1e-4)
            close(blob.data, golden[f"w:{layer}.{index}"][step + 1])
    histories = [golden[name] for name in golden.files if name.startswith("hist")]
    assert len(histories) == len(solver.history)
    for ours, caffes in zip(solver.history, histories, strict=True):
        close(ours, caffes, rtol=1e-4)
    _, file = solver.snapshot(tmp_path / "x")
    state = caffe_pb2.SolverState.FromString(file.read_bytes())
    assert (state.iter, state.current_step) == (int(golden["state_iter"]), int(golden["state_current_step"]))


def test_all_golden_trajectories_are_here() -> None:
    assert len(GOLDEN) == 17


def test_a_state_of_caffe_is_written_again(tmp_path: Path) -> None:
    """How training goes on from it: test_parity."""
    # The state names a path that does not exist here: its weights are found beside it.
    solver = lenet()
    solver.restore(DATA / "lenet" / "lenet_iter_100.solverstate")
    weights, state = solver.snapshot(tmp_path / "copy")
    assert (weights.name, state.name) == ("copy_iter_100.caffemodel", "copy_iter_100.solverstate")
    # Caffe's file knows the data layer's source as well; the parameters are the same to the bit.
    caffes = lenet()
    caffes.net.copy_from(DATA / "lenet" / "lenet_iter_100.caffemodel")
    ours = lenet()
    ours.net.copy_from(weights)
    assert bits(ours) == bits(caffes)


# -- a step -----------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_bits() -> None:
    one, other, third = mlp(), mlp(), mlp(seed=6)
    for step in range(5):
        assert one.step_on(mlp_batch(step)) == other.step_on(mlp_batch(step))
    assert bits(one) == bits(other)
    assert bits(one)[0] != bits(third)[0]


def test_sub_batches_come_as_a_list_or_by_call() -> None:
    text = SGD + "iter_size: 3\n"
    listed, called = mlp(text), mlp(text)
    counter = itertools.count()
    loss = listed.step_on([mlp_batch(0), mlp_batch(1), mlp_batch(2)])
    assert called.step_on(lambda: mlp_batch(next(counter))) == loss
    assert bits(listed) == bits(called)
    assert next(counter) == 3
    for wrong in ([mlp_batch(0)] * 2, mlp_batch(0)):
        with pytest.raises(UsageError, match="3 batches"):
            listed.step_on(wrong)


def test_gradients_of_sub_batches_add_up_to_the_mean() -> None:
    whole, split = mlp(), mlp(SGD + "iter_size: 2\n")
    whole.step_on(mlp_batch(0))
    split.step_on([mlp_batch(0), mlp_batch(0)])
    for blobs, others in zip(whole.net.params.values(), split.net.params.values(), strict=True):
        for blob, other in zip(blobs, others, strict=True):
            close(other.data, blob.data, rtol=1e-6)


def test_step_repeats_on_inputs_that_were_set() -> None:
    by_hand, at_once = mlp(), mlp()
    for name, array in mlp_batch(0).items():
        at_once.net.blobs[name].data = array
    losses = [by_hand.step_on(mlp_batch(0)) for _ in range(3)]
    assert at_once.step(3) == losses[-1]
    assert losses[-1] < losses[0]
    assert bits(by_hand) == bits(at_once)
    with pytest.raises(UsageError):
        at_once.step(0)


def test_a_step_allocates_no_parameter_memory_and_updates_in_place() -> None:
    solver = mlp(ADAM)
    solver.step_on(mlp_batch(0))
    before = [array.ctypes.data for array in solver.history] + [
        param.blob.device_data.ctypes.data for param in solver.net.learnable
    ]
    solver.step_on(mlp_batch(1))
    after = [array.ctypes.data for array in solver.history] + [
        param.blob.device_data.ctypes.data for param in solver.net.learnable
    ]
    assert before == after


def test_forward_backward_and_update_are_recorded() -> None:
    seen = ListRecorder()
    recorder.set_current(seen)  # type: ignore[arg-type]
    try:
        solver = mlp()
        solver.step_on(mlp_batch(0), epoch=2)
        solver.step_on(mlp_batch(1), epoch=2)
    finally:
        recorder.set_current(recorder.NULL)
    assert [(row.stage, row.fields["step"], row.fields["epoch"]) for row in seen.rows] == [
        (stage, step, 2) for step in (0, 1) for stage in (Stage.FORWARD, Stage.BACKWARD, Stage.UPDATE)
    ]


# -- testing ----------------------------------------------------------------------------------------------------------


def test_a_test_net_sees_every_update_and_averages_its_outputs() -> None:
    solver = mlp(SGD + "test_iter: 2 test_interval: 10\n")
    (test_net,) = solver.test_nets
    solver.step_on(mlp_batch(0))
    for name, blobs in solver.net.params.items():
        for blob, other in zip(blobs, test_net.params[name], strict=True):
            assert np.shares_memory(blob.data, other.data)
    before = bits(solver)
    batches = [mlp_batch(1), mlp_batch(2)]
    means = solver.test(0, batches)
    assert set(means) == {"accuracy", "loss"}
    assert isinstance(means["loss"], float)
    singles = [solver.test(0, [batch]) for batch in batches]
    for name, mean in means.items():
        assert mean == pytest.approx(sum(single[name] for single in singles) / 2, rel=1e-12)
    assert bits(solver) == before
    with pytest.raises(UsageError, match="no test net 1"):
        solver.test(1, batches)
    with pytest.raises(UsageError, match="at least one batch"):
        solver.test(0, [])


def test_no_test_nets_unless_asked_for() -> None:
    assert mlp().test_nets == []
    assert len(mlp(test_input_shapes={}).test_nets) == 1
    assert mlp(SGD + "test_iter: 1\n").test_nets == [], "no test_interval: it never tests"
    assert len(mlp(SGD + "test_iter: 1 test_iter: 3 test_interval: 5\n").test_nets) == 2


# -- snapshots --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropout"])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, text: str, dropout: bool) -> None:
    dropping = MLP.replace('type: "ReLU"', 'type: "Dropout"') if dropout else MLP
    assert (dropping != MLP) is dropout

    def mlp(text: str, seed: int | None = None) -> Solver:
        solver = Solver(text, net=dropping, backend="numpy")
        if seed is not None:  # other initial values, which the snapshot replaces; the masks keep the solver's seed
            for blob in solver.net.params["ip1"]:
                blob.data = np.full(blob.shape, seed, np.float32)
        return solver

    straight, stopped = mlp(text), mlp(text)
    for step in range(8):
        straight.step_on(mlp_batch(step))
    for step in range(4):
        stopped.step_on(mlp_batch(step))
    _, state = stopped.snapshot(f"{tmp_path}/")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["iter_4.caffemodel", "iter_4.solverstate"]
    resumed = mlp(text, seed=99)
    resumed.restore(state)
    assert bits(resumed) == bits(stopped)
    for step in range(resumed.iter, 8):
        assert resumed.lr == straight.policy.rate(step)
        resumed.step_on(mlp_batch(step))
    assert bits(resumed) == bits(straight)


def test_a_moved_snapshot_resumes_from_its_own_files(tmp_path: Path) -> None:
    solver = mlp()
    solver.step_on(mlp_batch(0))
    (tmp_path / "a").mkdir()
    _, first = solver.snapshot(tmp_path / "a")
    (tmp_path / "other").mkdir()
    _, second = solver.snapshot(tmp_path / "other")
    assert first.read_bytes() == second.read_bytes()
    shutil.move(tmp_path / "a", tmp_path / "b")
    resumed = mlp()
    resumed.restore(tmp_path / "b" / "iter_1.solverstate")
    assert bits(resumed) == bits(solver)


def test_a_state_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    solver = mlp()
    solver.step_on(mlp_batch(0))
    weights, state = solver.snapshot(tmp_path / "x")
    adam = mlp(ADAM)
    before = bits(adam)
    with pytest.raises(StallscopeError, match="of another type"):
        adam.restore(state)
    wider = Solver(SGD, net=MLP.replace("num_output: 5", "num_output: 7"), backend="numpy")
    with pytest.raises(StallscopeError, match=r"ip1\.0: \(7, 6\) in the net, \(5, 6\) in the file"):
        wider.restore(state)
    renamed = Solver(SGD, net=MLP.replace('name: "ip2"', 'name: "ip3"'), backend="numpy")
    with pytest.raises(StallscopeError, match="ip3: not in the file"):
        renamed.restore(state)
    with pytest.raises(StallscopeError, match="not a solver state"):
        adam.restore(weights)
    weights.unlink()
    with pytest.raises(StallscopeError, match="are gone"):
        mlp().restore(state)
    assert bits(adam) == before
    assert adam.iter == 0


def test_snapshot_uses_the_prefix_of_the_solver(tmp_path: Path) -> None:
    solver = mlp(SGD + f'snapshot_prefix: "{tmp_path}/deep/net"\n')
    assert solver.snapshot()[0] == tmp_path / "deep" / "net_iter_0.caffemodel"
    with pytest.raises(UsageError, match="needs a prefix"):
        mlp().snapshot()


# -- reading a solver -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('base_lr: 0.1 lr_policy: "stepp"\n', "unknown lr_policy 'stepp'"),
        ('base_lr: 0.1 lr_policy: "step" gamma: 0.1\n', "needs 'stepsize'"),
        ('base_lr: 0.1 lr_policy: "multistep" gamma: 0.1\n', "needs 'stepvalue'"),
        ('base_lr: 0.1 lr_policy: "poly" power: 1 max_iter: 0\n', "max_iter of at least 1"),
        ('base_lr: 0.1 type: "Adamm"\n', "unknown solver type 'Adamm'"),
        ('base_lr: 0.1 type: "AdaGrad" momentum: 0.9\n', "takes no momentum"),
        ('base_lr: 0.1 type: "Adam" momentum: 1\n', "momentum is out of range"),
        ('base_lr: 0.1 type: "SGD" solver_type: ADAM\n', "both type and solver_type"),
        ('base_lr: 0.1 regularization_type: "L3"\n', "unknown regularization_type"),
        ("base_lr: 0.1 iter_size: 0\n", "iter_size must be at least 1"),
        ("base_lr: 0.1 learning_rate: 3\n", "learning_rate"),
    ],
)
def test_a_solver_that_cannot_be_followed_is_refused(text: str, words: str) -> None:
    with pytest.raises(StallscopeError, match=words):
        Solver(text, net=MLP, backend="numpy")


def test_the_old_enum_still_names_the_type() -> None:
    assert mlp("base_lr: 0.1 solver_type: NESTEROV\n").rule.type == "Nesterov"


def test_one_net_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(StallscopeError, match="one net to train"):
        Solver(SGD, backend="numpy")
    with pytest.raises(StallscopeError, match=r"found: +train_net, net"):
        Solver(SGD + 'net: "a" train_net: "b"\n', backend="numpy")
    (tmp_path / "net.prototxt").write_text(MLP)
    (tmp_path / "solver.prototxt").write_text(SGD + 'net: "net.prototxt" test_iter: 1 test_interval: 9\n')
    solver = Solver(tmp_path / "solver.prototxt", backend="numpy")  # found beside the solver
    assert len(solver.test_nets) == 1
    assert list(solver.net.params) == ["ip1", "ip2"]
    given = Solver(SGD, net=Net(MLP, "TRAIN", backend="numpy", seed=5))
    assert bits(given) == bits(solver)


def test_weights_named_in_the_solver_are_loaded(tmp_path: Path) -> None:
    trained = mlp()
    trained.step_on(mlp_batch(0))
    weights, _ = trained.snapshot(tmp_path / "first")
    fresh = mlp(SGD + f'weights: "{weights}"\n', seed=77)
    assert bits(fresh)[:4] == bits(trained)[:4]
    assert fresh.iter == 0


def test_stage_and_level_of_a_state_choose_layers() -> None:
    staged = MLP.replace('type: "ReLU"', 'type: "ReLU" include { stage: "bent" min_level: 2 }')
    plain = Solver(SGD, net=staged, backend="numpy")
    state = 'train_state { stage: "bent" level: 2 } test_iter: 1 test_interval: 9 test_state { stage: "bent" }\n'
    bent = Solver(SGD + state, net=staged, backend="numpy")
    assert "relu" not in [layer.name for layer in plain.net.layers]
    assert "relu" in [layer.name for layer in bent.net.layers]
    assert "relu" not in [layer.name for layer in bent.test_nets[0].layers], "the level of its state is too low"


def test_policies_beyond_the_golden_set() -> None:
    sigmoid = LrPolicy("sigmoid", base_lr=1.0, gamma=-0.5, stepsize=10)
    assert sigmoid.rate(10) == 0.5
    assert sigmoid.rate(0) > 0.99 > 0.01 > sigmoid.rate(30) > sigmoid.rate(10_000) >= 0
    poly = LrPolicy("poly", base_lr=0.1, power=0.5, max_iter=10)
    assert [poly.rate(step) for step in (10, 11, 500)] == [0, 0, 0]
    multistep = LrPolicy("multistep", base_lr=1.0, gamma=0.5, stepvalues=(2, 2, 5))
    assert [multistep.rate(step) for step in range(6)] == [1, 1, 0.25, 0.25, 0.25, 0.125]


def test_a_deploy_net_is_told_from_one_without_parameters() -> None:
    """Training a net without a loss: what is missing is the loss, not something to learn."""
    text = """input: "data" input_shape { dim: 2 dim: 3 }
    layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
      inner_product_param { num_output: 2 weight_filler { type: "xavier" } } }
    layer { name: "prob" type: "Softmax" bottom: "ip" top: "prob" }"""
    with pytest.raises(UsageError, match="no backward pass") as caught:
        Solver("base_lr: 0.1\n", net=text, backend="numpy").step_on({"data": np.ones((2, 3))})
    assert "no loss\n" in str(caught.value) + "\n"
    assert "nothing to learn" not in str(caught.value)
    assert "a layer with a loss" in str(caught.value)
