"""``debug_info``: Caffe's lines, in Caffe's order, with the numbers of a net that was looked at by hand."""

from __future__ import annotations

import logging
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.solver import Solver
from profiler import recorder
from tests.gpu import nets

FILL = nets.FILL
NET = (
    nets.inputs(x=(4, 3), l=(4,))
    + nets.layer(
        "InnerProduct", "ip", ["x"], ["ip"],
        f'param {{ name: "w" }} inner_product_param {{ num_output: 5 {FILL} }}',
    )
    + nets.layer("Sigmoid", "act", ["ip"], ["act"])
    + nets.layer("InnerProduct", "top", ["act"], ["top"], f"inner_product_param {{ num_output: 3 {FILL} }}")
    + nets.layer("SoftmaxWithLoss", "loss", ["top", "l"], ["loss"])
)  # fmt: skip
RULE = "base_lr: 0.1 lr_policy: 'fixed' momentum: 0.9 weight_decay: 0.01\n"


def solver(extra: str, **options: Any) -> Solver:
    return Solver(RULE + extra, net=NET, backend="numpy", seed=2, **options)


def batches(count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"x": rng.standard_normal((4, 3), np.float32), "l": rng.integers(0, 3, 4)} for _ in range(count)]


def test_the_lines_of_a_step(caplog: pytest.LogCaptureFixture) -> None:
    made, other = solver("display: 2 debug_info: true"), solver("")
    with caplog.at_level(logging.INFO, "gpu.debug_info"):
        for batch in batches(3):
            caplog.clear()
            before = [param.blob.data.copy() for param in other.net.learnable]
            made.step_on(batch)
            other.net.clear_param_diffs()
            other.net.forward_only(**batch)
            other.net.backward_only()
            net = other.net
            data = {name: np.abs(net.blobs[name].data.astype(np.float64)).mean() for name in net.blobs}
            diff = {name: np.abs(net.blobs[name].diff.astype(np.float64)).mean() for name in ("ip", "act", "top")}
            params = [np.abs(array).mean(dtype=np.float64) for array in before]
            grads = [np.abs(param.blob.diff).mean(dtype=np.float64) for param in net.learnable]
            kinds = (before, [param.blob.diff.copy() for param in net.learnable])
            l1 = [sum(np.abs(array).sum(dtype=np.float64) for array in arrays) for arrays in kinds]
            l2 = [np.linalg.norm(np.concatenate([array.ravel() for array in arrays])) for arrays in kinds]
            other.step_on(batch)
            updates = [np.abs(param.blob.diff).mean(dtype=np.float64) for param in net.learnable]
            if made.iter == 2:
                assert caplog.messages == []  # step 1 is not displayed
                continue
            forward = [
                f"[Forward] Layer x, top blob x data: {data['x']:g}",
                f"[Forward] Layer l, top blob l data: {data['l']:g}",
                f"[Forward] Layer ip, top blob ip data: {data['ip']:g}",
                f"[Forward] Layer ip, param blob w data: {params[0]:g}",
                f"[Forward] Layer ip, param blob 1 data: {params[1]:g}",
                f"[Forward] Layer act, top blob act data: {data['act']:g}",
                f"[Forward] Layer top, top blob top data: {data['top']:g}",
                f"[Forward] Layer top, param blob 0 data: {params[2]:g}",
                f"[Forward] Layer top, param blob 1 data: {params[3]:g}",
                f"[Forward] Layer loss, top blob loss data: {data['loss']:g}",
            ]
            backward = [
                f"[Backward] Layer loss, bottom blob top diff: {diff['top']:g}",
                f"[Backward] Layer top, bottom blob act diff: {diff['act']:g}",
                f"[Backward] Layer top, param blob 0 diff: {grads[2]:g}",
                f"[Backward] Layer top, param blob 1 diff: {grads[3]:g}",
                f"[Backward] Layer act, bottom blob ip diff: {diff['ip']:g}",
                f"[Backward] Layer ip, param blob 0 diff: {grads[0]:g}",
                f"[Backward] Layer ip, param blob 1 diff: {grads[1]:g}",
            ]
            names = (("ip", "w"), ("ip", "1"), ("top", "0"), ("top", "1"))
            update = [
                f"[Update] Layer {layer}, param {name} data: {data:g}; diff: {change:g}"
                for (layer, name), data, change in zip(names, params, updates, strict=True)
            ]
            found = [message.strip() for message in caplog.messages]
            (norms,) = [message for message in found if "All net params" in message]
            assert [message for message in found if message != norms] == forward + backward + update
            assert found.index(norms) == len(forward + backward)
            told = [float(text) for text in re.findall(r"[\d.e+-]+(?=[,)])", norms)]
            assert told == pytest.approx([*l1, *l2], rel=1e-4)
            assert made.debug_info is not None
            assert [str(line).strip() for line in made.debug_info.lines] == forward + backward + update


