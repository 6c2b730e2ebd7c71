"""The loss scale: growth, back-off, steps taken back, and the case it is there for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datasets import caffe_pb2
from gpu.loss_scale import LEAST, MOST, PATIENCE, START, LossScale, losses_by_layer
from gpu.net import Net
from gpu.solver import Solver
from gpu.solverstate import read_state
from profiler import recorder
from profiler.errors import StallscopeError, UsageError
from profiler.events import Stage
from tests.gpu.counting import counted
from tests.gpu.nets import inputs, layer

DENSE = 'inner_product_param { num_output: %d weight_filler { type: "xavier" } }'
RULE = 'base_lr: %g lr_policy: "fixed" momentum: 0.9 random_seed: 1 %s\n'


class Notes:
    """A recorder that keeps marks and notes."""

    def __init__(self) -> None:
        self.marks: list[tuple[Stage, int, int]] = []
        self.notes: list[dict[str, Any]] = []

    def mark(self, stage: Stage, *, step: int, items: int = 0) -> None:
        self.marks.append((stage, step, items))

    def note(self, note: str, **fields: Any) -> None:
        self.notes.append({"note": note, **fields})

    def span(self, *_: Any, **__: Any) -> Any:
        return recorder.NULL.span(Stage.UPDATE)

    def of(self, note: str) -> list[dict[str, Any]]:
        return [each for each in self.notes if each["note"] == note]


@pytest.fixture
def notes() -> Iterator[Notes]:
    made = Notes()
    recorder.set_current(made)  # type: ignore[arg-type]
    yield made
    recorder.set_current(recorder.NULL)


def net_text(weight: float = 1.0, extra: str = "") -> str:
    text = inputs(x=(16, 8), l=(16,)) + layer("InnerProduct", "a", ["x"], ["a"], DENSE % 16)
    text += extra + layer("ReLU", "r", ["a"], ["a"]) + layer("InnerProduct", "b", ["a"], ["b"], DENSE % 3)
    return text + layer("SoftmaxWithLoss", "loss", ["b", "l"], ["loss"], f"loss_weight: {weight}")


def solver(weight: float = 1.0, rate: float = 0.05, rule: str = "", extra: str = "", **options: Any) -> Solver:
    options = {"precision": "fp16", **options}
    return Solver(RULE % (rate, rule), net=net_text(weight, extra), backend="numpy", **options)


def batch(step: int, size: float = 1.0) -> dict[str, np.ndarray]:
    """Three classes that can be told apart by a line each."""
    rng = np.random.default_rng(step)
    x = rng.standard_normal((16, 8)).astype(np.float32)
    return {"x": x * np.float32(size), "l": x[:, :3].argmax(1)}


def everything(made: Solver) -> list[np.ndarray]:
    return [blob.data.copy() for blobs in made.net.params.values() for blob in blobs] + [h.copy() for h in made.history]


def test_without_a_scale_small_gradients_are_lost_and_with_it_learned_from(notes: Notes) -> None:
    """A loss of weight 1e-7 with a rate of 1e7 times as much: the same training in float32, gradients below 2^-25."""
    ends: dict[str, float] = {}
    kinds: dict[str, dict[str, Any]] = {"fp32": {"precision": "fp32"}, "static": {"loss_scale": 1}, "dynamic": {}}
    for name, options in kinds.items():
        made = solver(1e-7, 5e5, **options)
        losses = [1e7 * made.step_on(batch(step)) for step in range(120)]
        ends[name] = float(np.mean(losses[-20:]))
        if name == "fp32":
            assert made.scaler is None
            continue
        lost = losses_by_layer(made.scaler.precision)["b"]["gradients"]
        if name == "static":
            assert np.mean(losses[:20]) == pytest.approx(ends[name], rel=0.15)  # learned nothing
            assert lost["flushed"] == lost["nonzero"] > 0
            (first,) = [note for note in notes.of("precision_first") if note["kind"] == "underflow"]
            assert (first["step"], first["layer"], first["tensor"], first["phase"]) == (0, "b", "b.diff", "backward")
            assert not first["dynamic"]
        else:
            assert lost["flushed"] < 0.3 * lost["nonzero"]
    assert ends["dynamic"] == pytest.approx(ends["fp32"], rel=0.02)
    assert ends["dynamic"] < 0.5 * ends["static"]


def test_a_step_that_overflows_leaves_no_trace_but_its_number(notes: Notes) -> None:
    norm = layer("BatchNorm", "n", ["a"], ["a"])
    made = solver(extra=norm, rule="weight_decay: 0.1")
    for step in range(3):
        made.step_on(batch(step))
    made.scaler.loss_scale.scale = MOST
    before = everything(made)
    made.step_on(batch(3))
    assert all(np.array_equal(a, b) for a, b in zip(before, everything(made), strict=True))
    assert made.iter == 4
    assert all(not param.blob.diff.any() for param in made.net.learnable)
    assert made.scaler.loss_scale == LossScale(MOST / 2, True, good=0, skipped=1, in_a_row=1)
    assert notes.marks == [(Stage.SKIPPED, 3, 0), (Stage.LOSS_SCALE, 3, 39)]
    assert LEAST * 2.0**39 == MOST / 2
    (skipped,), (change,) = notes.of("skipped_step"), notes.of("loss_scale")
    assert (skipped["layer"], skipped["tensor"], skipped["phase"]) == ("b", "b.diff", "backward")
    assert (skipped["step"], skipped["scale"], skipped["why"]) == (3, MOST, "gradients that are not finite")
    assert (change["before"], change["after"], change["step"]) == (MOST, MOST / 2, 3)
    assert (change["layer"], change["why"]) == ("b", skipped["why"])
    while made.scaler.loss_scale.in_a_row:
        made.step_on(batch(made.iter))
    assert not np.array_equal(before[0], everything(made)[0])


def test_the_same_bits_as_without_a_scale_where_nothing_is_lost() -> None:
    """Powers of two change no digit: in float32 storage (all layers kept) a scaled run is the unscaled one."""
    kept = ["x", "a", "r", "b"]
    runs = [solver(rule=rule, keep_fp32=kept, **options) for options in ({"precision": "fp32"}, {}, {"loss_scale": 8})
            for rule in ("clip_gradients: 0.1 weight_decay: 0.01",)]  # fmt: skip
    for step in range(10):
        assert len({made.step_on(batch(step)) for made in runs}) == 1
    for made in runs[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(everything(runs[0]), everything(made), strict=True))


def test_sub_batches_are_summed_scaled_and_unscaled_once() -> None:
    plain, scaled = (solver(rule="iter_size: 2", precision=precision) for precision in ("fp32", "fp16"))
    for made in (plain, scaled):
        for step in range(5):
            made.step_on([batch(2 * step), batch(2 * step + 1)])
    for a, b in zip(everything(plain), everything(scaled), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)


def test_growth_and_its_limits(notes: Notes) -> None:
    made = solver(loss_scale=LossScale.of("dynamic", start=1024, growth=3))
    assert made.scaler.loss_scale.scale == 1024
    for step in range(7):
        made.step_on(batch(step))
    assert made.scaler.loss_scale == LossScale(4096, True, good=1, growth=3)
    changes = [(note["step"], note["before"], note["after"]) for note in notes.of("loss_scale")]
    assert changes == [(2, 1024, 2048), (5, 2048, 4096)]
    assert {note["why"] for note in notes.of("loss_scale")} == {"3 good steps in a row"}
    assert notes.marks == [(Stage.LOSS_SCALE, step, round(np.log2(to / LEAST))) for step, _, to in changes]
    assert (LossScale.of("dynamic").growth, LossScale.of("dynamic").scale) == (2000, START)
    assert MOST / 2.0 ** (PATIENCE - 1) < LEAST  # there is time to get to the least scale, and then some
    full = LossScale(MOST, True, good=10)
    assert (full.good_step(), full.scale) == (False, MOST)
    empty = LossScale(LEAST, True)
    assert (empty.bad_step(True), empty.scale) == (False, LEAST)
    static = LossScale.of(128)
    assert (static.bad_step(True), static.scale, static.skipped) == (False, 128, 1)


def test_a_loss_that_is_not_finite_keeps_the_scale_and_ends_the_run_in_time(notes: Notes) -> None:
    made = solver()
    before = everything(made)
    for step in range(PATIENCE - 1):
        made.step_on(batch(step, 1e6))
    with pytest.raises(StallscopeError, match=f"{PATIENCE} steps in a row were skipped in fp16") as caught:
        made.step_on(batch(PATIENCE, 1e6))
    assert made.scaler.loss_scale.scale == START
    assert "keep_fp32: [x]" in str(caught.value)
    assert all(np.array_equal(a, b) for a, b in zip(before, everything(made), strict=True))
    (first,) = [note for note in notes.of("precision_first") if note["kind"] == "overflow"]
    assert (first["layer"], first["tensor"], first["phase"], first["step"]) == ("x", "x", "forward", 0)


def test_a_loss_that_is_not_finite_skips_the_step_whatever_its_gradients(notes: Notes) -> None:
    made = solver()
    made.step_on(batch(0))
    made.scaler.begin()
    made.net.learnable[0].blob.diff = np.ones((16, 8), np.float32)
    assert not made.scaler.end(1, float("inf"))
    assert (made.scaler.loss_scale.scale, made.scaler.loss_scale.skipped) == (START, 1)
    (skipped,) = notes.of("skipped_step")
    assert (skipped["step"], skipped["why"]) == (1, "a loss that is not finite")
    assert not made.net.learnable[0].blob.diff.any()


def test_a_recurrent_state_that_is_not_finite_is_forgotten() -> None:
    """It is carried from pass to pass, and would make every later loss NaN."""
    text = inputs(x=(3, 2, 4), cont=(3, 2), l=(3, 2))
    text += layer(
        "RNN", "r", ["x", "cont"], ["r"], 'recurrent_param { num_output: 5 weight_filler { type: "xavier" } }'
    )
    text += layer("SoftmaxWithLoss", "loss", ["r", "l"], ["loss"], "softmax_param { axis: 2 }")
    made = Solver(RULE % (0.05, ""), net=text, backend="numpy", precision="fp16")
    given = {"x": np.full((3, 2, 4), 0.5), "cont": np.ones((3, 2)), "l": np.ones((3, 2))}
    first = made.step_on(given)
    with np.errstate(invalid="ignore"):
        assert not np.isfinite(made.step_on(given | {"x": np.full((3, 2, 4), np.nan)}))
    assert np.isfinite(made.step_on(given))
    assert first > 0
    assert made.scaler.loss_scale.skipped == 1


def test_the_first_tensor_is_named_not_the_worst_with_what_it_lost(notes: Notes) -> None:
    """Counted by hand: of 128 weights one overflows and one is lost, before all the biases overflow."""
    made = solver()
    weight, bias = made.net.params["a"]
    sound = [weight.data.copy(), bias.data.copy()]
    weight.data = np.full((16, 8), 0.25, np.float32)
    weight.data[3, 2], weight.data[5, 5], weight.data[0, 0] = 7e4, -1e-9, 0
    bias.data = np.full(16, 7e4, np.float32)
    for step in range(2):
        made.step_on(batch(step))
    for kind in ("overflow", "underflow"):
        (first,) = [note for note in notes.of("precision_first") if note["kind"] == kind]
        found = {name: first[name] for name in ("step", "layer", "tensor", "phase", "values", "nonzero")}
        assert found == {"step": 0, "layer": "a", "tensor": "a.0", "phase": "forward", "values": 1, "nonzero": 127}
    assert [(note["step"], note["tensor"]) for note in notes.of("skipped_step")] == [(0, "a.0"), (1, "a.0")]
    counted = losses_by_layer(made.scaler.precision)["a"]["weights"]
    assert (counted["overflow"], counted["flushed"]) == (2 * (1 + 16), 2 * 1)
    # What was lost in earlier steps is no step's offender later.
    weight.data, bias.data = sound
    made.scaler.loss_scale.scale = MOST
    made.step_on(batch(2))
    assert notes.of("skipped_step")[2]["tensor"] == "b.diff"


@pytest.mark.parametrize("ending", ["", ".h5"])
def test_a_restored_solver_goes_on_with_its_scale(tmp_path: Path, ending: str) -> None:
    """Half a training and its other half are the whole one, bit for bit, with a scale that has moved."""
    rule = "snapshot_format: HDF5" if ending else ""
    start = {"start": 256, "growth": 3}
    whole, first = (solver(rule=rule, loss_scale=LossScale.of("dynamic", **start)) for _ in range(2))
    for step in range(9):
        whole.step_on(batch(step, 1e6 if step == 4 else 1))
    for step in range(5):
        first.step_on(batch(step, 1e6 if step == 4 else 1))
    _, state = first.snapshot(tmp_path / "half")
    second = solver(rule=rule, loss_scale=LossScale.of("dynamic", **start))
    second.restore(state)
    assert second.scaler.loss_scale == first.scaler.loss_scale
    assert second.scaler.loss_scale.skipped == 1
    for step in range(5, 9):
        second.step_on(batch(step))
    assert second.scaler.loss_scale.state() == whole.scaler.loss_scale.state()
    assert all(np.array_equal(a, b) for a, b in zip(everything(second), everything(whole), strict=True))
    solver(rule=rule, precision="fp32").restore(state)  # which has no use for it


def test_states_of_fp32_hold_no_scale_and_start_one_anew(tmp_path: Path) -> None:
    single = solver(precision="fp32")
    single.step_on(batch(0))
    _, state = single.snapshot(tmp_path / "single")
    assert read_state(state).loss_scale == {}
    half = solver()
    half.restore(state)
    assert half.scaler.loss_scale == LossScale.of("dynamic")


def test_caffe_reads_a_state_with_a_scale(tmp_path: Path) -> None:
    """Caffe's own parser skips a field that it does not know, and hands out the rest."""
    made = solver()
    made.step_on(batch(0))
    _, path = made.snapshot(tmp_path / "s")
    message = caffe_pb2.SolverState()
    message.ParseFromString(path.read_bytes())
    assert (message.iter, len(message.history)) == (1, len(made.history))
    np.testing.assert_array_equal(message.history[0].data, made.history[0].ravel())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"scale": 0, "good": 0, "skipped": 0, "in_a_row": 0}', "\x00",
                                  '{"scale": NaN, "good": 0, "skipped": 0, "in_a_row": 0}'])  # fmt: skip
