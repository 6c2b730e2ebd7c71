"""What a report says of fp16, from notes."""

from __future__ import annotations

from typing import Any

from profiler.rounding import by_layer, findings

ROW = {"overflow": 0, "flushed": 0, "subnormal": 0, "nonzero": 100}


def first(kind: str, phase: str = "backward", dynamic: bool = True, step: int = 5) -> dict[str, Any]:
    tensor = "fc.diff" if phase == "backward" else "fc"
    return {"note": "precision_first", "kind": kind, "step": step, "layer": "fc", "tensor": tensor, "phase": phase,
            "values": 3, "nonzero": 10, "dynamic": dynamic}  # fmt: skip


def counts(layer: str = "fc", kind: str = "gradients", pid: int = 1, **values: int) -> dict[str, Any]:
    return {"note": "precision", "layer": layer, "process": "trainer", "pid": pid, kind: ROW | values}


def only(*notes: dict[str, Any]) -> tuple[str, str, int | None]:
    (found,) = findings(notes)
    return found.level, found.text, found.step


def test_a_run_in_fp32_has_nothing_to_say() -> None:
    assert findings([{"note": "closed"}, {"note": "layer", "layer": "fc"}]) == []


def test_overflow_in_forward_names_the_layer_to_keep() -> None:
    level, text, step = only(first("overflow", "forward"), counts(kind="outputs", overflow=7))
    assert (level, step) == ("warning", 5)
    assert "first at step 5 in fc of layer fc (forward): 3 of 10 values" in text
    assert "In all: fc 7 outputs." in text
    assert "device.keep_fp32: [fc]" in text


def test_overflow_of_gradients_is_the_scales_business() -> None:
    assert only(first("overflow"))[0] == "info"
    level, text, _ = only(first("overflow", dynamic=False))
    assert level == "warning"
    assert "device.loss_scale: dynamic" in text


def test_underflow_is_a_warning_where_much_is_lost() -> None:
    assert only(first("underflow"), counts(flushed=9))[0] == "info"
    level, text, _ = only(first("underflow"), counts(flushed=60), counts("a", flushed=9))
    assert level == "warning"
    assert "60 % of the gradients of fc" in text
    assert " of a" not in text
    assert "device.keep_fp32: [fc]" in text
    assert "device.loss_scale: dynamic" in only(first("underflow", dynamic=False), counts(flushed=60))[1]
    kept = only(first("underflow", "forward", dynamic=False), counts(kind="outputs", flushed=60))[1]
    assert "device.keep_fp32: [fc]" in kept


def test_the_last_counts_of_each_process_are_added() -> None:
    notes = [counts(flushed=1), counts(flushed=2), counts(pid=2, flushed=5)]
    assert by_layer(notes)["fc"]["gradients"] == ROW | {"flushed": 7, "nonzero": 200}


def test_the_first_of_a_resumed_run_is_the_earliest() -> None:
    assert only(first("underflow", step=30), first("underflow", step=2))[2] == 2


def test_changes_of_the_scale_and_skipped_steps() -> None:
    def change(step: int, before: float, after: float) -> dict[str, Any]:
        return {"note": "loss_scale", "step": step, "before": before, "after": after, "why": "x"}

    def skip(step: int) -> dict[str, Any]:
        where = {"layer": "fc", "tensor": "fc.diff"}
        return {"note": "skipped_step", "step": step, "why": "gradients that are not finite", **where}

    scale, skipped = findings([change(3, 8, 4), skip(3), change(9, 4, 8), change(12, 8, 4), skip(12)])
    assert scale.text == "The loss scale grew once and backed off 2 times; it went from 8 to 4."
    assert (skipped.level, skipped.step) == ("info", 3)  # it is how the scale is found
    assert "2 steps of fp16 were skipped, which changed no weights: 3, 12 (gradients that are not" in skipped.text
    assert only(skip(4))[0] == "warning"
