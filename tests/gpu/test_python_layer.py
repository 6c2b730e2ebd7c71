"""Users' own layers: by module and name, by a type name, what they may do, and what is said when they fail."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gpu
from gpu.layers import registry
from gpu.layers.base import REGISTRY, Layer, LayerError
from gpu.layers.python import Python, PythonData, _own
from gpu.net import Net
from gpu.prototxt import PrototxtError
from gpu.solver import Solver
from profiler.errors import UsageError

DOC = Path(__file__).parents[2] / "docs" / "custom_layers.md"

MODULE = """
import numpy as np
import gpu

class Scale(gpu.PythonLayer):
    reads_top = False
    def setup(self, bottom, top):
        self.by = float(self.param_str)
        self.blobs.add_blob(1).data[...] = 3
        self.log = []
    def reshape(self, bottom, top):
        self.log.append(bottom[0].shape)
        top[0].reshape(bottom[0].shape)
    def forward(self, bottom, top):
        top[0].data[...] = bottom[0].data * self.by * self.blobs[0].data
    def backward(self, top, propagate_down, bottom):
        if propagate_down[0]:
            bottom[0].diff[...] = top[0].diff * self.by * self.blobs[0].data
        self.blobs[0].diff[...] += (top[0].diff * self.by * bottom[0].data).sum()

class Five(Scale):
    def setup(self, bottom, top):
        self.by, self.log = 1, []
        self.blobs.add_blob(1).data[...] = 5

class Negate(gpu.PythonLayer):
    in_place = True
    reads_bottom = reads_top = False
    def reshape(self, bottom, top):
        top[0].reshape(*bottom[0].shape)
    def forward(self, bottom, top):
        np.negative(bottom[0].data, out=top[0].data)
    def backward(self, top, propagate_down, bottom):
        np.negative(top[0].diff, out=bottom[0].diff)

class Loss(gpu.PythonLayer):
    # pycaffe's own example, with another base
    def setup(self, bottom, top):
        if len(bottom) != 2:
            raise Exception("Need two inputs to compute distance.")
    def reshape(self, bottom, top):
        self.diff = np.zeros_like(bottom[0].data, dtype=np.float32)
        top[0].reshape(1)
    def forward(self, bottom, top):
        self.diff[...] = bottom[0].data - bottom[1].data
        top[0].data[...] = np.sum(self.diff**2) / bottom[0].num / 2.
    def backward(self, top, propagate_down, bottom):
        for i in range(2):
            if not propagate_down[i]:
                continue
            if i == 0:
                sign = 1
            else:
                sign = -1
            bottom[i].diff[...] = sign * self.diff / bottom[i].num

class Reader(gpu.PythonDataLayer):
    def forward(self, bottom, top):
        raise AssertionError("must not run in a net")

class Undeclared(gpu.PythonLayer):
    pass

class Noise(gpu.PythonLayer):
    makes_data = False
    def reshape(self, bottom, top):
        top[0].reshape(2, 3)
    def forward(self, bottom, top):
        top[0].data[...] = self.random().standard_normal((2, 3))

class Careless(Scale):
    def setup(self, bottom, top):
        self.what = self.param_str
        if self.what == "setup":
            {}["gone"]
    def reshape(self, bottom, top):
        if self.what == "no shape":
            return
        if self.what == "reshape":
            1 / 0
        top[0].reshape(*bottom[0].shape)
        if self.what == "bottom shape":
            bottom[0].reshape(1)
    def forward(self, bottom, top):
        if self.what == "add_blob":
            self.blobs.add_blob(1)
        if self.what == "writes bottom":
            bottom[0].data[...] = 0
        if self.what == "forward":
            np.zeros(3) + np.zeros(4)
        if self.what == "exit":
            raise SystemExit(4)
        if self.what == "own":
            raise gpu.net.StallscopeError("too cold", expected="warm", found="ice", hint="a heater")
        top[0].data[...] = 1
    def backward(self, top, propagate_down, bottom):
        if self.what == "backward":
            self.nothing
        if self.what == "hidden top":
            top[0].data.sum()
        if self.what == "writes top diff":
            top[0].diff[...] = 0
        bottom[0].diff[...] = 0

class Keeper(Negate):
    in_place = False
    def forward(self, bottom, top):
        super().forward(bottom, top)
        x, y = bottom[0].data, top[0].data
        self.kept = eval(self.param_str, {"x": x, "y": y})
    def backward(self, top, propagate_down, bottom):
        super().backward(top, propagate_down, bottom)