def test_a_damaged_scale_is_named_and_nothing_changes(tmp_path: Path, text: str) -> None:
    made = solver()
    made.step_on(batch(0))
    _, path = made.snapshot(tmp_path / "s")
    good = json.dumps(made.scaler.loss_scale.state(), sort_keys=True).encode()
    data = path.read_bytes()
    assert data.endswith(good)
    path.write_bytes(data[: -len(good) - 1] + bytes([len(text)]) + text.encode())
    made.step_on(batch(1))
    before = everything(made)
    if not text:
        made.restore(path)
        return
    with pytest.raises(StallscopeError, match="the loss scale is damaged"):
        made.restore(path)
    assert all(np.array_equal(a, b) for a, b in zip(before, everything(made), strict=True))


def test_totals_of_casts_are_noted_now_and_then(notes: Notes) -> None:
    made = solver()
    for step in range(300):
        made.step_on(batch(step, 1e-9))
    seen = [note["outputs"]["nonzero"] for note in notes.of("precision") if note["layer"] == "x"]
    assert len(seen) == 2  # after 128 steps, and after 256
    assert seen[1] == 2 * seen[0]


def test_states_go_through_a_sidecar() -> None:
    one = LossScale(2.0**20, True, good=77, skipped=3, in_a_row=1)
    other = LossScale.of("dynamic")
    other.load(one.state())
    assert other == one
    static = LossScale.of(2)
    static.load(one.state())
    assert (static.scale, static.skipped) == (2, 3)


