"""gpu.lint and types of one's own: what a net takes, it takes; what a net refuses, it says with the way out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu import Net
from gpu.layers import base, python
from gpu.lint.check import check
from profiler.errors import StallscopeError

MODULE = """
import gpu

@gpu.register_layer("{name}")
class Own(gpu.PythonLayer):
    reads_top = False
    def setup(self, bottom, top): pass
    def reshape(self, bottom, top): top[0].reshape(*bottom[0].shape)
    def forward(self, bottom, top): top[0].data[...] = 2 * bottom[0].data
    def backward(self, top, propagate_down, bottom): bottom[0].diff[...] = 2 * top[0].diff
"""
NET = """
layer {{ name: "x" type: "Input" top: "x" input_param {{ shape {{ dim: 2 dim: 3 }} }} }}
layer {{ name: "t" type: "Input" top: "t" input_param {{ shape {{ dim: 2 dim: 3 }} }} }}
layer {{ name: "own" type: "{name}" bottom: "x" top: "y" python_param {{ module: "{module}" }} }}
layer {{ name: "ip" type: "InnerProduct" bottom: "y" top: "ip"
  inner_product_param {{ num_output: 3 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "loss" type: "EuclideanLoss" bottom: "ip" bottom: "t" top: "loss" }}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "lint_own_module.py").write_text(MODULE.format(name="LintOwn"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("lint_own_module", None)
    base.REGISTRY.pop("LintOwn", None)
    python._own.discard("LintOwn")


def lint(place: Path, name: str, module: str) -> list[tuple[str, str]]:
    (place / "net.prototxt").write_text(NET.format(name=name, module=module))
    return [(finding.rule, f"{finding.what} {finding.do}") for finding in check(place / "net.prototxt")]


def test_a_type_that_its_module_registers_is_known(place: Path) -> None:
    assert lint(place, "LintOwn", "lint_own_module") == []
    assert Net(NET.format(name="LintOwn", module="lint_own_module"), "TRAIN").forward()["loss"] >= 0


@pytest.mark.parametrize(
    ("name", "module", "says"),
    [("LintOwn", "lint_not_there", "module 'lint_not_there' is not there"), ("LintOther", "lint_own_module", "")],
)
def test_what_a_net_refuses_is_found(place: Path, name: str, module: str, says: str) -> None:
    found = lint(place, name, module)
    assert "unknown-type" in {rule for rule, _ in found}
    assert says in " ".join(text for _, text in found)
    with pytest.raises(StallscopeError) as caught:
        Net(NET.format(name=name, module=module), "TRAIN")
    assert says in str(caught.value)
    if not says:
        assert "module 'lint_own_module' registers no type 'LintOther'" in (caught.value.hint or "")
        assert "@gpu.register_layer('LintOther')" in (caught.value.hint or "")