NotALayer = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with the module ``user_layers``; modules and types of the test are gone afterwards."""
    (tmp_path / "user_layers.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    before, types = set(sys.modules), set(registry())
    path = list(sys.path)
    yield tmp_path
    assert sys.path == path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    for name in set(REGISTRY) - types:
        del REGISTRY[name]
        _own.discard(name)


def python_net(layer: str, param: str = "", *, rest: str = "", shape: str = "dim: 2 dim: 3", **options: Any) -> Net:
    return Net(
        f"""force_backward: true
        layer {{ name: "x" type: "Input" top: "x" input_param {{ shape {{ {shape} }} }} }}
        layer {{ name: "L" type: "Python" bottom: "x" top: "y"
          python_param {{ module: "user_layers" layer: "{layer}" param_str: "{param}" }} }} {rest}""",
        **options,
    )


def test_the_page_works(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```(\w+)\n(.*?)```", DOC.read_text(), re.DOTALL)
    code = [text for kind, text in blocks if kind == "python"]
    (folder / "my_layers.py").write_text(code[0])
    (folder / "soften.prototxt").write_text(next(text for kind, text in blocks if kind == "prototxt"))
    exec(compile(code[1], "custom_layers.md", "exec"), {})
    assert "gain [2. 2. 2.]" in capsys.readouterr().out
    exec(compile(code[2], "custom_layers.md", "exec"), {"__name__": "page"})
    assert issubclass(REGISTRY["Soften"], Python)


def test_forward_backward_and_parameters(folder: Path, tmp_path: Path) -> None:
    net = python_net("Scale", "2")
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(net.forward(x=x)["y"], 6 * x)
    for _ in range(2):
        np.testing.assert_array_equal(net.backward(y=np.ones((2, 3)))["x"], np.full((2, 3), 6))
    assert net.params["L"][0].diff == 2 * 2 * x.sum()  # the net adds passes up, += in the class does not do so twice
    net.params["L"][0].data[...] = 5
    net.save(tmp_path / "w.caffemodel")
    fresh = python_net("Scale", "2", weights=tmp_path / "w.caffemodel")
    np.testing.assert_array_equal(fresh.forward(x=x)["y"], 10 * x)


def test_shared_parameters_start_as_their_owner_says(folder: Path) -> None:
    net = python_net(
        "Scale",
        '1" } param { name: "w',
        rest="""layer { name: "M" type: "Python" bottom: "y" top: "z" param { name: "w" }
          python_param { module: "user_layers" layer: "Five" param_str: "1" } }""",
    )
    assert net.params["M"][0] is net.params["L"][0]
    assert net.params["M"][0].data == 3
    assert [param.name for param in net.learnable] == ["L.0"]


def test_in_place_shares_memory_and_keeps_the_numbers(folder: Path) -> None:
    text = """force_backward: true
      layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 } } }
      layer { name: "p" type: "Power" bottom: "x" top: "y" power_param { scale: 3 } }
      layer { name: "L" type: "Python" bottom: "y" top: "y" python_param { module: "user_layers" layer: "Negate" } }"""
    net = Net(text)
    assert net._graph.latest["y"].home is not net._graph.latest["y"]
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(net.forward(x=x)["y"], -3 * x)
    np.testing.assert_array_equal(net.backward(y=x)["x"], -3 * x)
    with pytest.raises(LayerError, match="over its input"):
        Net(text.replace('"Negate"', '"Scale" param_str: "1"'))


def test_pycaffes_loss_trains(folder: Path) -> None:
    text = """
      layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 4 dim: 3 } } }
      layer { name: "t" type: "Input" top: "t" input_param { shape { dim: 4 dim: 2 } } }
      layer { name: "ip" type: "InnerProduct" bottom: "x" top: "ip"
        inner_product_param { num_output: 2 weight_filler { type: "xavier" } } }
      layer { name: "L" KIND bottom: "ip" bottom: "t" top: "loss" loss_weight: 1 }"""
    rng = np.random.default_rng(0)
    x, t = rng.standard_normal((4, 3)), rng.standard_normal((4, 2))
    losses = []
    for kind in ('type: "Python" python_param { module: "user_layers" layer: "Loss" }', 'type: "EuclideanLoss"'):
        solver = Solver('base_lr: 0.1 lr_policy: "fixed"\n', net=text.replace("KIND", kind), seed=1)
        losses.append([solver.step_on({"x": x, "t": t}) for _ in range(5)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
    assert losses[0][-1] < losses[0][0]


def test_data_layers_are_inputs_and_never_run(folder: Path) -> None:
    text = (
        'layer { name: "d" type: "Python" top: "data" top: "label" python_param { module: "user_layers" layer: "%s" } }'
    )
    with pytest.raises(LayerError, match=r"'d'.*shape of 'data'"):
        Net(text % "Reader")
    net = Net(text % "Reader", input_shapes={"data": (2, 1, 3, 3)})
    assert net.inputs == ["data", "label"]
    assert isinstance(net.layers[0], PythonData)
    net.forward(data=np.ones((2, 1, 3, 3)))
    assert net.blobs["label"].shape == (2,)
    with pytest.raises(LayerError, match="does not say what it is") as caught:
        Net(text % "Undeclared")
    assert "PythonDataLayer" in str(caught.value)


def test_draws_depend_on_seed_and_iteration_alone(folder: Path) -> None:
    text = 'layer { name: "n" type: "Python" top: "y" python_param { module: "user_layers" layer: "Noise" } }\n'
    net, same, other = (Net(text, "TRAIN", seed=seed) for seed in (1, 1, 2))
    first, second = net.forward()["y"], net.forward()["y"]
    assert not np.array_equal(first, second)
    same.iteration = 1
    assert np.array_equal(same.forward()["y"], second)
    assert not np.array_equal(other.forward()["y"], first)


@pytest.mark.parametrize(
    ("what", "message", "found"),
    [
        ("setup", r"setup\(\) of user_layers.Careless raised KeyError", '{}["gone"]'),
        ("reshape", r"reshape\(\) of user_layers.Careless raised ZeroDivisionError", "1 / 0"),
        ("no shape", r"left top\[0\] without a shape", ""),
        ("bottom shape", r"bottom\[0\] cannot be reshaped", ""),
        ("forward", r"forward\(\) of user_layers.Careless raised ValueError.*broadcast", "np.zeros(3)"),
        ("exit", r"forward\(\) of user_layers.Careless raised SystemExit: 4", "raise SystemExit(4)"),
        ("writes bottom", "raised ValueError.*read-only", "bottom[0].data[...] = 0"),
        ("add_blob", r"can be added in setup\(\) only", ""),
        ("own", "forward.. of user_layers.Careless: too cold", "a heater"),
        ("backward", "backward.. of user_layers.Careless raised AttributeError", "self.nothing"),
        ("hidden top", r"values of top\[0\] are not kept", "reads_top = False"),
        ("writes top diff", "raised ValueError.*read-only", "top[0].diff[...] = 0"),
    ],
)
def test_what_goes_wrong_in_a_layer_names_it(folder: Path, what: str, message: str, found: str) -> None:
    def use() -> None:
        net = python_net("Careless", what)
        net.forward()
        net.backward()

    with pytest.raises(LayerError, match=rf"layer 'L' \(Python\): .*{message}") as caught:
        use()
    assert found in str(caught.value)
    if "raised" in message and found in MODULE:
        line = 1 + MODULE[: MODULE.index(found)].count("\n")
        assert f"user_layers.py, line {line}" in str(caught.value)


@pytest.mark.parametrize("backend", ["numpy", "emulated"])
@pytest.mark.parametrize(
    ("kept", "which"),
    [
        ("x", "bottom"), ("y", "top"), ("x[0]", "bottom"), ("y.reshape(-1)[1:]", "top"), ("x.T", "bottom"),
        ("[{'deep': memoryview(x)}]", "bottom"), ("iter(y)", "top"),
        ("x.copy()", ""), ("x * 2", ""), ("x[[0]]", ""), ("float(y.sum())", ""), ("(x.shape, y.dtype)", ""),
    ],
)  # fmt: skip
def test_values_that_are_kept_against_the_declaration(folder: Path, kept: str, which: str, backend: str) -> None:
    """``reads_… = False`` gives their memory away: kept arrays would hold other values by the time of backward."""
    net = python_net("Keeper", kept, backend=backend)
    if not which:
        net.forward()
        net.forward()
        return
    with pytest.raises(
        LayerError, match=rf"layer 'L' .*forward\(\) of user_layers\.Keeper keeps .*{which}\[0\]"
    ) as caught:
        net.forward()
    assert f"reads_{which} = False" in str(caught.value)


def test_a_cycle_that_nobody_has_is_no_keeping(folder: Path) -> None:
    net = python_net("Keeper", "(lambda a: (a.append(a), a.append(x), None)[-1])([])")
    net.forward()


def test_share_in_parallel_is_told_to_the_class(folder: Path) -> None:
    for text, told in (("", False), ("share_in_parallel: true", True), ("share_in_parallel: false", False)):
        net = Net(
            f"""layer {{ name: "x" type: "Input" top: "x" input_param {{ shape {{ dim: 2 }} }} }}
            layer {{ name: "L" type: "Python" bottom: "x" top: "y"
              python_param {{ module: "user_layers" layer: "Scale" param_str: "2" {text} }} }}"""
        )
        (layer,) = [layer for layer in net.layers if layer.name == "L"]
        assert layer._user.share_in_parallel is told


@pytest.mark.parametrize(
    ("param", "message", "hint"),
    [
        ('module: "user_layers" layer: "Scael"', "has no layer class 'Scael'", "did you mean 'Scale'"),
        (
            'module: "user_layers" layer: "NotALayer"',
            "has no layer class 'NotALayer'",
            "derive it from gpu.PythonLayer",
        ),
        ('module: "no_such_module" layer: "X"', "module 'no_such_module' is not there", "PYTHONPATH"),
        ('module: "broken" layer: "X"', "cannot be imported: SyntaxError", "whole traceback"),
        ('module: "leaves" layer: "X"', "cannot be imported: SystemExit: 6", "whole traceback"),
        ('module: "from_caffe" layer: "X"', "needs the module 'caffe'", "gpu import PythonLayer"),
        ('layer: "X"', "needs a module and a layer", 'module: "my_layers"'),
    ],
)
def test_what_goes_wrong_in_finding_a_layer(folder: Path, param: str, message: str, hint: str) -> None:
    (folder / "broken.py").write_text("def f(:\n")
    (folder / "leaves.py").write_text("raise SystemExit(6)\n")
    (folder / "from_caffe.py").write_text("import caffe\n")
    with pytest.raises(LayerError, match=rf"layer 'L' \(Python\).*{message}") as caught:
        Net(
            f"""layer {{ name: "x" type: "Input" top: "x" input_param {{ shape {{ dim: 1 }} }} }}
            layer {{ name: "L" type: "Python" bottom: "x" top: "y" python_param {{ {param} }} }}"""
        )
    assert hint in str(caught.value)


def test_types_of_ones_own(folder: Path) -> None:
    (folder / "own_types.py").write_text(
        MODULE + '\ngpu.register_layer("TwiceAsMuch", Scale)\n' + 'gpu.register_layer("FromFile", Reader)\n'
    )
    text = """force_backward: true
      layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 2 } } }
      layer { name: "L" type: "%s" bottom: "x" top: "y" python_param { module: "own_types" param_str: "2" } }"""
    net = Net(text % "TwiceAsMuch")
    np.testing.assert_array_equal(net.forward(x=[1, 2])["y"], [6, 12])
    np.testing.assert_array_equal(net.backward(y=[1, 1])["x"], [6, 6])
    data = Net('layer { name: "d" type: "FromFile" top: "y" }\n', input_shapes={"y": (3,)})
    assert data.inputs == ["y"]
    with pytest.raises(PrototxtError, match="unsupported type"):
        Net(text % "Unheard")

    @gpu.register_layer("TwiceAsMuch")
    class Again(gpu.PythonLayer):
        pass

    assert REGISTRY["TwiceAsMuch"].user_class is Again  # type: ignore[attr-defined]

    @gpu.register_layer("Plain")
    class Plain(Layer):
        def shapes(self, bottoms: Any) -> Any:
            return list(bottoms)

        def forward(self, bottoms: Any, tops: Any) -> None:
            tops[0][...] = bottoms[0] + 1

    assert Net((text % "Plain").split("python_param")[0] + "}").forward(x=[1, 2])["y"].tolist() == [2, 3]
    for wrong in ("ReLU", "Python", ""):
        with pytest.raises(UsageError, match=r"built in|needs a name"):
            gpu.register_layer(wrong, Again)
    with pytest.raises(UsageError, match="no layer class"):
        gpu.register_layer("Number", 3)  # type: ignore[type-var]


class _Device:
    """An array that is not NumPy's, as cupy's are not."""

    def __init__(self, host: np.ndarray) -> None:
        self.host, self.shape = np.array(host, np.float32), host.shape

    def __setitem__(self, where: Any, value: Any) -> None:
        self.host[where] = value.host if isinstance(value, _Device) else value


def _asnumpy(array: _Device, out: np.ndarray) -> np.ndarray:
    np.copyto(out, array.host)
    return out


def test_arrays_of_a_device_are_copied_around_each_call(folder: Path) -> None:
    layer = python_net("Scale", "2").layers[-1]
    layer.xp = SimpleNamespace(asnumpy=_asnumpy, asarray=_Device)  # type: ignore[assignment]
    x, y, dy, dx, dw = (_Device(np.full((2, 3), value)) for value in (4, 0, 1, 9, 9))
    dw = _Device(np.zeros(1))
    layer.blobs[0] = SimpleNamespace(device_data=_Device(np.full(1, 5)))  # type: ignore[call-overload]
    layer.forward([x], [y])
    assert (y.host == 40).all()
    layer.backward([x], [y], [dy], [dx], [dw])
    assert (dx.host == 10).all()
    assert dw.host == 2 * 4 * 6