def test_each_of_several_tops_and_bottoms_has_its_own_value() -> None:
    text = nets.inputs(x=(2, 3)) + nets.layer("Slice", "cut", ["x"], ["a", "b", "c"])
    text += nets.layer("InnerProduct", "up", ["b"], ["d"], f"inner_product_param {{ num_output: 1 {FILL} }}")
    text += nets.layer("Eltwise", "sum", ["d", "c"], ["s"], "eltwise_param { coeff: 1 coeff: -3 } loss_weight: 1")
    made = Solver(RULE + "display: 1 debug_info: true", net="force_backward: true\n" + text, backend="numpy", seed=2)
    made.step_on({"x": np.array([[1, -2, 5], [3, 4, -7]], np.float32)})
    assert made.debug_info is not None
    lines = made.debug_info.lines
    tops = {line.name: line.data for line in lines if line.pass_ == "Forward" and line.layer == "cut"}
    assert tops == {"a": 2, "b": 3, "c": 6}
    below = {line.name: line.diff for line in lines if (line.layer, line.what) == ("sum", "bottom blob")}
    assert below == {"d": 1, "c": 3}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_watching_changes_no_bits_and_the_loss_scale_does_not_show(precision: str) -> None:
    made = solver("display: 1 debug_info: true", precision=precision)
    other = solver("", precision=precision)
    single = solver("display: 1 debug_info: true")
    for batch in batches(4):
        assert made.step_on(batch) == other.step_on(batch)
        single.step_on(batch)
        assert made.debug_info is not None
        assert single.debug_info is not None
        for line, wanted in zip(made.debug_info.lines, single.debug_info.lines, strict=True):
            assert (line.layer, line.name) == (wanted.layer, wanted.name)
            assert (line.diff is None, line.data is None) == (wanted.diff is None, wanted.data is None)
            assert (line.diff or 0) == pytest.approx(wanted.diff or 0, rel=0.05, abs=1e-4)
        assert made.debug_info.norms[0] == pytest.approx(single.debug_info.norms[0], rel=0.05)
    for mine, theirs in zip(made.net.learnable, other.net.learnable, strict=True):
        np.testing.assert_array_equal(mine.blob.data, theirs.blob.data)


def test_each_displayed_step_is_an_event(tmp_path: Path) -> None:
    rec = recorder.Recorder.open(tmp_path, name="trainer", role="trainer", actor=0)
    recorder.set_current(rec)
    try:
        made = solver("display: 2 debug_info: true iter_size: 2")
        for _ in range(3):
            made.step_on(batches(2))
    finally:
        recorder.set_current(recorder.NULL)
        rec.close()
    from profiler.store import load_run

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        notes = [note for note in load_run(tmp_path).notes if note["note"] == "debug_info"]
    assert [note["step"] for note in notes] == [0, 2]
    assert len(notes[0]["norms"]) == 2  # sub-batches
    first = notes[0]["lines"][0]
    assert (first["pass_"], first["layer"], first["what"], first["name"]) == ("Forward", "x", "top blob", "x")
    assert first["data"] == pytest.approx(np.abs(batches(1)[0]["x"]).mean(), rel=1e-6)