def test_a_solver_with_a_net_of_its_own_takes_its_precision() -> None:
    net = Net(net_text(), "TRAIN", precision="fp16", keep_fp32=["b"])
    made = Solver(RULE % (0.1, ""), net=net)
    assert made.scaler is not None
    assert made.step_on(batch(0)) > 0
    assert Solver(RULE % (0.1, ""), net=Net(net_text(), "TRAIN"), precision="fp32").scaler is None


def test_updates_allocate_nothing() -> None:
    made = solver(extra=layer("BatchNorm", "n", ["a"], ["a"]))
    made.step_on(batch(0))
    made.step_on(batch(0))
    given = batch(1)
    with counted() as counts:
        for _ in range(50):
            made.step_on(given)
    largest = made.scaler.precision.counts().nbytes
    assert {key: count for key, count in counts.items() if key[1] > largest} == {}


@pytest.mark.parametrize("given", [{"start": 0}, {"start": 2.0**25}, {"growth": 0}])
def test_starts_and_growths_that_make_no_sense(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="out of range"):
        LossScale.of("dynamic", **given)


@pytest.mark.parametrize("setting", ["static", 0, -1, float("nan"), float("inf"), 1e30, True, None])
def test_settings_that_make_no_sense(setting: Any) -> None:
    with pytest.raises(UsageError, match="loss_scale is out of range"):
        solver(loss_scale=setting)
