"""gpu.time: what it measures is there, repeats are compared, and so are two results."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from gpu import algorithms, probe, time_compare
from gpu.layers.normalisation import LRN
from gpu.layers.pooling import Pooling
from gpu.probe import bare_graph, quiet_net, random_inputs, versions
from gpu.prototxt import filter_net, load_net
from gpu.time import main, render
from gpu.timing import measure
from profiler import cli
from profiler.errors import StallscopeError, UsageError

NET = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 4 dim: 4 dim: 10 dim: 10 } } }
layer { name: "label" type: "Input" top: "label" input_param { shape { dim: 4 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 6 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "bn" type: "BatchNorm" bottom: "conv" top: "bn" }
layer { name: "depth" type: "Convolution" bottom: "bn" top: "depth"
  convolution_param { num_output: 6 group: 6 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "one" type: "Convolution" bottom: "depth" top: "one"
  convolution_param { num_output: 5 kernel_size: 1 weight_filler { type: "xavier" } } }
layer { name: "pool" type: "Pooling" bottom: "one" top: "pool" pooling_param { kernel_size: 2 stride: 2 } }
layer { name: "norm" type: "LRN" bottom: "pool" top: "norm" }
layer { name: "drop" type: "Dropout" bottom: "norm" top: "norm" }
layer { name: "ip" type: "InnerProduct" bottom: "norm" top: "ip"
  inner_product_param { num_output: 10 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""


@pytest.fixture
def net(tmp_path: Path) -> Path:
    path = tmp_path / "net.prototxt"
    path.write_text(NET)
    return path


def run(net: Path, *arguments: str, code: int = 0) -> Any:
    out = net.parent / "out.json"
    assert main([str(net), "--iterations", "3", "--backend", "numpy", "--json", str(out), *arguments]) == code
    text = out.read_text()
    assert "NaN" not in text
    return json.loads(text)


def test_every_layer_is_timed_and_repeats_agree(net: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(net)
    assert (found["schema"], found["kind"], found["iterations"]) == (1, "time", 3)
    assert [row["layer"] for row in found["layers"]][2:4] == ["conv", "bn"]
    for row in found["layers"]:
        assert row["identical"]
        times = row["forward_ms"]
        assert 0 < times["p5"] <= times["median"] <= times["p95"]
        assert (row["backward_ms"] is None) == (row["type"] == "Input")
        assert (row["hashes"]["backward"] is None) == (row["type"] == "Input")
    assert sum(row["share"] for row in found["layers"]) == pytest.approx(1, abs=0.5)
    assert found["repeats"] == {"passes": 3, "identical": True, "first": None}
    memory = found["memory"]
    assert memory["params"] == 2 * 4 * (6 * 4 * 9 + 6 + 6 * 9 + 6 + 6 * 5 + 5 + 5 * 9 * 10 + 10 + 6 + 6 + 1)
    assert memory["total"] == memory["block"] + memory["params"] + memory["own"]
    assert "agree bit for bit" in capsys.readouterr().out


def test_a_net_in_test_has_no_backward(net: Path) -> None:
    found = run(net, "--phase", "TEST")
    assert found["total"]["backward_ms"] is None
    assert all(row["backward_ms"] is None for row in found["layers"])


def test_statistics_are_made_up_where_none_are_given(net: Path) -> None:
    trained = quiet_net(str(net), "TRAIN", seed=3)
    trained.forward(**random_inputs(trained._graph, 0))
    trained.save(net.parent / "w.caffemodel")
    made_up = [blob.data for blob in quiet_net(str(net), "TEST").params["bn"]]
    assert [float(blob.mean()) for blob in made_up] == [0, 1, 1]
    given = quiet_net(str(net), "TEST", str(net.parent / "w.caffemodel"))
    for blob, theirs in zip(given.params["bn"], trained.params["bn"], strict=True):
        np.testing.assert_array_equal(blob.data, theirs.data)
    assert not quiet_net(str(net), "TRAIN").params["bn"][2].data.any()


def test_the_state_is_that_of_the_start_in_every_pass(net: Path) -> None:
    """Statistics and the counter of masks move in a pass; hashes could not agree if they did so here."""
    built = quiet_net(str(net), "TRAIN", seed=3)
    inputs = random_inputs(built._graph, 0)
    before = [blob.data.copy() for blob in built.params["bn"]]
    assert measure(built, inputs, 2).first is None
    for blob, values in zip(built.params["bn"], before, strict=True):
        np.testing.assert_array_equal(blob.data, values)
    assert built.iteration == 0
    assert not any("forward" in vars(layer) for layer in built.layers)  # nothing is left wrapped


@pytest.mark.parametrize(("cls", "name", "which"), [(LRN, "norm", "forward"), (Pooling, "pool", "backward")])
def test_the_first_layer_that_differs_is_named(
    net: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, cls: Any, name: str, which: str
) -> None:
    whole: Callable[..., None] = getattr(cls, which)
    calls = []

    def unsteady(self: Any, *arrays: Any) -> None:
        whole(self, *arrays)
        calls.append(1)
        written = arrays[1] if which == "forward" else arrays[3]
        written[0].reshape(-1)[0] = np.nextafter(np.float32(1), np.float32(len(calls)))
        if len(calls) % 2:
            written[0].reshape(-1)[0] = 1

    monkeypatch.setattr(cls, which, unsteady)
    found = run(net, code=1)
    assert found["repeats"]["first"] == {"layer": name, "pass": which}
    assert not next(row for row in found["layers"] if row["layer"] == name)["identical"]
    assert f"layer '{name}' is the first, in its {which} pass" in " ".join(capsys.readouterr().out.split())


def test_algorithms_give_the_same_numbers_to_rounding(net: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(net, "--algorithms")["algorithms"]
    by_layer: dict[str, list[Any]] = {}
    for row in found:
        by_layer.setdefault(row["layer"], []).append(row)
    assert list(by_layer) == ["conv", "depth", "one"]
    for rows in by_layer.values():
        assert [row["chosen"] for row in rows] == [True] + [False] * (len(rows) - 1)
        assert len(rows) >= 3
        assert len({row["algorithm"] for row in rows}) == len(rows)
        for row in rows:
            assert row["identical"]
            assert row["relative"] < 1e-5
            assert row["workspace"] > 0
    assert any("direct sums" in row["algorithm"] for row in by_layer["depth"])
    assert any("without unrolling" in row["algorithm"] for row in by_layer["one"])
    assert any(row["relative"] > 0 for row in found)  # they are other sums, not the same one by another name
    assert "convolution algorithms" in capsys.readouterr().out


def test_an_algorithm_that_does_not_repeat_is_told(net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, calls = algorithms.Windowed._unpack, []

    def unsteady(self: Any, packed: Any, maps: Any, bias: Any) -> None:
        whole(self, packed, maps, bias)
        calls.append(1)
        maps.reshape(-1)[0] = len(calls)

    monkeypatch.setattr(algorithms.Windowed, "_unpack", unsteady)
    built = quiet_net(str(net), "TRAIN")
    assert not all(tried.identical for tried in algorithms.try_algorithms(built, 2, 0))


def test_against_itself_nothing_changed(net: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run(net)
    first = tmp_path / "first.json"
    (tmp_path / "out.json").rename(first)
    against = run(net, "--against", str(first))["against"]
    assert against["comparable"]
    assert against["versions"] == {}
    assert against["changed"] == []
    assert against["first"] is None
    assert [row["layer"] for row in against["layers"]] == [
        row["layer"] for row in json.loads(first.read_text())["layers"]
    ]
    assert all(row["forward"] > 0 for row in against["layers"])
    assert "the bits of every layer are the same" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("order", [1, -1])
def test_the_blas_of_versions_is_numpys(monkeypatch: pytest.MonkeyPatch, order: int) -> None:
    """SciPy brings another OpenBLAS, which a compiler loads where its cache is cold: no change of version. What is
    loaded is listed in any order."""
    numpys, scipys = (
        {"user_api": "blas", "internal_api": "openblas", "version": version, "num_threads": threads, "filepath": path}
        for version, threads, path in (
            ("0.3.31", 1, "/env/site-packages/numpy.libs/libscipy_openblas64_.so"),
            ("0.3.30", 2, "/env/site-packages/scipy.libs/libscipy_openblas.so"),
        )
    )
    found = []
    for pools in ([numpys], [numpys, scipys][::order]):
        monkeypatch.setattr("threadpoolctl.threadpool_info", lambda pools=pools: pools)
        found.append(versions())
    assert found[0] == found[1]
    assert found[0]["blas openblas"] == "0.3.31, 1 threads"


def test_the_blas_that_numpy_really_has_is_told() -> None:
    """In a process of its own, where SciPy's is there as well."""
    ask = "import scipy.linalg; from gpu.probe import versions; print(versions()['blas openblas'])"
    told = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout
    built = np.show_config("dicts")["Build Dependencies"]["blas"]["version"]
    assert told.startswith(built.split("dev")[0].rstrip("."))


def test_against_another_version(
    net: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    document = run(net)
    document["versions"] |= {"numpy": "1.0", "gone": "3"}
    first = tmp_path / "first.json"
    first.write_text(json.dumps(document))
    forward = LRN.forward

    def other(self: Any, bottoms: Any, tops: Any) -> None:
        forward(self, bottoms, tops)
        tops[0].reshape(-1)[0] = np.nextafter(tops[0].reshape(-1)[0], np.float32(9))

    monkeypatch.setattr(LRN, "forward", other)
    capsys.readouterr()
    against = run(net, "--against", str(first), code=1)["against"]
    assert against["versions"] == {"numpy": ["1.0", np.__version__], "gone": ["3", None]}
    assert against["first"] == {"layer": "norm", "pass": "forward"}
    shown = " ".join(capsys.readouterr().out.split())
    assert "numpy: 1.0 there" in shown
    assert "the first is that of layer 'norm', forward" in shown


@pytest.mark.parametrize(
    ("arguments", "differs"), [(("--seed", "1"), ["inputs", "weights"]), (("--batch", "2"), ["shapes", "inputs"])]
)
def test_bits_of_other_inputs_are_not_compared(net: Path, tmp_path: Path, arguments: Any, differs: list[str]) -> None:
    run(net)
    first = tmp_path / "first.json"
    (tmp_path / "out.json").rename(first)
    against = run(net, "--against", str(first), *arguments)["against"]
    assert not against["comparable"]
    assert against["changed"] is None
    assert against["different"] == differs


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("time") / "net.prototxt"
    path.write_text(NET)
    found: dict[str, Any] = run(path)
    return found


def test_times_of_other_work_are_not_compared(result: dict[str, Any], net: Path) -> None:
    """The same names in a net with larger layers: a ratio would look like an upgrade that helps."""
    net.write_text(NET.replace("num_output: 5", "num_output: 7"))
    first = net.parent / "first.json"
    first.write_text(json.dumps(result))
    against = run(net, "--against", str(first))["against"]
    ratios = {row["layer"]: row["forward"] for row in against["layers"]}
    assert [name for name, ratio in ratios.items() if ratio is None] == ["one", "pool", "norm", "drop", "ip"]
    assert against["total"] == {"forward": None, "backward": None}
    assert "the net" in against["different"]


def test_a_net_of_another_text_and_the_same_work_is_compared(
    result: dict[str, Any], net: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net.write_text(NET + "# a word more\n")
    first = net.parent / "first.json"
    first.write_text(json.dumps(result))
    against = run(net, "--against", str(first))["against"]
    assert all(row["forward"] for row in against["layers"])
    assert against["total"]["backward"] > 0
    assert "time here / time there: forward" in capsys.readouterr().out


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_result_is_refused_or_compared_and_never_a_traceback(
    result: dict[str, Any], tmp_path: Path, data: st.DataObject
) -> None:
    mine = result | {"layers": result["layers"][2:4]}
    document = json.loads(json.dumps(mine))
    node = document
    for _ in range(data.draw(st.integers(0, 4))):
        inner = [key for key in (node if isinstance(node, dict) else range(len(node))) if node[key]]
        inner = [key for key in inner if isinstance(node[key], (dict, list))]
        if not inner:
            break
        node = node[data.draw(st.sampled_from(inner))]
    key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
    if data.draw(st.booleans()):
        del node[key]
    else:
        node[key] = data.draw(ANY)
    path = tmp_path / "other.json"
    path.write_text(json.dumps(document))
    try:
        other = time_compare.load(str(path))
    except UsageError:
        return
    here = {**mine, "against": time_compare.compare(mine, other, str(path))}
    render(here, Console(file=io.StringIO()))
    cli.dumps(here)


def test_results_for_standard_output(net: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(net), "--iterations", "2", "--backend", "numpy", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--iterations", "1"], "--iterations is out of range"),
        (["--against", "nowhere.json"], "nowhere.json cannot be read: No such file"),
        (["--against", "{net}"], "no result of gpu.time"),
        (["--backend", "tpu"], "unknown backend"),
        (["--json", "nowhere/x.json"], "cannot be written"),
        (["--threads", "0"], "at least 1"),
    ],
)
def test_wrong_use(net: Path, arguments: list[str], says: str) -> None:
    with pytest.raises(StallscopeError, match=says):
        main([str(net), "--iterations", "2", "--backend", "numpy", *(text.format(net=net) for text in arguments)])


def test_inputs_fit_what_reads_them() -> None:
    text = """
    layer { name: "d" type: "Input" top: "x" top: "index" top: "target" top: "which"
      input_param { shape { dim: 5 dim: 3 } shape { dim: 5 dim: 2 } shape { dim: 5 } shape { dim: 4 } } }
    layer { name: "e" type: "Embed" bottom: "index" top: "e" embed_param { input_dim: 7 num_output: 2 } }
    layer { name: "r" type: "BatchReindex" bottom: "x" bottom: "which" top: "r" }
    layer { name: "l" type: "SoftmaxWithLoss" bottom: "x" bottom: "target" top: "l" }
    """
    graph = bare_graph(filter_net(load_net(text), "TRAIN"), {}, 0)
    made = random_inputs(graph, 1)
    assert {name: array.dtype for name, array in made.items()} == dict.fromkeys(made, np.dtype(np.float32))
    for name, limit in (("index", 7), ("target", 3), ("which", 5)):
        assert set(made[name].reshape(-1)) <= set(range(limit)), name
    assert np.unique(made["x"]).size == 15
    again, other = random_inputs(graph, 1), random_inputs(graph, 2)
    assert all(np.array_equal(made[name], again[name]) for name in made)
    assert not np.array_equal(made["x"], other["x"])


def test_shapes_that_a_text_tells() -> None:
    def shapes(layer: str, batch: int | None = None) -> Any:
        return probe.given_shapes(filter_net(load_net(layer), "TRAIN"), {}, batch)

    data = 'layer { name: "d" type: "Data" top: "d" data_param { source: "x" batch_size: 4 } transform_param { %s } }'
    assert shapes(data % "crop_size: 8 force_gray: true") == {"d": (4, 1, 8, 8)}
    assert shapes(data % "crop_size: 8 mean_value: 1 mean_value: 2 mean_value: 3", 7) == {"d": (7, 3, 8, 8)}
    for silent in ("crop_size: 8", "crop_size: 8 mean_value: 1", "force_color: true"):
        with pytest.raises(StallscopeError, match="how large d is"):
            shapes(data % silent)
    images = """layer { name: "d" type: "ImageData" top: "d" top: "l"
      image_data_param { source: "x" batch_size: 2 new_height: 5 new_width: 6 } }"""
    assert shapes(images) == {"d": (2, 3, 5, 6)}
    assert shapes('layer { name: "i" type: "Input" top: "i" input_param { shape { dim: 2 dim: 3 } } }', 9) == {
        "i": (9, 3)
    }
